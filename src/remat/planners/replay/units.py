"""Units: ops that run again together, each with the one storage that is worth keeping of what they make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from remat.core.simulator import Timeline, simulate, storage_lifetimes
from remat.planners.view.problem import BoolArray, IntArray, Problem


@dataclass(frozen=True, eq=False)
class Unit:
    """An op that may run again, with the ops just before it that it alone reads and that make no less.

    Whoever keeps the result of one of those ops could as well keep what the last one makes.

    Attributes:
        ops: in program order; the last one makes ``storage``.
        storage: the storage that the unit is run again for.
        inner: the storages that the other ops make.
        reads: the storages that the ops read and do not make.
        time_s: seconds of running the ops once.
        extra_bytes: what is needed while they run, beside what they read.
        extra_bytes_taking_over: for each storage that the first op may take over, the same where it does.
    """

    ops: tuple[int, ...]
    storage: int
    inner: frozenset[int]
    reads: tuple[int, ...]
    time_s: float
    extra_bytes: int
    extra_bytes_taking_over: Mapping[int, int]


def units_of(problem: Problem) -> list[Unit]:
    """The units of a step without views, such as a reduced one, in the order of their last ops.

    Only ops that make one storage belong to one, and none whose storage is wanted at the end of the step.
    """
    result = {op: made[0] for op, made in enumerate(problem.storages_made) if _may_belong(problem, op)}
    joined = {
        s: op + 1
        for op, s in result.items()
        if problem.consumers[s] == [op + 1] and op + 1 in result and problem.size[result[op + 1]] <= problem.size[s]
    }
    units = []
    for last, storage in result.items():
        if storage not in joined:
            ops = [last]
            while ops[0] - 1 in result and joined.get(result[ops[0] - 1]) == ops[0]:
                ops.insert(0, ops[0] - 1)
            units.append(_unit(problem, ops, storage))
    return units


def _may_belong(problem: Problem, op: int) -> bool:
    made = problem.storages_made[op]
    return (
        problem.graph.ops[op].recomputable
        and len(made) == 1
        and problem.size[made[0]] > 0
        and problem.droppable[made[0]]
        and not problem.small[made[0]]
        and not problem.forever[made[0]]
    )


def _unit(problem: Problem, ops: Sequence[int], storage: int) -> Unit:
    size = problem.size
    inner = frozenset(problem.storages_made[op][0] for op in ops) - {storage}
    reads = dict.fromkeys(s for op in ops for s in problem.storages_read[op] if s not in inner and size[s])
    # The ops form a chain: while one runs, what the one before made is all that lives of what they make.
    extra, before = [], None
    for op in ops:
        made = problem.storages_made[op][0]
        saved = [pair.saved_bytes for pair in problem.takeovers[op] if pair.source == before and pair.target == made]
        held = size[made] + (0 if before is None else size[before])
        extra.append(held + problem.graph.ops[op].workspace_bytes - max(saved, default=0))
        before = made
    read_later = {s for op in ops[1:] for s in problem.storages_read[op]}
    taking_over = {
        pair.source: max([extra[0] - pair.saved_bytes, *(bytes_ - size[pair.source] for bytes_ in extra[1:])])
        for pair in problem.takeovers[ops[0]]
        if pair.source in reads and pair.source not in read_later
    }
    time_s = sum(problem.op_time_s[op] for op in ops)
    return Unit(tuple(ops), storage, inner, tuple(reads), time_s, max(extra), taking_over)


class Occupancy:
    """What a schedule holds in memory where, worked out once for many looks at it.

    Instances of storages are numbered in the order of their births.

    Attributes:
        problem: the step.
        runs: the schedule.
        bytes: of each run.
        idle_bytes: before each run, the bytes of what was made before and is used by it or later.
        places: for each op, where it runs.
        instances: for each storage, its instances.
        birth: for each instance, the run that makes it.
        last: for each instance, the last run that uses it; the last of all where it is wanted at the end.
        source: for each instance, the one whose bytes it takes over, -1 for none.
        taker: for the instances whose bytes are taken over, the one that does.
        dying: the storages and runs where an instance is used for the last time.
    """

    def __init__(self, problem: Problem, runs: Sequence[int], timeline: Timeline | None = None) -> None:
        self.problem = problem
        self.runs = list(runs)
        timeline = simulate(problem.graph, runs) if timeline is None else timeline
        self.bytes: IntArray = np.array(timeline.bytes, dtype=np.int64)
        lives = storage_lifetimes(problem.graph, runs)
        self.birth, self.last, self.source = lives.birth.tolist(), lives.last.tolist(), lives.taken_over.tolist()
        self.storage = lives.tensor.tolist()
        change = np.zeros(len(runs) + 2, dtype=np.int64)
        np.add.at(change, lives.birth + 1, lives.size_bytes)
        np.subtract.at(change, lives.last + 1, lives.size_bytes)
        self.idle_bytes: IntArray = np.cumsum(change)[: len(runs)] + problem.graph.pinned_bytes
        self.places: dict[int, list[int]] = {}
        for place, op in enumerate(self.runs):
            self.places.setdefault(op, []).append(place)
        self.instances: dict[int, list[int]] = {}
        for number, s in enumerate(self.storage):
            self.instances.setdefault(s, []).append(number)
        self.taker = {source: number for number, source in enumerate(self.source) if source >= 0}
        kept = lives.kept.tolist()
        self.dying = {(s, self.last[i]) for i, s in enumerate(self.storage) if not kept[i]}

    @cached_property
    def born(self) -> dict[tuple[int, int], int]:
        """The instance of a storage that a run makes."""
        return {(s, self.birth[i]): i for i, s in enumerate(self.storage)}

    def alive_before(self, s: int, places: IntArray) -> BoolArray:
        """Whether a storage is there before each of these runs, and used by it or later."""
        result = np.zeros(len(places), dtype=bool)
        for i in self.instances.get(s, ()):
            result |= (self.birth[i] < places) & (places <= self.last[i])
        return result

    def alive_at(self, place: int) -> list[int]:
        """The storages in memory during a run, in the order of their births."""
        birth, last = np.array(self.birth), np.array(self.last)
        return [self.storage[i] for i in np.flatnonzero((birth <= place) & (place <= last)).tolist()]
