"""The seconds of a step on a CPU, with what the place of its bytes does to them.

A roofline counts every byte that an op reads and writes as one from main memory. On a CPU most of them are not: what
was touched a moment ago lies in a cache, which is a few times as fast. How much of a step lies there depends on the
schedule: a plan that holds little uses the same addresses again and again, so that the ops which it does not touch run
faster, too. Seen with TensorFlow on six models: ops that run once took 6 to 10 % less of the step under a plan.

So a schedule is replayed on a heap that gives every storage an address, and on a cache that keeps what was used last
(least recently used out, E. Coffman, P. Denning, "Operating Systems Theory", 1973). An op takes what its arithmetic or
the traffic within caches takes, and each byte that is in no cache the time of main memory beside that.

Planners go on minimising the roofline's seconds: this only says what a finished plan is expected to take.
"""

from __future__ import annotations

import os
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

from remat.core.graph import Graph, Op
from remat.core.simulator import storage_lifetimes
from remat.running.best_fit_heap import Heap
from remat.running.cost_model import DeviceProfile

_USUAL_CACHE_BYTES: Final = 32 << 20
"""The last-level cache where the system does not tell its size: that of many server CPUs. Too large, steps that hold
more are predicted too fast, and plans that hold less gain too little."""

_LINE_BYTES: Final = 64 << 10
"""Caches keep lines of 64 bytes; here 64 KiB are one, which is a thousand times less work. Storages that are smaller
share a line with their neighbours, which makes them look nearer than they are."""

_MOST_LINES: Final = 200_000
"""Lines that a step touches, at most; of steps that touch more, lines are larger. A judgement: 200,000 take .2 s."""

_REPLAYS: Final = 2
"""Of which the last counts: it begins with what the step before left in the cache."""

_ROUNDING: Final = 1.01  # By which seconds of traffic may be above those of all bytes, and be traffic still.

_FIRST_REGION_BYTES: Final = 1 << 20  # As in ``AllocatorModel``; addresses alone matter here.


def cache_bytes() -> int:
    """Size of this machine's last-level cache."""
    try:
        size = os.sysconf("SC_LEVEL3_CACHE_SIZE")
    except (AttributeError, OSError, ValueError):
        return _USUAL_CACHE_BYTES
    return size if size > 0 else _USUAL_CACHE_BYTES


def step_time_s(
    graph: Graph,
    schedule: Sequence[int],
    profile: DeviceProfile,
    *,
    timed_alone: bool = False,
    cached_bytes: int | None = None,
) -> float:
    """Seconds of one step among many, pages that it fetches anew left out.

    Args:
        graph: the step; the seconds of its ops are those of the profile's roofline.
        schedule: op indices.
        profile: of a CPU.
        timed_alone: are the seconds of the ops measured in place of that, each op run over and over by itself? Then
            what it reads lay in caches.
        cached_bytes: what the last-level cache holds for this process; None for all of it.

    Complexity: O(bytes touched / line), in Python; twice.
    """
    in_caches_s = [op.time_s if timed_alone else _in_caches_s(graph, op, profile) for op in graph.ops]
    holds = cache_bytes() if cached_bytes is None else cached_bytes
    return sum(in_caches_s[op] for op in schedule) + missed_bytes(graph, schedule, holds) / profile.memory_rate


def _in_caches_s(graph: Graph, op: Op, profile: DeviceProfile) -> float:
    """Seconds of an op whose bytes are in caches: traffic is faster there, arithmetic is not."""
    work_s = op.time_s - profile.overhead_s
    if work_s <= 0:
        return op.time_s
    all_bytes = sum(graph.tensors[root].size_bytes for root in {graph.roots[t] for t in (*op.inputs, *op.outputs)})
    if work_s > _ROUNDING * all_bytes / profile.memory_rate:
        return op.time_s
    return profile.overhead_s + work_s * profile.memory_rate / profile.cached_rate


def missed_bytes(graph: Graph, schedule: Sequence[int], cache_bytes: int) -> int:
    """Bytes that a step reads and writes and that are not in the cache when it does.

    Args:
        graph: the step.
        schedule: op indices.
        cache_bytes: what the cache holds.
    """
    addresses = _Addresses(graph, schedule)
    touched = list(addresses.touched())
    line_bytes = max(_LINE_BYTES, sum(size for _, size in touched) // _MOST_LINES)
    cache = _Cache(max(1, cache_bytes // line_bytes), line_bytes)
    missed = 0
    for _ in range(_REPLAYS):
        missed = sum(cache.missed_bytes(address, size) for address, size in touched)
    return missed


class _Cache:
    """A cache from which the least recently used line goes first."""

    def __init__(self, lines: int, line_bytes: int) -> None:
        self._most = lines
        self._line_bytes = line_bytes
        self._lines: OrderedDict[int, None] = OrderedDict()

    def missed_bytes(self, address: int, size: int) -> int:
        """Touch a stretch of memory; how many of its bytes were not there."""
        missed = 0
        end = address + size
        for line in range(address // self._line_bytes, -(-end // self._line_bytes)):
            if line in self._lines:
                self._lines.move_to_end(line)
                continue
            start = line * self._line_bytes
            missed += min(end, start + self._line_bytes) - max(address, start)
            self._lines[line] = None
            if len(self._lines) > self._most:
                self._lines.popitem(last=False)
        return missed


class _Addresses:
    """Where the storages of a schedule lie."""

    def __init__(self, graph: Graph, schedule: Sequence[int]) -> None:
        self._graph = graph
        self._schedule = schedule
        self._heap = Heap(_FIRST_REGION_BYTES)
        self._of_root: dict[int, int] = {}
        for root in sorted({graph.roots[tensor] for tensor in graph.inputs}):
            if size := graph.tensors[root].size_bytes:
                self._of_root[root] = self._heap.allocate(size)

    def touched(self) -> Iterable[tuple[int, int]]:
        """Addresses and sizes of what a step touches, in its order; a view, which costs no time, touches nothing."""
        graph = self._graph
        lives = storage_lifetimes(graph, self._schedule)
        roots, sizes, lent = lives.tensor.tolist(), lives.size_bytes.tolist(), lives.taken_over.tolist()
        births: defaultdict[int, list[int]] = defaultdict(list)
        deaths: defaultdict[int, list[int]] = defaultdict(list)
        for number, (birth, last, kept) in enumerate(
            zip(lives.birth.tolist(), lives.last.tolist(), lives.kept.tolist(), strict=True)
        ):
            births[birth].append(number)
            if not kept:
                deaths[last].append(number)
        held: dict[int, int] = {}
        for position, index in enumerate(self._schedule):
            for number in births.get(position, ()):
                if not sizes[number]:
                    continue
                source = lent[number]
                if source in held and sizes[source] == sizes[number]:
                    held[number] = held.pop(source)
                else:
                    held[number] = self._heap.allocate(sizes[number])
                self._of_root[roots[number]] = held[number]
            op = graph.ops[index]
            if op.time_s > 0:
                for root in dict.fromkeys(graph.roots[tensor] for tensor in (*op.inputs, *op.outputs)):
                    if root in self._of_root and graph.tensors[root].size_bytes:
                        yield self._of_root[root], graph.tensors[root].size_bytes
            for number in deaths.get(position, ()):
                if number in held:
                    self._heap.free(held.pop(number))
