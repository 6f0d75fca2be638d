"""A proven lower bound on what a budget costs, so that a plan can say how far from the best it may be."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Final

from remat.core.graph import Graph
from remat.planners.linear.gap import build_gap_model, solve_gap_model
from remat.planners.linear.highs import proven_minimum, row_multipliers
from remat.planners.linear.window import WindowModel
from remat.planners.view.problem import Problem

SAMPLES: Final = (1, 4, 16)
"""How many samples to try, one after another: each gives a tighter bound and takes longer."""

# Judgements, not measured. All of them only decide how good the bound is; it holds in any case.
_MOST_ENTRIES: Final = 100_000
"""Of a model: a larger one would take longer than planning does."""
_NEAR: Final = 0.98
"""Of what a schedule costs: a bound so near is good enough."""
_LIMIT_S: Final = 60.0
"""For both bounds together, where the caller gives no limit."""


@dataclass(frozen=True)
class LowerBound:
    """The least extra time of any schedule within a budget.

    Attributes:
        time_s: seconds beyond the plain step; infinite where no schedule can fit.
        meaning: what the bound rests on.
    """

    time_s: float
    meaning: str


def overhead_lower_bound(
    graph: Graph,
    budget_bytes: int,
    time_limit_s: float | None = None,
    reached_s: float = math.inf,
    *,
    most_samples: int = SAMPLES[-1],
) -> LowerBound:
    """A lower bound on the extra seconds of every schedule within a budget: the better of two LPs'.

    The *gap LP*: where a storage lies idle between two uses a and b in program order, either it is alive at
    every first run between them, or the op that makes it runs again after a and up to b. The gaps of
    one storage do not overlap, so each dropped gap has a run of its own. Exact where recomputed ops read
    pinned tensors only; loose where a recomputation pulls a chain of others.

    The *chain LP* (:mod:`remat.planners.linear.bounds`) knows that what a recomputation reads must be there,
    too, but looks at few steps.

    Args:
        graph: the training step.
        budget_bytes: peak bytes of the step.
        time_limit_s: seconds for both, 60 if None; when they run out the bound is what is proved by then, 0 at first.
        reached_s: extra seconds of a schedule; a bound near it is not made better.
        most_samples: of the chain LP; it is left out with more of them.
    """
    deadline_s = time.monotonic() + (_LIMIT_S if time_limit_s is None else time_limit_s)
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
    solution = solve_gap_model(model, time_limit_s=deadline_s - time.monotonic())
    gap_s = 0.0 if solution is None else solution.bound_s
    chain_s = 0.0
    if gap_s < reached_s:
        left_s = deadline_s - time.monotonic()
        chain_s = chain_lower_bound_s(problem, budget_bytes, reached_s, left_s, most_samples=most_samples)
    if chain_s > gap_s:
        return LowerBound(chain_s, f"chain LP, proven {order}")
    if solution is None:
        return LowerBound(0.0, "trivial: the gap LP did not finish in time")
    return LowerBound(gap_s, f"gap LP, proven {order}")


def chain_lower_bound_s(
    problem: Problem,
    budget_bytes: int,
    reached_s: float = math.inf,
    time_limit_s: float | None = None,
    *,
    most_samples: int = SAMPLES[-1],
) -> float:
    """Least extra seconds of every schedule within a budget that keeps first runs in program order.

    Args:
        problem: the graph.
        budget_bytes: peak bytes of the step.
        reached_s: extra seconds of a schedule; once the bound is near it, no more samples are tried.
        time_limit_s: for the LPs together; None for no end. Models with more than 100,000 entries are left out.

        most_samples: models with more are left out, too.

    Complexity: LPs with O(reads samples) entries, by interior point.
    """
    deadline_s = math.inf if time_limit_s is None else time.monotonic() + time_limit_s
    best_s = 0.0
    for samples in SAMPLES:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or samples > most_samples or best_s >= _NEAR * reached_s:
            break
        model = WindowModel(problem, budget_bytes, samples)
        linear = model.linear
        if not len(linear.cost) or len(linear.values) > _MOST_ENTRIES:
            break
        multipliers = row_multipliers(linear, time_limit_s=min(left_s, _LIMIT_S))
        if multipliers is None:
            break
        best_s = max(best_s, proven_minimum(linear, multipliers) * model.time_unit_s)
    return best_s
