"""Predicts the bytes that a schedule takes on the device: every tensor, and what the allocator adds to the large ones.

TensorFlow's best-fit-with-coalescing (BFC) allocator hands out a whole free chunk unless the request is less than
half of it, so a step holds several per cent more than the sum of its tensors. How much more depends on the holes that
the heap has when the step begins, and changes from step to step. So a schedule is replayed on several heaps: on the
one that is there, where its holes are known, else on heaps with random histories. On a CPU with oneDNN, blocks under
256 KiB go past that heap, and past its counter: they are added at their own size. Without oneDNN there is no such heap,
and every block is. So a peak is what a budget means, of which the counter may show less. The measurements are in
docs/tensorflow_peaks.md.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import tensorflow as tf

from remat.core.graph import Graph
from remat.core.simulator import simulate
from remat.fit.peaks import PeakRange
from remat.running.best_fit_heap import ENDLESS_BYTES, Heap
from remat.tensorflow.peak.blocks import BlockEvent, StepBlocks, moved_variables
from remat.tensorflow.peak.executor import Run, one_by_one, side_by_side
from remat.tensorflow.peak.reserves import TAIL_IN_RESERVE
from remat.tensorflow.peak.spans import span_starts
from remat.tensorflow.trace.cpu_scratch import NOT_IN_ONEDNN

# How the pasts of the heaps are drawn. Chosen on 68 plans of seven networks and checked on 45 later plans of ten models
# (docs/tensorflow_peaks.md): the expected peak was .99 of the measured one, and no measured peak above the budget. With
# fewer heaps or tamer pasts the highest peak is too low and budgets break; with more, budgets stay partly unused.
_HEAPS_TO_EXPECT: Final = 8
_HEAPS_TO_HOLD: Final = 16
_ALLOCATE_SHARE: Final = 0.6  # Of the events of a past; the rest frees.
_MOST_OTHERS: Final = 8  # Blocks of others that stay.

_SOUNDED_RUNS: Final = 64
"""Where the heap's holes are known: runs that are replayed there one after the other, each in another order.

Measured: docs/tensorflow_peaks.md. With fewer, the highest peak is too low and budgets break; with more, planning takes
longer.
"""

_STEPS_WITH_MOVES: Final = 8
"""Steps that are replayed one after the other where a step assigns new tensors to variables.

What is assigned stays where it was made, in a chunk that may be larger, so that a step finds other holes than the one
before. With fewer, small budgets break (docs/tensorflow_peaks.md); with more, planning takes longer.
"""

_HEAPS_WITH_MOVES: Final = 4
"""Heaps on which runs are replayed, where the holes are known and a step assigns new tensors to variables.

Measured: of a MobileNet in 97 MiB steps took 83 to 100 MiB, and 83 to 98 on such heaps; with each variable a chunk by
itself, whose place the next one of its size takes, 83 to 92.
"""

_RUNS_OF_THE_TAIL: Final = 8
_TIMES_AS_MANY: Final = 10
"""The highest peak is that of so many times the runs that are replayed, by the mean excess of the highest ones.

Far above their middle, peaks fall off by an exponential, whose mean tells what the most of more of them comes to
(Pickands 1975). Measured on the residual blocks in 116 MiB: 64 runs at most 107.3 MiB, steps 109 to 120.
"""

_STEPS_ONE_BY_ONE: Final = 8
"""Where the heap's holes are known: steps that are replayed there one after the other, all in the same order.

A judgement: where that is asked for, most of them are as high as the first.
"""

_PAST: Final = (0, None)
"""An event of a past in which a block comes or goes."""


@dataclass(frozen=True)
class AllocatorModel:
    """How a device uses and counts memory.

    Attributes:
        min_counted_bytes: smaller blocks go past the heap, at their own size, and are missing from its statistics.
        converts_half: do matrix products of half precision make float32 copies of their operands and results?
        first_region_bytes: what the allocator takes from the device at first; a GPU's takes all that there is.
        own_kernels: which operations run TensorFlow's own kernels for CPUs: all of them, or those that oneDNN has no
            kernels for, among them those of float64, or none.
        compiles_calls: does XLA compile functions by themselves that a step calls and that ask for it? Not where it
            compiles the step as a whole.
        holes: the free chunks of the heap as it is now, in bytes, the lowest address first; None where they are not
            known. What fits in none is in a region of its own.
        threads: operations that run at a time, at most.
    """

    min_counted_bytes: int
    converts_half: bool = False
    first_region_bytes: int = 1 << 20
    own_kernels: Literal["all", "not in oneDNN", "none"] = "none"
    compiles_calls: bool = True
    holes: tuple[int, ...] | None = None
    threads: int = 1

    def runs_own_kernel(self, op: tf.Operation) -> bool:
        """Does TensorFlow's own kernel for CPUs run the operation, whose scratch memory is known?"""
        if self.own_kernels == "not in oneDNN":
            return op.type in NOT_IN_ONEDNN or (bool(op.outputs) and op.outputs[0].dtype == tf.float64)
        return self.own_kernels == "all"

    def counted(self, size_bytes: int) -> int:
        """Bytes that the statistics will show for a tensor of this size."""
        return size_bytes if size_bytes >= self.min_counted_bytes else 0

    def peak_range(
        self, graph: Graph, schedule: Sequence[int], in_one_order: bool = False, handed_in: Collection[int] = ()
    ) -> PeakRange:
        """The largest sum of chunks in use while the step runs, over heaps with different histories.

        Args:
            graph: the step; its pinned inputs are allocated before it and stay.
            schedule: op indices.
            in_one_order: does every operation wait for the end of the one before it?
            handed_in: pinned inputs that are made anew for each step, by the tensors that own their storages.

        Returns:
            Pinned inputs at their own sizes, the rest as chunks. Expected is the middle of what heaps show whose pinned
            inputs lie side by side, as those of a program that makes its variables first do; highest is the most on
            these and on heaps whose pinned inputs lie anywhere. Where the heap's holes are known, the middle of what
            runs of the schedule on all threads take there, one after the other, and what the most of many more would.
        """
        if self.holes is not None:
            return self._on_sounded_heap(graph, schedule, in_one_order, handed_in)
        return self._on_heaps_with_a_past(graph, schedule)

    def _on_heaps_with_a_past(self, graph: Graph, schedule: Sequence[int]) -> PeakRange:
        pinned = self._pinned_bytes(graph)
        events = list(StepBlocks.of(graph, schedule).events(one_by_one(schedule)))
        sizes = [event.size_bytes for event in events if self._is_on_heap(event)]
        steps = _STEPS_WITH_MOVES if any(event.moves_to is not None for event in events) else 1
        step = self._replayable(events)

        def added(heaps: int, pinned_first: bool) -> list[int]:
            pasts = (self._heap_with_a_past(pinned, sizes, pinned_first, seed) for seed in range(heaps))
            return sorted(_added(heap, [step] * steps)[-1] for heap in pasts)

        to_expect = added(_HEAPS_TO_EXPECT, pinned_first=True)
        highest = max(to_expect[-1], added(_HEAPS_TO_HOLD, pinned_first=False)[-1])
        pinned_bytes = sum(pinned.values())
        return PeakRange(pinned_bytes + to_expect[_HEAPS_TO_EXPECT // 2], pinned_bytes + highest)

    def _on_sounded_heap(
        self, graph: Graph, schedule: Sequence[int], in_one_order: bool, handed_in: Collection[int]
    ) -> PeakRange:
        """On the heap as it is, over orders in which the executor may run the schedule."""
        blocks = StepBlocks.of(graph, schedule)
        added: list[int] = []
        for heap, before, runs in self._on_sounded_heaps(graph, schedule, in_one_order, handed_in):
            added += (self._replayable(blocks.events(run)).peak_on(heap) - before for run in runs)
        added.sort()
        pinned_bytes = sum(self._pinned_bytes(graph).values())
        tail = added[-_RUNS_OF_THE_TAIL:]
        most = pinned_bytes + added[-1]
        if not in_one_order:
            further = math.log(_TIMES_AS_MANY) * (sum(tail) / len(tail) - tail[0])
            most = max(most, int((most + further) / (1 + TAIL_IN_RESERVE)))
        return PeakRange(pinned_bytes + added[len(added) // 2], most)

    def _on_sounded_heaps(
        self, graph: Graph, schedule: Sequence[int], in_one_order: bool, handed_in: Collection[int]
    ) -> Iterator[tuple[Heap, int, Iterator[Run]]]:
        """Heaps with the holes that are known, what pinned inputs take of each, and the runs to be replayed on it.

        Where pinned inputs lie is not known. Each is a chunk by itself, but those that are made anew for each step take
        holes on half of the heaps, as those of all steps but the first one may. Variables that move lie right before
        holes, each time before others: their chunks join these as they go, and a new chunk divides one.
        """
        pinned = self._pinned_bytes(graph)
        counted = {root: size for root, size in pinned.items() if self.counted(size)}
        moved = [root for root in dict.fromkeys(moved_variables(graph)) if root in counted]
        anew = counted.keys() & set(handed_in)
        heaps = (1 + bool(anew)) * (_HEAPS_WITH_MOVES if moved else 1)
        for number in range(heaps):
            in_holes = anew if number % 2 else frozenset()
            heap = self._sounded_heap({root: counted[root] for root in moved}, number)
            alone = (root for root in counted if root not in in_holes and root not in heap.of_inputs)
            heap.of_inputs.update((root, heap.allocate_alone(counted[root])) for root in alone)
            before = heap.in_use_bytes + sum(counted[root] for root in in_holes)
            heap.of_inputs.update((root, heap.allocate(counted[root])) for root in counted if root in in_holes)
            if in_one_order:
                runs: Iterator[Run] = itertools.repeat(one_by_one(schedule), _STEPS_ONE_BY_ONE)
            else:
                seeds = range(number, _SOUNDED_RUNS, heaps)
                runs = side_by_side(graph, schedule, span_starts(graph, schedule), self.threads, seeds)
            yield heap, before, runs

    def _sounded_heap(self, moved: Mapping[int, int], seed: int) -> Heap:
        """A heap with the holes that are known, and these pinned inputs right before them."""
        holes = list(self.holes or ())
        if ENDLESS_BYTES not in holes:
            holes.append(ENDLESS_BYTES)
        draw = random.Random(seed)
        before: list[list[int]] = [[] for _ in holes]
        for root in draw.sample(sorted(moved), len(moved)):
            draw.choice(before).append(root)
        heap = Heap(1)
        for roots, hole_bytes in zip(before, holes, strict=True):
            addresses = heap.add_hole_behind((moved[root] for root in roots), hole_bytes)
            heap.of_inputs.update(zip(roots, addresses, strict=True))
        return heap

    def steps_are_alike(self, graph: Graph) -> bool:
        """Does a step whose operations run in one order take as much each time?

        Where the heap's holes are known, and no variable moves on it: a step leaves the holes then that it found.
        """
        moved = (graph.tensors[variable].size_bytes for variable in moved_variables(graph))
        return self.holes is not None and not any(map(self.counted, moved))

    def over_at(
        self,
        graph: Graph,
        schedule: Sequence[int],
        target_bytes: int,
        in_one_order: bool = False,
        handed_in: Collection[int] = (),
    ) -> dict[int, int]:
        """The operations during which a run of a schedule has more in use than a target, where holes are known.

        Args:
            graph: the step.
            schedule: op indices.
            target_bytes: what the highest peak may be.
            in_one_order: does every operation wait for the end of the one before it?
            handed_in: as for ``peak_range``.

        Returns:
            For each, the most bytes beyond the schedule's own at its runs that make it so: what the heap loses, and
            what other operations of its span hold.
        """
        blocks = StepBlocks.of(graph, schedule)
        own = simulate(graph, schedule).bytes
        pinned_bytes = sum(self._pinned_bytes(graph).values())
        found: dict[int, int] = {}
        for heap, before, runs in self._on_sounded_heaps(graph, schedule, in_one_order, handed_in):
            for run in runs:
                clock = _Clock(run)
                step = self._replayable(blocks.events(clock), clock)
                for place, in_use in zip(step.places, step.in_use_on(heap), strict=True):
                    bytes_ = pinned_bytes + in_use - before
                    if bytes_ > target_bytes:
                        found[schedule[place]] = max(found.get(schedule[place], 0), bytes_ - own[place])
        return found

    def peak_on_a_new_heap(self, graph: Graph, schedule: Sequence[int], steps: int = 1) -> int:
        """As ``peak_range`` for some steps that are the first thing on the device."""
        pinned = self._pinned_bytes(graph)
        step = self._replayable(StepBlocks.of(graph, schedule).events(one_by_one(schedule)))
        return sum(pinned.values()) + _added(self._new_heap(pinned), [step] * steps)[-1]

    def peak_with_blocks(self, graph: Graph, blocks: Sequence[int]) -> PeakRange:
        """The sum of chunks in use while a compiled program runs, which allocates its blocks at once.

        Args:
            graph: the step, for its pinned inputs.
            blocks: bytes of each block.
        """
        pinned = self._pinned_bytes(graph)
        heap = self._new_heap(pinned)
        before = heap.in_use_bytes
        beside = 0
        for size in blocks:
            if counted := self.counted(size):
                heap.allocate(counted)
            else:
                beside += size
        return PeakRange.exactly(sum(pinned.values()) + heap.in_use_bytes - before + beside)

    def _new_heap(self, pinned: Mapping[int, int]) -> Heap:
        heap = Heap(self.first_region_bytes)
        for root, size in pinned.items():
            if self.counted(size):
                heap.of_inputs[root] = heap.allocate(size)
        return heap

    def _heap_with_a_past(self, pinned: Mapping[int, int], sizes: Sequence[int], pinned_first: bool, seed: int) -> Heap:
        """A heap after blocks of ``sizes`` have come and gone between ``pinned`` and a few other blocks, which stay."""
        heap = self._new_heap(pinned if pinned_first else {})
        draw = random.Random(seed)
        roots = [root for root, size in pinned.items() if not pinned_first and self.counted(size)]
        events = [*((pinned[root], root) for root in roots), *[_PAST] * draw.randrange(len(sizes) + 1)]
        events += [(size, None) for size in draw.choices(sizes, k=draw.randrange(_MOST_OTHERS + 1))] if sizes else []
        draw.shuffle(events)
        gone: list[int] = []
        for size, root in events:
            if size:
                address = heap.allocate(size)
                if root is not None:
                    heap.of_inputs[root] = address
            elif not gone or draw.random() < _ALLOCATE_SHARE:
                gone.append(heap.allocate(draw.choice(sizes)))
            else:
                heap.free(gone.pop(draw.randrange(len(gone))))
        for address in gone:
            heap.free(address)
        return heap

    def _pinned_bytes(self, graph: Graph) -> dict[int, int]:
        """The sizes of pinned inputs, by the tensor that owns the storage."""
        sizes = {root: graph.tensors[root].size_bytes for root in {graph.roots[t] for t in graph.inputs}}
        return {root: size for root, size in sizes.items() if size}

    def _is_on_heap(self, event: BlockEvent) -> bool:
        return bool(event.size_bytes) and event.size_bytes >= self.min_counted_bytes

    def _replayable(self, events: Iterable[BlockEvent], clock: _Clock | None = None) -> _Step:
        """The events of a step, of which many heaps are to see those that are theirs.

        Args:
            events: of all blocks.
            clock: what the events are made from, where their places are wanted.
        """
        beside = most_beside = 0
        held_beside: dict[int, int] = {}
        on_heap: list[BlockEvent] = []
        most: list[int] = []
        places: list[int] = []
        for event in events:
            if self._is_on_heap(event) or (not event.size_bytes and event.block not in held_beside):
                on_heap.append(event)
                most.append(most_beside)
                most_beside = beside
                if clock is not None:
                    places.append(clock.place)
            elif event.size_bytes:
                held_beside[event.block] = event.size_bytes * event.pieces
                beside += held_beside[event.block]
            else:
                beside -= held_beside.pop(event.block)
            most_beside = max(most_beside, beside)
        most.append(most_beside)
        return _Step(on_heap, most[1:], most[0], places)


class _Clock:
    """The events of a run, one after the other, and the position in the schedule of the last one."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.place = 0

    def __iter__(self) -> Iterator[int]:
        for event in self._run:
            self.place = event if event >= 0 else ~event
            yield event


@dataclass(frozen=True)
class _Step:
    """What the heap sees of a step, and the bytes beside it.

    Attributes:
        events: of blocks on the heap.
        most_beside: behind each event, the most bytes beside the heap up to the next one.
        most_before: the same before the first event.
        places: for each event, the position in the schedule of the operation that makes it; empty where not asked for.
    """

    events: Sequence[BlockEvent]
    most_beside: Sequence[int]
    most_before: int
    places: Sequence[int]

    def peak_on(self, heap: Heap) -> int:
        """The most that is in use while the step runs, on the heap and beside it. The heap is left as it is behind."""
        before = heap.in_use_bytes + self.most_before
        return max(before, max(self.in_use_on(heap), default=before))

    def in_use_on(self, heap: Heap) -> Iterator[int]:
        """Behind each event, what is in use up to the next one, on the heap and beside it."""
        held: dict[int, list[int]] = {}
        for event, beside in zip(self.events, self.most_beside, strict=True):
            if event.pieces == 1:
                held[event.block] = [heap.allocate(event.size_bytes)]
            elif event.size_bytes:
                held[event.block] = [heap.allocate(event.size_bytes) for _ in range(event.pieces)]
            else:
                addresses = held.pop(event.block, [])
                if event.moves_to in heap.of_inputs and len(addresses) == 1:
                    addresses = [heap.move_input(event.moves_to, addresses[0])]
                for address in addresses:
                    heap.free(address)
            yield heap.in_use_bytes + beside


def _added(heap: Heap, steps: Iterable[_Step]) -> list[int]:
    """The most that each of some steps in a row has in use beyond what was before the first, the least first."""
    before = heap.in_use_bytes
    return sorted(step.peak_on(heap) - before for step in steps)
