"""The part of a step that a search works on: the ops and storages that matter, and the reduced step made of them.

Views are fused into their storages; small storages are not followed one by one, but count as a fixed number of bytes at
each op. A step of 5,000 ops becomes one of 1,500. ``expand`` puts the ops back that were left out; the bytes of the
schedule that it returns are the simulator's to say.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from remat.core.graph import Graph, Op, Tensor
from remat.core.simulator import bytes_alive
from remat.planners.view.problem import IntArray, Problem


@dataclass(frozen=True, eq=False)
class Board:
    """The ops that matter and the storages that they touch; none of it changes while a schedule is edited.

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
    def workspace_bytes(self) -> list[int]:
        """For each op, the bytes that it needs while it runs, beside what it reads and makes."""
        return [op.workspace_bytes for op in self.problem.graph.ops]

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
        """For each op, whether it may run again.

        All that it makes must be allowed to be made twice, and each view of that come from an op that makes views only.
        """
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
    def lent(self) -> list[dict[int, int]]:
        """For each op, the storages that an output may take over, with the bytes saved; no output takes two."""
        result: list[dict[int, int]] = []
        for pairs in self.problem.takeovers:
            row: dict[int, int] = {}
            filled: set[int] = set()
            for source, target, saved_bytes in pairs:
                if self.takes_part[source] and source not in row and target not in filled:
                    row[source] = saved_bytes
                    filled.add(target)
            result.append(row)
        return result

    @cached_property
    def before(self) -> list[tuple[int, ...]]:
        """For each op, the ops that must have run before it first runs though no storage of the board ties them.

        These are the ops that its ``after`` names, and those that make the views which it reads.
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
        """For each op that counts, the pinned bytes and the most left-out bytes from it to the next op that counts."""
        problem = self.problem
        left_out = [s for s in problem.storages if not self.takes_part[s]]
        born = np.array([problem.uses[s][0] for s in left_out], dtype=np.int64)
        gone = np.array([min(problem.uses[s][-1], problem.count - 1) + 1 for s in left_out], dtype=np.int64)
        size = np.array([problem.size[s] for s in left_out], dtype=np.int64)
        small = bytes_alive(born, gone, size, problem.count) + problem.graph.pinned_bytes
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


@dataclass(frozen=True, eq=False)
class Condensed:
    """The reduced step.

    Attributes:
        board: the whole step and what of it takes part.
        problem: the reduced step.
        ops: for each op of the reduced step, the op of the whole one.
    """

    board: Board
    problem: Problem
    ops: tuple[int, ...]

    @classmethod
    def of(cls, problem: Problem) -> Condensed:
        """The reduced form of a step in program order, kept with it."""
        known: Condensed | None = vars(problem).get("_condensed")
        if known is None:
            known = vars(problem)["_condensed"] = _condense(problem)
        return known

    def expand(self, schedule: Sequence[int]) -> tuple[int, ...]:
        """The schedule of the whole step that follows one of the reduced step."""
        return expand(self.board, [self.ops[op] for op in schedule])

    def contract(self, schedule: Sequence[int]) -> tuple[int, ...]:
        """The schedule of the reduced step that one of the whole step follows, as far as ops take part."""
        number = {op: i for i, op in enumerate(self.ops)}
        return tuple(number[op] for op in schedule if op in number)


def _condense(problem: Problem) -> Condensed:
    board = Board(problem, whole=False)
    graph = problem.graph
    ops = tuple(op for op in range(problem.count) if board.counts[op])
    # Tensor 0 stands for all that is pinned.
    number = {s: i for i, s in enumerate((s for s in problem.storages if board.takes_part[s]), start=1)}
    tensors = [Tensor(graph.pinned_bytes), *(Tensor(problem.size[s], graph.tensors[s].name) for s in number)]
    reduced = []
    for op in ops:
        beside = int(board.base_bytes[op]) - graph.pinned_bytes
        pairs = [pair for pair in problem.takeovers[op] if pair.source in number and pair.target in number]
        reduced.append(
            Op(
                name=graph.ops[op].name,
                kind=graph.ops[op].kind,
                inputs=tuple(number[s] for s in board.reads[op]),
                outputs=tuple(number[s] for s in board.makes[op]),
                time_s=board.repeat_time_s[op],
                recomputable=board.repeatable[op],
                workspace_bytes=graph.ops[op].workspace_bytes + beside,
                in_place=tuple((number[pair.source], number[pair.target]) for pair in pairs),
            )
        )
    outputs = tuple(number[s] for s in number if problem.forever[s])
    turn = graph.turning_point
    # Of the ops that are left, the last one up to the turning point ends the forward part.
    turning_point = None if turn is None or not ops or ops[0] > turn else bisect.bisect_right(ops, turn) - 1
    condensed = Graph(tuple(reduced), tuple(tensors), (0,), outputs, free_order=False, turning_point=turning_point)
    return Condensed(board, Problem.of(condensed), ops)
