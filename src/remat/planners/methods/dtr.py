"""Eviction with foresight: dynamic tensor rematerialisation, run offline."""

from __future__ import annotations

import time

from remat.core.graph import Graph
from remat.planners.registry import register
from remat.planners.search import Search, smallest_peak_schedules
from remat.planners.view.problem import Problem

_INNER_BUDGETS = (1.0, 0.97, 0.94)
_DISTANCE_POWERS = (0.5, 0.0, 1.0)
_FORWARD_SHARES = (0.8, 0.6)


@register("dtr")
def dtr(graph: Graph, budget_bytes: int, *, time_limit_s: float | None = None) -> tuple[int, ...]:
    """Kirisame et al. 2021, "Dynamic Tensor Rematerialization" (arXiv:2006.09616), with the future known.

    Runs the ops in program order and, where the budget would be exceeded, evicts what is cheapest to remake per byte
    and per step until its next use; see :mod:`remat.planners.replay.rematerialize`. Then an undrop sweep.
    Complexity: about a dozen replays of O(steps + reads).
    """
    search = Search(Problem.of(graph), budget_bytes, time.monotonic() + (time_limit_s or 10.0))
    search.offer(graph.plain_schedule)
    if search.best is None and budget_bytes >= search.problem.largest_step_bytes:
        evict(search)
    return search.result(smallest_peak_schedules(search.problem) if search.best is None else ())


def evict(search: Search) -> None:
    """Offer the schedules of the eviction rule, for several weights of distance and inner budgets."""
    pinned = search.problem.graph.pinned_bytes
    keep_all = search.problem.no_drops()
    for share in _INNER_BUDGETS:
        inner = pinned + int(share * (search.budget_bytes - pinned))
        for power in _DISTANCE_POWERS:
            if search.expired:
                return
            search.offer_decision(keep_all, inner, distance_power=power)
    for share in _FORWARD_SHARES:
        if not search.expired:
            search.offer_decision(keep_all, search.budget_bytes, forward_share=share)
