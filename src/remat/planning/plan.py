"""``remat.plan``: a graph and a budget -> a plan with its proven bound."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from remat.core.graph import Graph
from remat.core.plan import Plan
from remat.planning.find import find
from remat.planning.prove import prove


def plan(
    graph: Graph,
    budget: int | str = "60%",
    planner: str = "auto",
    time_limit_s: float | None = None,
    **options: Any,
) -> Plan:
    """Find the cheapest schedule of a training step whose peak stays within a budget, and prove a bound beside it.

    Where the plain step fits, the plan is the plain step. Every other schedule is replayed by the independent
    validator before it is handed out.

    Args:
        graph: the training step.
        budget: peak device bytes of the step, everything counted: an int, ``"4GiB"``, or ``"60%"`` of the plain peak.
        planner: a name from ``remat.planners.planner_names()``.
        time_limit_s: wall seconds for both: an anytime planner leaves some of them to the proof.
        options: passed on to the planner.

    Raises:
        InvalidBudget: if the budget cannot be read.
        InfeasibleBudget: if the planner finds nothing within the budget; ``minimum_bytes`` is what it can reach.
        ValueError: if no planner has that name.
    """
    started = time.perf_counter()
    found = find(graph, budget, planner, time_limit_s, **options)
    time_left_s = None if time_limit_s is None else max(0.0, time_limit_s - (time.perf_counter() - started))
    proved = prove(found, graph, time_left_s)
    return dataclasses.replace(proved, plan_seconds=time.perf_counter() - started)
