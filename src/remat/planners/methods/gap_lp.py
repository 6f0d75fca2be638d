"""Gap LP with rounding: best on graphs without long chains of missing ancestors."""

from __future__ import annotations

import time

import numpy as np

from remat.core.graph import Graph
from remat.planners.linear.gap import build_gap_model, solve_gap_model
from remat.planners.registry import register
from remat.planners.search import Search, smallest_peak_schedules
from remat.planners.view.problem import Problem

_DEFLATIONS = (1.0, 0.99, 0.97, 0.94)
_THRESHOLDS = (0.5, 0.25, 0.75, 0.02, 0.98)


@register("gap_lp")
def gap_lp(graph: Graph, budget_bytes: int, *, time_limit_s: float | None = None) -> tuple[int, ...]:
    """Round the gap LP at several thresholds and slightly deflated budgets, repair by eviction, then undrop.

    The relaxation follows the rounding of Checkmate (Jain et al. 2020, arXiv:1910.02653), on gaps instead of stages.
    Complexity: four LPs with O(edges) nonzeros, and O(steps) per rounding.
    """
    search = Search(Problem.of(graph), budget_bytes, time.monotonic() + (time_limit_s or 10.0))
    search.offer(graph.plain_schedule)
    if search.best is None and budget_bytes >= search.problem.largest_step_bytes:
        round_gap_lp(search)
    return search.result(smallest_peak_schedules(search.problem) if search.best is None else ())


def round_gap_lp(search: Search) -> None:
    """Offer the roundings of the gap LP to a search."""
    problem, budget = search.problem, search.budget_bytes
    pinned = problem.graph.pinned_bytes
    for deflation in _DEFLATIONS:
        if search.expired:
            return
        inner = pinned + int((budget - pinned) * deflation)
        left = 10.0 if search.deadline_s is None else search.deadline_s - time.monotonic()
        model = build_gap_model(problem, inner)
        solution = solve_gap_model(model, time_limit_s=left)
        if solution is None:
            continue
        seen: set[bytes] = set()
        for threshold in _THRESHOLDS:
            drop = problem.no_drops()
            drop[model.gaps] = (solution.keep < threshold) & problem.may_drop[model.gaps]
            key = np.packbits(drop).tobytes()
            if key in seen or search.expired:
                continue
            seen.add(key)
            search.offer_decision(drop, budget)
