"""A training step reduced to the ops and storages that matter, so that every method has less to do.

Views are fused into their storages, small storages become part of the workspace of what runs beside them, and ops
that neither read nor make anything else are left out. A step of 5,000 ops becomes one of 1,500.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from remat.core.graph import Graph, Op, Tensor
from remat.planners.view.problem import Problem
from remat.planners.walk.board import Board, expand


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
        pairs = [(graph.roots[a], b) for a, b in graph.ops[op].in_place]
        reduced.append(
            Op(
                name=graph.ops[op].name,
                kind=graph.ops[op].kind,
                inputs=tuple(number[s] for s in board.reads[op]),
                outputs=tuple(number[s] for s in board.makes[op]),
                time_s=board.repeat_time_s[op],
                recomputable=board.repeatable[op],
                workspace_bytes=graph.ops[op].workspace_bytes + beside,
                in_place=tuple((number[a], number[b]) for a, b in pairs if a in number and b in board.makes[op]),
            )
        )
    outputs = tuple(number[s] for s in number if board.forever[s])
    condensed = Graph(tuple(reduced), tuple(tensors), (0,), outputs, free_order=False)
    return Condensed(board, Problem.of(condensed), ops)
