"""Where storages are kept and ops run again, as a linear model over windows of a schedule.

Memory is looked at where a few chosen ops first run, the *samples*, in program order. A *window* reaches from one
sample to another. For each storage and sample a variable says whether it is in memory across it (*kept*), for each op
and window whether the op runs again within (*again*). Of every legal schedule that keeps first runs in program order
these values obey the rows below, so that the least cost of the model is a bound:

- what a first run in a window reads, made before the window, is kept across its beginning or made again in it;
- what is kept across the end of a window was kept across its beginning or made again in it;
- what an op that runs again in a window reads, made before it, is kept across its beginning or made again in it;
- at a sample, the storages kept across it fit beside what the op there reads and makes.

Windows are nested, each of two halves: an op that runs again in a window does so in a half. The wide windows matter
most. Over the one that reaches from the heaviest step to the end, half a storage cannot be made from the same half of
another twice, as it could with narrow windows alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from remat.planners.linear.highs import LinearModel, ModelBuilder
from remat.planners.view.problem import IntArray, Problem


@dataclass(frozen=True, eq=False)
class _Window:
    """From the first run of sample ``start``, without it, to that of sample ``stop``; ``halves`` lie in it."""

    start: int
    stop: int
    halves: tuple[_Window, ...] = ()


@dataclass(eq=False)
class WindowModel:
    """The model for one budget.

    Attributes:
        problem: the graph.
        budget_bytes: peak bytes of the step.
        samples: how many steps of the plain schedule over the budget to look at, at most.
        chosen: the steps to look at instead, rising; then there is a window between every two of them.
        reserved_bytes: for steps among these, what stays free there beside what the rows count.
        whole_numbers: whether storages are kept altogether or not at all; a bound needs no such thing.
        follows_gradients: whether what gradients are made from is followed beyond its last use, as a better bound
            needs it; the model is larger then.
        kept: the column of a storage and a sample, where both are in the model.
        memory_rows: for each sample, the row of its memory.
    """

    problem: Problem
    budget_bytes: int
    samples: int
    whole_numbers: bool = False
    chosen: tuple[int, ...] = ()
    reserved_bytes: Mapping[int, int] = field(default_factory=dict)
    follows_gradients: bool = False
    builder: ModelBuilder = field(default_factory=ModelBuilder, init=False)
    kept: dict[tuple[int, int], int] = field(default_factory=dict, init=False)
    memory_rows: list[int] = field(default_factory=list, init=False)
    _again: dict[tuple[int, _Window], int] = field(default_factory=dict, init=False)

    @cached_property
    def linear(self) -> LinearModel:
        """The model; without columns where the plain schedule fits. Its costs are in ``time_unit_s``."""
        if len(self.places):
            self._add_kept()
            for window in self.windows:
                self._add_again(window)
                self._add_window(window)
            for sample in range(len(self.places)):
                self.memory_rows.append(len(self.builder.row_low))
                self._add_memory(sample)
        return self.builder.build()

    @cached_property
    def time_unit_s(self) -> float:
        """Seconds of the dearest op, up to a power of two."""
        return _power_of_two(max(self.problem.op_time_s, default=0.0))

    @cached_property
    def places(self) -> IntArray:
        """The op of each sample: the heaviest of each stretch over the budget, from the heaviest of all on."""
        if self.chosen:
            return np.array(self.chosen, dtype=np.int64)
        load = np.array(self.problem.plain.bytes, dtype=np.int64)
        start = int(np.argmax(load)) if len(load) else 0
        over = start + np.flatnonzero(load[start:] > self.budget_bytes)
        stretches = np.array_split(over, min(self.samples, len(over))) if len(over) else []
        return np.array([int(stretch[np.argmax(load[stretch])]) for stretch in stretches], dtype=np.int64)

    @cached_property
    def windows(self) -> list[_Window]:
        """The windows, halves before the wholes that they make up."""
        return _between_all(len(self.places)) if self.chosen else _nested(0, len(self.places))

    @cached_property
    def _counts(self) -> list[bool]:
        """For each tensor, whether its storage is followed. What is not costs nothing, and is always there."""
        problem = self.problem
        return [size > 0 and not small for size, small in zip(problem.size, problem.small, strict=True)]

    @cached_property
    def followed(self) -> list[int]:
        """The storages that are followed."""
        return [s for s in self.problem.storages if self._counts[s]]

    @cached_property
    def _until(self) -> dict[int, int]:
        """For each followed storage, the op after which its life is not followed any more.

        Beyond its last use in program order it may be wanted for recomputations. Those of forward ops are followed to
        the end, those of backward ops, which are many and rarely pay, are not, or only while what a reader makes is in
        use. Without that a gradient is made again at the price of its last op.
        """
        problem = self.problem
        until: dict[int, int] = {}
        for s in reversed(self.followed):
            until[s] = problem.uses[s][-1]
            if self.follows_gradients:
                until[s] = max([until[s], *(problem.uses[m][-1] for m in self._made_from(s))])
            for op in problem.consumers[s]:
                if op <= problem.turning_point and problem.graph.ops[op].recomputable:
                    until[s] = max([until[s], *(until[m] for m in problem.storages_made[op] if m in until)])
        return until

    def _made_from(self, s: int) -> list[int]:
        """The followed storages that may be made again from one."""
        problem = self.problem
        readers = [op for op in problem.consumers[s] if problem.graph.ops[op].recomputable]
        return [m for op in readers for m in problem.storages_made[op] if self._counts[m]]

    def _add_kept(self) -> None:
        for s in self.followed:
            for sample, place in enumerate(self.places):
                if self.problem.made_by[s] <= place < self._until[s]:
                    self.kept[s, sample] = self.builder.add_column(is_integer=self.whole_numbers)

    @cached_property
    def _repeatable(self) -> dict[int, list[int]]:
        """For each op that may run again, the followed storages that it makes."""
        ops = self.problem.graph.ops
        rows = ((op, [s for s in self.problem.storages_made[op] if self._counts[s]]) for op in range(len(ops)))
        return {op: made for op, made in rows if made and ops[op].recomputable}

    def _add_again(self, window: _Window) -> None:
        """The ops that run again within, while a storage that they make is followed: in a half, if there are any."""
        for op, made in self._repeatable.items():
            if not any((s, window.start) in self.kept for s in made):
                continue
            if not window.halves:
                self._again[op, window] = self.builder.add_column(self.problem.op_time_s[op] / self.time_unit_s)
                continue
            column = self._again[op, window] = self.builder.add_column()
            halves = [self._again[op, half] for half in window.halves if (op, half) in self._again]
            self.builder.add_row([(column, 1.0), *((half, -1.0) for half in halves)], high=0.0)

    def _there(self, s: int, window: _Window) -> list[tuple[int, float]]:
        """What makes a storage be there within a window: it was at the beginning, or its op runs again."""
        again = self._again.get((self.problem.made_by[s], window))
        return [(self.kept[s, window.start], 1.0), *([] if again is None else [(again, 1.0)])]

    def _lacks(self, s: int, window: _Window) -> list[tuple[int, float]]:
        return [(column, -value) for column, value in self._there(s, window)]

    def _add_window(self, window: _Window) -> None:
        problem, kept = self.problem, self.kept
        is_last = window.stop == len(self.places)
        stop = problem.count - 1 if is_last else int(self.places[window.stop])
        read = dict.fromkeys(
            s for op in range(int(self.places[window.start]) + 1, stop + 1) for s in problem.storages_read[op]
        )
        if is_last:
            roots = problem.graph.roots
            read |= dict.fromkeys(roots[t] for t in problem.graph.outputs)
        for s in read:
            if (s, window.start) in kept:
                self.builder.add_row(self._there(s, window), low=1.0)
        for s in self.followed:
            if (s, window.start) in kept and (s, window.stop) in kept and s not in read:
                self.builder.add_row([(kept[s, window.stop], 1.0), *self._lacks(s, window)], high=0.0)
        for op, made in self._repeatable.items():
            column = self._again.get((op, window))
            if column is None:
                continue
            until = max(self._until[s] for s in made)
            # Of the samples behind which the column counts runs, the last one.
            last = int(self.places[np.searchsorted(self.places[: window.stop], until) - 1])
            for u in problem.storages_read[op]:
                # A read later than u is followed says nothing about u.
                if (u, window.start) not in kept:
                    continue
                if self._until[u] > last if self.follows_gradients else self._until[u] >= until:
                    self.builder.add_row([(column, 1.0), *self._lacks(u, window)], high=0.0)

    def again(self, op: int, sample: int) -> int | None:
        """The column of an op that runs again between a sample and the next one; None where it has none."""
        return self._again.get((op, self._narrow[sample]))

    @cached_property
    def _narrow(self) -> dict[int, _Window]:
        return {window.start: window for window in self.windows if not window.halves}

    def _add_memory(self, sample: int) -> None:
        problem, op = self.problem, int(self.places[sample])
        touched = {*problem.storages_read[op], *problem.storages_made[op]}
        room = self.budget_bytes - problem.graph.pinned_bytes - problem.own_bytes[op] - self.reserved_bytes.get(op, 0)
        unit = _power_of_two(max(problem.size))
        held = [(s, self.kept[s, sample]) for s in self.followed if s not in touched and (s, sample) in self.kept]
        self.builder.add_row([(column, problem.size[s] / unit) for s, column in held], high=room / unit)


def _power_of_two(value: float) -> float:
    """A unit for values up to this one that a division by it leaves exact."""
    return 2.0 ** math.frexp(value)[1] if value > 0 else 1.0


def _nested(start: int, stop: int) -> list[_Window]:
    """All windows between two samples, halves before the wholes that they make up."""
    if stop - start == 1:
        return [_Window(start, stop)]
    middle = (start + stop + 1) // 2
    first, second = _nested(start, middle), _nested(middle, stop)
    return [*first, *second, _Window(start, stop, (first[-1], second[-1]))]


def _between_all(count: int) -> list[_Window]:
    """The windows between every two of some samples, and from each to the end."""
    found = {(start, start + 1): _Window(start, start + 1) for start in range(count)}
    for length in range(2, count + 1):
        for start in range(count - length + 1):
            middle = start + (length + 1) // 2
            halves = (found[start, middle], found[middle, start + length])
            found[start, start + length] = _Window(start, start + length, halves)
    return list(found.values())
