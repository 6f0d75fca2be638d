"""A proven lower bound on what a budget costs, so that a plan can say how far from the best it may be."""

from __future__ import annotations

import math
from dataclasses import dataclass

from remat.graph import Graph
from remat.planners.gap_model import build_gap_model, solve_gap_model
from remat.planners.problem import Problem


@dataclass(frozen=True)
class LowerBound:
    """The least extra time of any schedule within a budget.

    Attributes:
        time_s: seconds beyond the plain step; infinite where no schedule can fit.
        meaning: what the bound rests on.
    """

    time_s: float
    meaning: str


def overhead_lower_bound(graph: Graph, budget_bytes: int, time_limit_s: float | None = None) -> LowerBound:
    """A lower bound on the extra seconds of every schedule within a budget, from the gap LP.

    Why it holds: where a storage lies idle between two uses a and b in program order, either it is alive at
    every first run between them, or the op that makes it runs again after a and up to b. The gaps of
    one storage do not overlap, so each dropped gap has a run of its own. Exact where recomputed ops read
    pinned tensors only; loose where a recomputation pulls a chain of others.

    Args:
        graph: the training step.
        budget_bytes: peak bytes of the step.
        time_limit_s: seconds for the LP, 10 if None; when they run out the bound is the trivial 0.
    """
    problem = Problem.of(graph)
    order = (
        "for schedules that keep first runs in program order; this graph allows others, which may cost less"
        if graph.free_order
        else "for every legal schedule"
    )
    if problem.plain.peak_bytes <= budget_bytes:
        return LowerBound(0.0, "exact: the plain schedule fits the budget")
    model = build_gap_model(problem, budget_bytes)
    if (model.capacity < 0).any():
        return LowerBound(math.inf, f"some step alone exceeds the budget; holds {order}")
    solution = solve_gap_model(model, time_limit_s=10.0 if time_limit_s is None else time_limit_s)
    if solution is None:
        return LowerBound(0.0, "trivial: the gap LP did not finish in time")
    return LowerBound(solution.bound_s, f"gap LP, proven {order}")
