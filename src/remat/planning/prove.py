"""Proves how far a plan may be from the best: a lower bound on what its budget costs."""

from __future__ import annotations

import dataclasses
from typing import Final

from remat.core.graph import Graph
from remat.core.plan import NOT_PROVED, Plan
from remat.core.schedule import keeps_program_order
from remat.planners.linear.bounds import SAMPLES, overhead_lower_bound

_ROUNDING: Final = 1e-6
"""By how much of the overhead a bound may be above it: ten times HiGHS' tolerance of 1e-7. Lower, and rounding would
look like an error of ours; higher, and an error of ours like rounding."""


def prove(plan: Plan, graph: Graph, time_limit_s: float | None = None, *, most_samples: int = SAMPLES[-1]) -> Plan:
    """The plan with a proven lower bound on the overhead of every schedule within its budget.

    Where a device or a compiler counts other bytes than the trace, the bound is for the bytes of the trace that the
    planner was given (``plan.traced_budget_bytes``). A plan that has its bound is returned as it is.

    Args:
        plan: as ``find`` returns it.
        graph: the step that it is for.
        time_limit_s: wall seconds; what is proved by then is the bound, 0 at first. None is enough for most graphs.
        most_samples: steps that the larger model looks at, at most. Fewer take less time, and may prove less.

    Raises:
        PlanMismatch: if the plan is for another graph.
    """
    plan.check_graph(graph)
    if plan.lower_bound_meaning != NOT_PROVED:
        return plan
    bound, meaning = _bound_of(plan, graph, time_limit_s, most_samples)
    return dataclasses.replace(plan, overhead_lower_bound=bound, lower_bound_meaning=meaning)


def _bound_of(plan: Plan, graph: Graph, time_limit_s: float | None, most_samples: int) -> tuple[float, str]:
    """The bound as a fraction of the plain step, never above what the plan itself reached."""
    if plan.overhead <= 0.0:
        return 0.0, "reached; no schedule takes less time than the plain step"
    budget_bytes = plan.budget_bytes if plan.traced_budget_bytes is None else plan.traced_budget_bytes
    reached_s = plan.overhead * graph.time_s
    found = overhead_lower_bound(graph, budget_bytes, time_limit_s, reached_s, most_samples=most_samples)
    bound = found.time_s / graph.time_s if graph.time_s > 0 else 0.0
    if bound - plan.overhead <= _ROUNDING * plan.overhead:
        return min(bound, plan.overhead), found.meaning
    if not keeps_program_order(plan.schedule):
        # The bound is over program order, and this plan went below it by leaving that order.
        return 0.0, "trivial; the plan moves first runs and beats the bound for program order"
    raise AssertionError(
        f"internal error: the lower bound {bound:.9g} ({found.meaning}) is above the overhead {plan.overhead:.9g} of a "
        "valid plan; please report this with the graph"
    )
