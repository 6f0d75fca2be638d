"""What of a training step takes part in a search, and what does not change while a schedule is edited.

Views are fused into their storages and small storages are a fixed profile (see :mod:`remat.planners.view.problem`), so
that a training step of thousands of ops becomes one of the ops that matter. What is left out is put back by
``expand``; only the simulator has the last word on its bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from remat.planners.view.problem import IntArray, Problem


@dataclass(frozen=True, eq=False)
class Board:
    """What does not change while a schedule is edited: the ops that matter and what they touch.

    Attributes:
        problem: the graph.
        whole: whether every op and storage takes part, as order moves need it.
    """

    problem: Problem
    whole: bool

    @cached_property
    def takes_part(self) -> list[bool]:
        """For each storage (and tensor), whether its life is followed."""
        problem = self.problem
        return [self.whole or not problem.small[t] for t in range(len(problem.graph.tensors))]

    @cached_property
    def reads(self) -> list[tuple[int, ...]]:
        """For each op, the storages that it reads and that take part."""
        return [tuple(s for s in row if self.takes_part[s]) for row in self.problem.storages_read]

    @cached_property
    def makes(self) -> list[tuple[int, ...]]:
        """For each op, the storages that it makes and that take part."""
        return [tuple(s for s in row if self.takes_part[s]) for row in self.problem.storages_made]

    @cached_property
    def counts(self) -> list[bool]:
        """For each op, whether it has a slot of its own."""
        ops = self.problem.graph.ops
        least = 1e-4 * self.problem.plain.peak_bytes
        return [
            self.whole or bool(r or m) or op.workspace_bytes > least
            for r, m, op in zip(self.reads, self.makes, ops, strict=True)
        ]

    @cached_property
    def repeatable(self) -> list[bool]:
        """For each op, whether it may run again: what it makes can be made again, with views by views alone."""
        problem = self.problem
        result = []
        for op, made in enumerate(problem.storages_made):
            simple = all(
                problem.made_by[t] == op or not problem.storages_made[problem.made_by[t]]
                for s in made
                for t in problem.family[s]
            )
            result.append(bool(self.makes[op]) and simple and all(problem.droppable[s] for s in made))
        return result

    @cached_property
    def repeat_time_s(self) -> list[float]:
        """For each op, the seconds of running it again, with the views of what it makes."""
        problem = self.problem
        result = list(problem.op_time_s)
        for op, made in enumerate(problem.storages_made):
            views = {problem.made_by[t] for s in made for t in problem.family[s]} - {op}
            result[op] += sum(problem.op_time_s[v] for v in views)
        return result

    @cached_property
    def forever(self) -> list[bool]:
        """For each tensor, whether it is a storage of which the newest instance lives to the end."""
        roots = self.problem.graph.roots
        result = [False] * len(roots)
        for t in self.problem.graph.outputs:
            result[roots[t]] = True
        return result

    @cached_property
    def lent(self) -> list[dict[int, int]]:
        """For each op, the storages that an output may take over, with the bytes saved; no output takes two."""
        problem = self.problem
        result: list[dict[int, int]] = []
        for op in problem.graph.ops:
            row: dict[int, int] = {}
            filled: set[int] = set()
            for source, target in op.in_place:
                s = problem.graph.roots[source]
                if problem.is_pinned[source] or s in row or target in filled or not self.takes_part[s]:
                    continue
                if problem.graph.tensors[target].alias_of is None:
                    row[s] = min(problem.size[s], problem.size[target])
                    filled.add(target)
            result.append(row)
        return result

    @cached_property
    def before(self) -> list[tuple[int, ...]]:
        """For each op, the ops that must have run before it first runs though no storage of the board ties them.

        These are the ones that it names, and those that make the views which it reads.
        """
        problem = self.problem
        result = []
        for op in problem.graph.ops:
            makers = (problem.made_by[t] for t in op.inputs if problem.graph.tensors[t].alias_of is not None)
            result.append(tuple(dict.fromkeys((*op.after, *(maker for maker in makers if maker >= 0)))))
        return result

    @cached_property
    def behind(self) -> list[list[int]]:
        """For each op, the ops whose ``before`` names it."""
        found: list[list[int]] = [[] for _ in range(self.problem.count)]
        for op, names in enumerate(self.before):
            for name in names:
                found[name].append(op)
        return found

    @cached_property
    def base_bytes(self) -> IntArray:
        """For each op that counts, pinned bytes and those of what is left out, up to the next op that counts."""
        problem = self.problem
        change = np.zeros(problem.count + 1, dtype=np.int64)
        for s in problem.storages:
            if not self.takes_part[s]:
                change[problem.uses[s][0]] += problem.size[s]
                change[min(problem.uses[s][-1], problem.count - 1) + 1] -= problem.size[s]
        small = np.cumsum(change)[: problem.count] + problem.graph.pinned_bytes
        for op, counts in enumerate(self.counts):
            if not counts:
                small[op] += problem.graph.ops[op].workspace_bytes
        places = np.flatnonzero(np.array(self.counts, dtype=np.bool_))
        result = np.full(problem.count, problem.graph.pinned_bytes, dtype=np.int64)
        if len(places):
            first = np.maximum.reduceat(small, np.concatenate([[0], places[1:]]))
            result[places] = first
        return result


def expand(board: Board, order: Sequence[int]) -> tuple[int, ...]:
    """A schedule of the whole graph from the runs of the ops that count."""
    problem = board.problem
    roots, ops, reads = problem.graph.roots, problem.graph.ops, problem.reads
    made_by, family = problem.made_by, problem.family
    available = [False] * len(roots)
    ran = [False] * problem.count
    result: list[int] = []
    following = 0

    def run(op: int) -> None:
        stack = [op]
        while stack:
            top = stack[-1]
            missing = next((t for t in reads[top] if not available[t]), None)
            if missing is not None:
                stack.append(made_by[missing])
                continue
            stack.pop()
            result.append(top)
            ran[top] = True
            for s in problem.storages_made[top]:
                for t in family[s]:
                    available[t] = False
            for t in ops[top].outputs:
                available[t] = True

    for op in order:
        if not board.whole and not ran[op]:
            for other in range(following, op):
                if not board.counts[other] and not ran[other]:
                    run(other)
            following = op
        run(op)
    for other in range(problem.count):
        if not ran[other]:
            run(other)
    for t in dict.fromkeys(problem.graph.outputs):
        if not problem.is_pinned[t] and not available[t] and roots[t] != t:
            run(made_by[t])
    return tuple(result)
