"""Predicts the bytes at every position of a schedule, in a few milliseconds for 20,000 runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from remat.core.errors import InvalidSchedule
from remat.core.graph import Graph
from remat.core.schedule import view_source

_Ints: TypeAlias = npt.NDArray[np.int64]
_CACHE_KEY: Final = "_simulator_arrays"
"""Where a graph's arrays are kept in the instance's own dictionary."""


@dataclass(frozen=True)
class Timeline:
    """What a schedule needs, position by position.

    Attributes:
        bytes: bytes in memory at each position of the schedule.
        peak_bytes: the largest of them; the pinned bytes for an empty schedule.
        peak_step: the first position that needs that many, or None for an empty schedule.
        live_at_peak: root tensors whose storage is alive there, largest first, pinned ones left out. A tensor with two
            storage instances alive stands twice.
        time_s: predicted seconds of all runs.
    """

    bytes: tuple[int, ...]
    peak_bytes: int
    peak_step: int | None
    live_at_peak: tuple[int, ...]
    time_s: float


def simulate(graph: Graph, schedule: Sequence[int]) -> Timeline:
    """Replay a schedule under the memory model of :mod:`remat.core.schedule`.

    Args:
        graph: the training step.
        schedule: op indices. Ops may be missing: then the timeline is that of the part.

    Raises:
        InvalidSchedule: for what cannot be replayed: an index out of range, a read of a storage that was not made.
            The other rules are left to :func:`remat.validate`.

    Complexity: O(runs + reads), and a logarithm for each read of a recomputed tensor, all of it in numpy.
    """
    arrays = _arrays_of(graph)
    runs = _as_indices(graph, schedule)
    if not len(runs):
        return Timeline((), graph.pinned_bytes, None, (), 0.0)
    replay = _Replay(graph, arrays, runs)
    bytes_ = replay.bytes_per_step()
    peak_step = int(np.argmax(bytes_))
    return Timeline(
        bytes=tuple(bytes_.tolist()),
        peak_bytes=int(bytes_[peak_step]),
        peak_step=peak_step,
        live_at_peak=replay.live_at(peak_step),
        # Exact summation: the same runs in another order cost exactly the same.
        time_s=math.fsum(arrays.time_s[runs].tolist()),
    )


@dataclass(frozen=True)
class StorageLifetimes:
    """Every storage instance that a schedule makes, in the order of birth; parallel arrays.

    Attributes:
        tensor: the root tensor that it holds.
        size_bytes: bytes of each.
        birth: the position that makes it.
        last: the last position that uses it.
        kept: True where it lives on to the end because it holds an output of the graph.
        taken_over: the storage instance whose bytes it takes over at birth, -1 where it needs its own.
        read: parallel to ``reader``, not to the others: a storage instance that is read, its birth left out.
        reader: the position that reads it; positions rise.
        lender: parallel to ``borrower``: a storage instance whose bytes may be taken over at the birth of another one,
            where nobody else reads it any more.
        borrower: that other instance.
    """

    tensor: _Ints
    size_bytes: _Ints
    birth: _Ints
    last: _Ints
    kept: npt.NDArray[np.bool_]
    taken_over: _Ints
    read: _Ints
    reader: _Ints
    lender: _Ints
    borrower: _Ints


def storage_lifetimes(graph: Graph, schedule: Sequence[int]) -> StorageLifetimes:
    """When each storage instance of a schedule is born and dies, for models of a real allocator.

    Pinned storages are left out. Errors and complexity are those of :func:`simulate`.
    """
    return _Replay(graph, _arrays_of(graph), _as_indices(graph, schedule)).lifetimes()


def bytes_alive(born: _Ints, gone: _Ints, size_bytes: _Ints, count: int) -> _Ints:
    """At each of so many positions, the bytes that are alive: instance i is from ``born[i]`` up to ``gone[i]``."""
    change = np.zeros(count + 1, dtype=np.int64)
    np.add.at(change, born, size_bytes)
    np.subtract.at(change, gone, size_bytes)
    return np.cumsum(change[:count])


def _as_indices(graph: Graph, schedule: Sequence[int]) -> _Ints:
    given = np.asarray(schedule)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise InvalidSchedule("index out of range", f"the schedule is not a sequence of op indices: {schedule!r:.200}")
    runs = given.astype(np.int64)
    wrong = np.flatnonzero((runs < 0) | (runs >= len(graph.ops)))
    if len(wrong):
        raise InvalidSchedule(
            "index out of range",
            f"position {wrong[0]} runs op {runs[wrong[0]]}, but the graph has {len(graph.ops)} ops",
        )
    return runs


@dataclass(frozen=True)
class _Rows:
    """Rows of unequal length laid end to end: row r is ``flat[start[r] : start[r] + count[r]]``."""

    flat: _Ints
    start: _Ints
    count: _Ints

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> _Rows:
        count = np.array([len(row) for row in rows], dtype=np.int64)
        flat = np.array([value for row in rows for value in row], dtype=np.int64)
        return cls(flat, np.cumsum(count) - count, count)

    def take(self, rows: _Ints) -> tuple[_Ints, _Ints]:
        """Positions in ``flat`` of the chosen rows, end to end, and which choice each belongs to."""
        count = self.count[rows]
        owner = np.repeat(np.arange(len(rows)), count)
        shift = self.start[rows] - (np.cumsum(count) - count)
        return np.arange(len(owner)) + shift[owner], owner


@dataclass(frozen=True)
class _Arrays:
    """The graph as arrays. Tensors with pinned storage are left out of all rows: they never change the count."""

    time_s: npt.NDArray[np.float64]
    workspace_bytes: _Ints
    size_bytes: _Ints  # by tensor; 0 for views
    producer: _Ints  # by tensor
    slot: _Ints  # by tensor: its place among the counted outputs of its producer
    reads: _Rows
    makes: _Rows
    source: _Ints  # parallel to makes.flat: the tensor that lends a view its storage, -1 for roots
    source_is_made_here: npt.NDArray[np.bool_]
    pair_sources: _Rows
    pair_targets: _Ints  # parallel to pair_sources.flat
    outputs: _Ints


def _arrays_of(graph: Graph) -> _Arrays:
    # Kept in the instance's own dictionary, as cached_property does: planners replay one graph thousands of times.
    cached = vars(graph).get(_CACHE_KEY)
    if not isinstance(cached, _Arrays):
        cached = _build_arrays(graph)
        vars(graph)[_CACHE_KEY] = cached
    return cached


def _build_arrays(graph: Graph) -> _Arrays:
    pinned_roots = {graph.roots[tensor] for tensor in graph.inputs}
    counted = [root not in pinned_roots for root in graph.roots]
    makes = [[tensor for tensor in op.outputs if counted[tensor]] for op in graph.ops]
    slot = np.zeros(len(graph.tensors), dtype=np.int64)
    source: list[int] = []
    made_here: list[bool] = []
    for op, made in zip(graph.ops, makes, strict=True):
        for place, tensor in enumerate(made):
            slot[tensor] = place
            is_root = graph.tensors[tensor].alias_of is None
            source.append(-1 if is_root else view_source(graph, op, tensor))
            made_here.append(source[-1] in made)
    pairs = [[(s, t) for s, t in op.in_place if counted[s] and graph.tensors[t].alias_of is None] for op in graph.ops]
    return _Arrays(
        time_s=np.array([op.time_s for op in graph.ops], dtype=np.float64),
        workspace_bytes=np.array([op.workspace_bytes for op in graph.ops], dtype=np.int64),
        size_bytes=np.array([t.size_bytes if t.alias_of is None else 0 for t in graph.tensors], dtype=np.int64),
        producer=np.array([-1 if op is None else op for op in graph.producer], dtype=np.int64),
        slot=slot,
        reads=_Rows.of([[t for t in dict.fromkeys(op.inputs) if counted[t]] for op in graph.ops]),
        makes=_Rows.of(makes),
        source=np.array(source, dtype=np.int64),
        source_is_made_here=np.array(made_here, dtype=np.bool_),
        pair_sources=_Rows.of([[s for s, _ in of_op] for of_op in pairs]),
        pair_targets=np.array([t for of_op in pairs for _, t in of_op], dtype=np.int64),
        outputs=np.array([tensor for tensor in graph.outputs if counted[tensor]], dtype=np.int64),
    )


class _Replay:
    """One replay. Every tensor instance has a number; ``storage`` maps it to the instance that owns its bytes."""

    def __init__(self, graph: Graph, arrays: _Arrays, runs: _Ints) -> None:
        self._graph = graph
        self._arrays = arrays
        self._runs = runs
        self._index_runs()
        place, self._birth = arrays.makes.take(runs)
        self._tensor = arrays.makes.flat[place]
        self._size = arrays.size_bytes[self._tensor]
        self._first_instance = np.cumsum(arrays.makes.count[runs]) - arrays.makes.count[runs]
        self._storage = self._bind_views(place)
        self._read, self._reader = self._find_reads()
        self._last, self._kept = self._find_last_use()

    def bytes_per_step(self) -> _Ints:
        alive = bytes_alive(self._birth, self._last + 1, self._size, len(self._runs))
        total: _Ints = self._graph.pinned_bytes + alive + self._arrays.workspace_bytes[self._runs]
        return total - self._saved_in_place()

    def live_at(self, position: int) -> tuple[int, ...]:
        is_root = self._storage == np.arange(len(self._storage))
        alive = is_root & (self._birth <= position) & (position <= self._last)
        tensors, sizes = self._tensor[alive], self._size[alive]
        return tuple(tensors[np.lexsort((tensors, -sizes))].tolist())

    def _index_runs(self) -> None:
        ops = len(self._graph.ops)
        order = np.argsort(self._runs, kind="stable")
        self._run_count = np.bincount(self._runs, minlength=ops)
        first = np.cumsum(self._run_count) - self._run_count
        # One more entry, so that an op that never runs still has a place to look at.
        self._order = np.append(order, len(self._runs))
        self._first_run = self._order[first]
        self._last_run = self._order[first + self._run_count - 1]
        self._run_keys = self._runs[order] * (len(self._runs) + 1) + order

    def _newest_instance(self, tensors: _Ints, before: _Ints) -> _Ints:
        """The newest instance of each tensor made strictly before the given positions."""
        producers = self._arrays.producer[tensors]
        made = self._first_run[producers]
        many = np.flatnonzero(self._run_count[producers] > 1)
        keys = producers[many] * (len(self._runs) + 1) + before[many]
        # The run found may belong to a lower op where none of this one came before; then its first run is too late.
        found = self._order[np.searchsorted(self._run_keys, keys) - 1]
        made[many] = np.where(made[many] < before[many], found, made[many])
        wrong = np.flatnonzero((made >= before) | (self._run_count[producers] == 0))
        if len(wrong):
            position, tensor = int(before[wrong[0]]), int(tensors[wrong[0]])
            reader = self._graph.describe_op(int(self._runs[position]))
            raise InvalidSchedule(
                "unmade input",
                f"position {position} runs {reader}, which reads tensor {tensor} "
                f"({self._graph.tensors[tensor].name!r}) before {self._graph.describe_op(int(producers[wrong[0]]))} "
                "has made it",
            )
        instances: _Ints = self._first_instance[made] + self._arrays.slot[tensors]
        return instances

    def _bind_views(self, place: _Ints) -> _Ints:
        arrays = self._arrays
        storage = np.arange(len(self._tensor))
        here = np.flatnonzero(arrays.source_is_made_here[place])
        source = arrays.source[place]
        storage[here] = self._first_instance[self._birth[here]] + arrays.slot[source[here]]
        read = np.flatnonzero((source >= 0) & ~arrays.source_is_made_here[place])
        storage[read] = self._newest_instance(source[read], self._birth[read])
        while True:  # Views of views: each round halves the distance to the root.
            further: _Ints = storage[storage]
            if np.array_equal(further, storage):
                return storage
            storage = further

    def _find_reads(self) -> tuple[_Ints, _Ints]:
        place, position = self._arrays.reads.take(self._runs)
        return self._storage[self._newest_instance(self._arrays.reads.flat[place], position)], position

    def _find_last_use(self) -> tuple[_Ints, npt.NDArray[np.bool_]]:
        arrays = self._arrays
        last = self._birth.copy()
        last[self._read] = self._reader  # Positions rise, and of repeated indices numpy keeps the last assignment.
        kept = np.zeros(len(last), dtype=np.bool_)
        made = arrays.outputs[self._run_count[arrays.producer[arrays.outputs]] > 0]
        newest = self._first_instance[self._last_run[arrays.producer[made]]] + arrays.slot[made]
        kept[self._storage[newest]] = True
        last[kept] = len(self._runs) - 1
        return last, kept

    def lifetimes(self) -> StorageLifetimes:
        roots = np.flatnonzero(self._storage == np.arange(len(self._storage)))
        number = np.full(len(self._storage), -1, dtype=np.int64)
        number[roots] = np.arange(len(roots))
        taken_over = np.full(len(roots), -1, dtype=np.int64)
        for _, lent, to, _ in self._takeovers():
            taken_over[number[to]] = number[lent]
        _, lender, borrower = self._in_place_pairs
        return StorageLifetimes(
            tensor=self._tensor[roots],
            size_bytes=self._size[roots],
            birth=self._birth[roots],
            last=self._last[roots],
            kept=self._kept[roots],
            taken_over=taken_over,
            read=number[self._read],
            reader=self._reader,
            lender=number[lender],
            borrower=number[borrower],
        )

    def _saved_in_place(self) -> _Ints:
        saved = np.zeros(len(self._runs), dtype=np.int64)
        for position, _, _, gain in self._takeovers():
            saved[position] += gain
        return saved

    @cached_property
    def _in_place_pairs(self) -> tuple[_Ints, _Ints, _Ints]:
        """Position, source storage and target storage of all in-place pairs whose source is not kept to the end."""
        arrays = self._arrays
        place, position = arrays.pair_sources.take(self._runs)
        if not len(place):
            return position, position, position
        source = self._storage[self._newest_instance(arrays.pair_sources.flat[place], position)]
        target = self._first_instance[position] + arrays.slot[arrays.pair_targets[place]]
        lends = ~self._kept[source]
        return position[lends], source[lends], target[lends]

    def _takeovers(self) -> list[tuple[int, int, int, int]]:
        """The in-place pairs that happen: (position, source storage, target storage, bytes saved)."""
        position, source, target = self._in_place_pairs
        if not len(position):
            return []
        free = self._last[source] == position
        smaller = np.minimum(self._size[source], self._size[target])
        found: list[tuple[int, int, int, int]] = []
        taken: set[int] = set()
        given: set[int] = set()
        for at, lent, to, gain in zip(
            position[free].tolist(), source[free].tolist(), target[free].tolist(), smaller[free].tolist(), strict=True
        ):
            if lent not in given and to not in taken:
                given.add(lent)
                taken.add(to)
                found.append((at, lent, to, gain))
        return found
