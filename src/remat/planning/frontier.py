"""The trade-off of a training step: what each budget costs, from the smallest feasible peak to the plain one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from remat.core.errors import InfeasibleBudget
from remat.core.graph import Graph
from remat.core.plan import Plan
from remat.core.simulator import simulate
from remat.planning.find import find
from remat.planning.plan import plan


def frontier(
    graph: Graph,
    points: int = 10,
    planner: str = "auto",
    time_limit_s: float | None = None,
    *,
    on_plan: Callable[[int, int], None] | None = None,
) -> tuple[Plan, ...]:
    """Plans for evenly spaced budgets from the smallest feasible peak to the plain one, smallest budget first.

    The overhead never rises with the budget: a plan that costs more than the plan of a smaller budget is replaced by
    it. Nor does the proven bound, since a schedule that fits a smaller budget fits the larger one, too. The last plan
    is the plain step.

    Args:
        graph: the training step.
        points: how many budgets; fewer plans come back where fewer bytes lie between the two ends.
        planner: name of the planner.
        time_limit_s: seconds for each plan; None leaves it to the planner.
        on_plan: called with the number of plans made and to be made, before the first one and after each.

    Raises:
        ValueError: for fewer than two points, or a planner that does not exist.
    """
    if points < 2:
        raise ValueError(f"a frontier of {points} points was asked for; it has two ends, so ask for 2 or more")
    report = on_plan or _silent
    report(0, points)
    budgets = _budgets(graph, points, planner, time_limit_s)
    plans: list[Plan] = []
    for budget_bytes in budgets:
        found = plan(graph, budget_bytes, planner, time_limit_s)
        plans.append(_cheaper(plans[-1], found) if plans else found)
        report(len(plans), len(budgets))
    return _with_bounds_of_larger_budgets(plans)


def _silent(done: int, total: int) -> None:
    """Report to nobody."""


def _budgets(graph: Graph, points: int, planner: str, time_limit_s: float | None) -> list[int]:
    plain_bytes = simulate(graph, graph.plain_schedule).peak_bytes
    smallest_bytes = plain_bytes
    if plain_bytes > 1:
        try:
            smallest_bytes = find(graph, 1, planner, time_limit_s).peak_bytes
        except InfeasibleBudget as error:
            smallest_bytes = error.minimum_bytes
    steps = points - 1
    budgets = (smallest_bytes + (plain_bytes - smallest_bytes) * step // steps for step in range(points))
    return sorted({max(1, budget_bytes) for budget_bytes in budgets})


def _with_bounds_of_larger_budgets(plans: list[Plan]) -> tuple[Plan, ...]:
    found: list[Plan] = []
    for one in reversed(plans):
        if found and found[-1].overhead_lower_bound > one.overhead_lower_bound:
            bound, meaning = found[-1].overhead_lower_bound, found[-1].lower_bound_meaning
            one = dataclasses.replace(one, overhead_lower_bound=bound, lower_bound_meaning=meaning)
        found.append(one)
    return tuple(reversed(found))


def _cheaper(before: Plan, found: Plan) -> Plan:
    """The plan found, with the schedule of the smaller budget where that one costs less."""
    if found.time_s <= before.time_s:
        return found
    return dataclasses.replace(
        found,
        schedule=before.schedule,
        peak_bytes=before.peak_bytes,
        time_s=before.time_s,
        overhead=before.overhead,
        overhead_lower_bound=min(found.overhead_lower_bound, before.overhead),
    )
