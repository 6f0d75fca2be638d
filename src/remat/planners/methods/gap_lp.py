"""Gap LP with rounding: best on graphs without long chains of missing ancestors."""

from __future__ import annotations

from typing import Final

import numpy as np

from remat.planners.linear.gap import build_gap_model, solve_gap_model
from remat.planners.registry import strategy
from remat.planners.search import Search

_DEFLATIONS: Final = (1.0, 0.99, 0.97, 0.94)
_THRESHOLDS: Final = (0.5, 0.25, 0.75, 0.02, 0.98)
"""Shares of the budget and thresholds of rounding. The prototype of this method rounded at 0.5 under a slightly
deflated budget: within .04 points of its bound on ``cm2_resnet50`` at 90, 80 and 70 %. The others are judgements."""
_FEW_OPS: Final = 60
"""A quick search of a step of more ops gives up after the first budget where all that it led to is far over: of a step
of 187 ops that takes .07 s in place of .25. On a step of 56 ops the others found the only schedules that fit."""
_MOST_S: Final = 10.0
"""For one LP; HiGHS needs about a second for 20,000 ops, so that only a graph unlike any training step meets it."""


@strategy("gap_lp", default_limit_s=10.0)
def gap_lp(search: Search) -> None:
    """Round the gap LP at several thresholds and slightly deflated budgets, repair by eviction, then undrop.

    The relaxation follows the rounding of Checkmate (Jain et al. 2020, arXiv:1910.02653), on gaps instead of stages.
    Complexity: four LPs with O(edges) nonzeros, and O(steps) per rounding.
    """
    problem, budget_bytes = search.problem, search.budget_bytes
    pinned = problem.graph.pinned_bytes
    for deflation in _DEFLATIONS:
        if search.expired:
            return
        model = build_gap_model(problem, pinned + int((budget_bytes - pinned) * deflation))
        solution = solve_gap_model(model, time_limit_s=search.left_s(_MOST_S))
        if solution is None:
            continue
        seen: set[bytes] = set()
        peaks: list[int | None] = []
        for threshold in _THRESHOLDS:
            drop = problem.no_drops()
            drop[model.gaps] = (solution.keep < threshold) & problem.may_drop[model.gaps]
            key = np.packbits(drop).tobytes()
            if key in seen or search.expired:
                continue
            seen.add(key)
            peaks.append(search.offer_decision(drop, budget_bytes))
        if problem.count > _FEW_OPS and search.is_in_vain(peaks):
            return
