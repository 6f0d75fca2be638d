"""The gap LP: keep or drop every gap between two consecutive uses of a storage, at least cost.

One variable in [0, 1] per gap, one memory row per step of the plain schedule, written as a running sum so
that the matrix has O(edges) nonzeros. A dropped gap costs one run of the op that makes the storage; what
that run needs itself is left out, which makes the model a relaxation and its optimum a lower bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from remat.core.simulator import bytes_alive
from remat.planners.linear.highs import LinearModel, solve
from remat.planners.view.problem import FloatArray, IntArray, Problem


@dataclass(frozen=True, eq=False)
class GapModel:
    """The gap LP of one problem and one budget.

    Attributes:
        gaps: the gaps that have a variable: those that can be dropped and span a step over budget.
        cost_s: for each of them, the least seconds that dropping it costs.
        size: for each of them, bytes.
        first: for each of them, the first of ``steps`` that it spans.
        last: the last one that it spans.
        steps: the ops at which the plain schedule exceeds the budget.
        capacity: for each of ``steps``, bytes that the gaps may hold there.
    """

    gaps: IntArray
    cost_s: FloatArray
    size: FloatArray
    first: IntArray
    last: IntArray
    steps: IntArray
    capacity: FloatArray


def build_gap_model(problem: Problem, budget_bytes: int) -> GapModel:
    """The gap LP for a budget; empty where the plain schedule fits.

    Every approximation is on the safe side: bytes that an in-place output *may* take over are always
    taken off, and the seconds of an op with several outputs are shared between them.
    """
    graph = problem.graph
    room = budget_bytes - graph.pinned_bytes - np.array(problem.own_bytes, dtype=np.int64)
    steps = np.flatnonzero(problem.kept_bytes > room)
    start, end = problem.gap_start, np.minimum(problem.gap_end, problem.count)
    first = np.searchsorted(steps, start + 1)
    last = np.searchsorted(steps, end) - 1
    spans = (first <= last) & ~problem.is_tail & (problem.gap_size > 0)
    can_run_again = np.array([op.recomputable for op in graph.ops], dtype=np.bool_)
    maker = np.array(problem.made_by, dtype=np.int64)[problem.gap_storage]
    free = spans & can_run_again[maker] if len(maker) else spans
    fixed = np.flatnonzero(spans & ~free)
    fixed_bytes = bytes_alive(first[fixed], last[fixed] + 1, problem.gap_size[fixed], len(steps))
    capacity = (room[steps] - fixed_bytes).astype(np.float64)
    gaps = np.flatnonzero(free)
    made = [sum(problem.size[s] for s in problem.storages_made[op]) for op in range(problem.count)]
    share = np.array(
        [problem.op_time_s[m] * problem.size[s] / max(made[m], 1) for s, m in zip(*_pairs(problem, gaps), strict=True)],
        dtype=np.float64,
    )
    return GapModel(gaps, share, problem.gap_size[gaps].astype(np.float64), first[gaps], last[gaps], steps, capacity)


def _pairs(problem: Problem, gaps: IntArray) -> tuple[list[int], list[int]]:
    storages = [int(s) for s in problem.gap_storage[gaps]]
    return storages, [problem.made_by[s] for s in storages]


@dataclass(frozen=True, eq=False)
class GapSolution:
    """``keep``: one value in [0, 1] per gap of the model; ``bound_s``: proven least extra seconds."""

    keep: FloatArray
    bound_s: float


def solve_gap_model(model: GapModel, *, time_limit_s: float) -> GapSolution | None:
    """Solve the LP; None where it is infeasible or the time runs out.

    The bound is computed afresh from the multipliers of the memory rows (Lagrangian relaxation), so that it
    holds whatever tolerance the solver used. Complexity: that of an LP with O(edges) nonzeros.
    """
    count, rows = len(model.gaps), len(model.steps)
    if not count:
        return GapSolution(np.zeros(0), 0.0) if (model.capacity >= 0).all() else None
    cost_unit = max(float(model.cost_s.max()), 1e-300)
    size_unit = max(float(model.size.max()), 1.0)
    size = model.size / size_unit
    ends = model.last + 1 < rows
    index, kept = np.arange(count), count + np.arange(rows)
    linear = LinearModel(
        # The constant part of sum(cost * (1 - keep)) is left out.
        cost=np.concatenate([-model.cost_s / cost_unit, np.zeros(rows)]),
        low=np.zeros(count + rows),
        high=np.concatenate([np.ones(count), model.capacity / size_unit]),
        row_low=np.zeros(rows),
        row_high=np.zeros(rows),
        rows=np.concatenate([model.first, model.last[ends] + 1, np.arange(rows), np.arange(1, rows)]),
        columns=np.concatenate([index, index[ends], kept, kept[:-1]]),
        values=np.concatenate([size, -size[ends], -np.ones(rows), np.ones(rows - 1)]),
    )
    if (model.capacity < 0).any():
        return None
    solution = solve(linear, time_limit_s=time_limit_s)
    if solution is None:
        return None
    multiplier = np.zeros(rows)
    if solution.reduced_costs is not None:
        multiplier = np.maximum(-solution.reduced_costs[count:], 0.0)
    total = np.concatenate([[0.0], np.cumsum(multiplier)])
    price = size * (total[model.last + 1] - total[model.first])
    bound = float(np.minimum(model.cost_s / cost_unit, price).sum() - (multiplier * model.capacity / size_unit).sum())
    return GapSolution(solution.values[:count], max(0.0, bound * cost_unit * (1 - 1e-9)))
