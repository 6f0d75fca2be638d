"""Improves a finished schedule: takes out runs that cost nothing to miss, then runs that the budget can spare.

Taking out a recomputation lets its readers bind to the previous run's storage, which then lives longer; what
only the lost run read lives shorter, and runs that nobody reads any more go too (the *undrop* sweep).
Complexity: O(steps) numpy work for each run that is tried.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import numpy as np

from remat.core.simulator import simulate
from remat.planners.view.problem import IntArray, Problem

_HOLE: Final = -(1 << 60)
"""Added to the bytes of a step that was taken out, so that it never counts as the highest one."""


def without_idle_runs(problem: Problem, schedule: Sequence[int]) -> tuple[int, ...]:
    """The schedule without repeated runs that nobody reads, and without views made again of the same storage."""
    return _without_unread(problem, _without_repeated_views(problem, schedule))


def _without_unread(problem: Problem, schedule: Sequence[int]) -> tuple[int, ...]:
    ops = problem.graph.ops
    wanted = [False] * len(problem.graph.tensors)
    for t in problem.graph.outputs:
        wanted[t] = True
    left = [0] * problem.count
    for op in schedule:
        left[op] += 1
    kept = []
    for op in reversed(schedule):
        left[op] -= 1
        if left[op] and not any(wanted[t] for t in ops[op].outputs):
            continue
        for t in ops[op].outputs:
            wanted[t] = False
        for t in ops[op].inputs:
            wanted[t] = True
        kept.append(op)
    return tuple(reversed(kept))


def _without_repeated_views(problem: Problem, schedule: Sequence[int]) -> tuple[int, ...]:
    ops, roots = problem.graph.ops, problem.graph.roots
    storage_birth = [-1] * len(roots)
    bound_to = [-1] * len(roots)
    seen = [False] * problem.count
    kept = []
    for step, op in enumerate(schedule):
        views_only = not problem.storages_made[op]
        if views_only and seen[op] and all(bound_to[t] == storage_birth[roots[t]] for t in ops[op].outputs):
            continue
        seen[op] = True
        kept.append(op)
        for s in problem.storages_made[op]:
            storage_birth[s] = bound_to[s] = step
        for t in ops[op].outputs:
            bound_to[t] = storage_birth[roots[t]]
    return tuple(kept)


def undrop(
    problem: Problem,
    schedule: Sequence[int],
    budget_bytes: int,
    *,
    deadline_s: float | None = None,
    most_tries: int | None = None,
) -> tuple[int, ...]:
    """A schedule at least as cheap and still within the budget, with recomputations taken out greedily.

    Args:
        problem: the graph.
        schedule: a legal schedule whose first runs stand in program order.
        budget_bytes: if the schedule exceeds it, only idle runs are removed.
        deadline_s: ``time.monotonic()`` at which to stop; None runs to the end.
        most_tries: how many runs a sweep looks at, the dearest per byte first; None for all.
    """
    best = without_idle_runs(problem, schedule)
    bytes_ = simulate(problem.graph, best)
    if bytes_.peak_bytes > budget_bytes:
        return best if bytes_.peak_bytes <= simulate(problem.graph, schedule).peak_bytes else tuple(schedule)
    while True:
        sweep = _Sweep(problem, best, np.array(bytes_.bytes, dtype=np.int64), budget_bytes, deadline_s, most_tries)
        better = without_idle_runs(problem, sweep.run())
        after = simulate(problem.graph, better)
        # The sweep counts in-place outputs cautiously, but only the simulator has the last word.
        if after.peak_bytes > budget_bytes or len(better) >= len(best):
            return best
        best, bytes_ = better, after


class _Instance:
    """One life of a storage: from the run that makes it to its last reader."""

    __slots__ = ("birth", "forever", "heir", "previous", "reads", "storage", "vanished")

    def __init__(self, storage: int, birth: int, previous: _Instance | None) -> None:
        self.storage = storage
        self.birth = birth
        self.previous = previous
        self.reads: list[int] = []
        self.forever = False
        self.heir: _Instance | None = None
        self.vanished = False

    def find(self) -> _Instance:
        """The instance that this one was merged into, or itself."""
        node = self
        while node.heir is not None:
            node = node.heir
        return node


class _Sweep:
    def __init__(
        self,
        problem: Problem,
        schedule: tuple[int, ...],
        bytes_: IntArray,
        budget_bytes: int,
        deadline_s: float | None,
        most_tries: int | None,
    ) -> None:
        self.most_tries = most_tries
        self.problem = problem
        self.schedule = schedule
        self.bytes = bytes_
        self.budget = budget_bytes
        self.deadline_s = deadline_s
        self.removed = [False] * len(schedule)
        self.read_by: list[list[_Instance]] = []
        self.makers_read: list[list[int]] = []
        self.made_by: list[list[_Instance]] = []
        self.previous_run = [-1] * len(schedule)
        self.readers = [0] * len(schedule)
        self._bind()

    def _bind(self) -> None:
        """Bind every read of the schedule to the run and to the storage that serve it."""
        problem = self.problem
        ops, roots = problem.graph.ops, problem.graph.roots
        maker = [-1] * len(roots)
        bound: list[_Instance | None] = [None] * len(roots)
        last_run = [-1] * problem.count
        for step, op in enumerate(self.schedule):
            self.previous_run[step] = last_run[op]
            last_run[op] = step
            instances: dict[int, _Instance] = {}
            for t in problem.reads[op]:
                instance = bound[t]
                assert instance is not None
                instances[id(instance)] = instance
            for instance in instances.values():
                instance.reads.append(step)
            self.read_by.append(list(instances.values()))
            self.makers_read.append([maker[t] for t in problem.reads[op]])
            for m in self.makers_read[-1]:
                self.readers[m] += 1
            made = []
            for s in problem.storages_made[op]:
                bound[s] = instance = _Instance(s, step, bound[s])
                made.append(instance)
            self.made_by.append(made)
            by_root = {i.storage: i for i in (*instances.values(), *made)}
            for t in ops[op].outputs:
                maker[t] = step
                if roots[t] != t and not problem.is_pinned[t]:
                    bound[t] = self._source(op, t, by_root, bound)
        for t in problem.graph.outputs:
            if not problem.is_pinned[t]:
                self.readers[maker[t]] += 1
                final = bound[t]
                assert final is not None
                final.forever = True

    def _source(
        self, op: int, view: int, by_root: dict[int, _Instance], bound: list[_Instance | None]
    ) -> _Instance | None:
        graph = self.problem.graph
        base = graph.tensors[view].alias_of
        made = self.problem.storages_made[op]
        while base is not None and graph.roots[view] not in made:
            if base in graph.ops[op].inputs:
                return bound[base]
            base = graph.tensors[base].alias_of
        return by_root[graph.roots[view]]

    def run(self) -> tuple[int, ...]:
        """Try every repeated run once, the dearest per byte first; the schedule without those that could go."""
        problem = self.problem

        def worth(step: int) -> float:
            op = self.schedule[step]
            size = sum(problem.size[s] for s in problem.storages_made[op])
            return problem.op_time_s[op] / max(size, 1)

        again = [step for step, before in enumerate(self.previous_run) if before >= 0 and self.made_by[step]]
        for step in sorted(again, key=worth, reverse=True)[: self.most_tries]:
            if self.deadline_s is not None and time.monotonic() > self.deadline_s:
                break
            if not self.removed[step]:
                self._try(step)
        return tuple(op for op, removed in zip(self.schedule, self.removed, strict=True) if not removed)

    def _try(self, step: int) -> None:
        """Take out one run and what only it needed, if the bytes stay within the budget."""
        heirs = []
        for instance in self.made_by[step]:
            before = instance.previous
            while before is not None and before.vanished:
                before = before.previous
            if before is None:
                return
            heirs.append((instance, before.find()))
        dead, fewer = self._cascade(step)
        keepers = {id(before) for _, before in heirs}
        changes = [(position, position + 1, _HOLE) for position in dead]
        gone = [i.find() for position in dead if position != step for i in self.made_by[position]]
        changes += [(i.birth, self._end(i) + 1, -self.problem.size[i.storage]) for i in gone]
        ended = {id(i.find()): i.find() for position in dead for i in self.read_by[position]}
        for node in ended.values():
            if not (node.forever or id(node) in keepers or node.birth in dead):
                end = max((r for r in node.reads if r not in dead), default=node.birth)
                changes.append((end + 1, self._end(node) + 1, -self.problem.size[node.storage]))
        low = step
        for instance, before in heirs:
            end = self._end(before)
            if end < step and (instance.reads or instance.forever):
                changes.append((end + 1, step, self.problem.size[instance.storage]))
                changes.append((end, end + 1, self._credit(end, instance.storage)))
                low = min(low, end)
        for start, stop, amount in changes:
            self.bytes[start:stop] += amount
        if low < step and int(self.bytes[low:step].max()) > self.budget:
            for start, stop, amount in changes:
                self.bytes[start:stop] -= amount
            return
        for position in dead:
            self.removed[position] = True
        for maker, count in fewer.items():
            self.readers[maker] -= count
        for node in ended.values():
            node.reads = [r for r in node.reads if r not in dead]
        for node in gone:
            node.vanished = True
        for instance, before in heirs:
            instance.heir = before
            before.reads += instance.reads
            before.forever |= instance.forever
        self.readers[self._serving(self.previous_run[step])] += self.readers[step]

    def _cascade(self, step: int) -> tuple[set[int], dict[int, int]]:
        """The runs that nobody reads once ``step`` is gone, itself included, and how many readers each run loses."""
        dead, fewer, pending = {step}, dict[int, int](), [step]
        heir = self._serving(self.previous_run[step])
        while pending:
            for maker in self.makers_read[pending.pop()]:
                run = self._serving(maker)
                fewer[run] = fewer.get(run, 0) + 1
                unread = self.readers[run] == fewer[run] and self.previous_run[run] >= 0
                if unread and run != heir and run not in dead:
                    dead.add(run)
                    pending.append(run)
        return dead, fewer

    def _serving(self, run: int) -> int:
        while self.removed[run]:
            run = self.previous_run[run]
        return run

    def _credit(self, step: int, storage: int) -> int:
        """Bytes that an in-place output of the run at ``step`` may no longer take over from ``storage``."""
        pairs = self.problem.takeovers[self.schedule[step]]
        return sum(pair.saved_bytes for pair in pairs if pair.source == storage)

    def _end(self, instance: _Instance) -> int:
        if instance.forever:
            return len(self.schedule) - 1
        return max(instance.reads, default=instance.birth)
