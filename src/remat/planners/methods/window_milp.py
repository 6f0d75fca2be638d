"""Window MILP: the model of the chain-aware bound with whole numbers, solved for a few budgets and rounded off."""

from __future__ import annotations

from typing import Final

from remat.planners.linear.highs import solve
from remat.planners.linear.window import WindowModel
from remat.planners.registry import strategy
from remat.planners.search import Search
from remat.planners.view.problem import BoolArray

_DEFLATIONS: Final = (1.0, 0.98, 0.95, 0.9)
"""Shares of the budget that are solved for, since the model leaves out what recomputation itself needs; a judgement."""
_QUICK_DEFLATIONS: Final = (1.0, 0.95)
"""The same, in one of many searches for a step."""
_SAMPLES: Final = 1
"""Only the heaviest step is looked at, which keeps the MILP at a few hundred columns; a judgement."""
_GAP: Final = 0.005
_MOST_NODES: Final = 100
"""Measured: GPT-2 at 80 % takes 8.8 processor seconds instead of 11.7, BERT-large at half 2.1 instead of 6.9, with the
same plans. What a better solution would win is lost again in rounding and repair."""
_MOST_S: Final = 5.0
"""For one MILP; a judgement. The nodes end it long before, unless the machine is very busy."""


@strategy("window_milp", default_limit_s=10.0)
def window_milp(search: Search) -> None:
    """Solve the window MILP over the heaviest step for several deflated budgets, repair by eviction, then undrop.

    The model (:mod:`remat.planners.linear.window`) says what is kept across the heaviest step and what is made again
    behind it, with all that this reads; what it leaves out is how much lies in memory while things are made again. A
    coarser model than Checkmate's (Jain et al. 2020, arXiv:1910.02653) with a few hundred columns for thousands of ops;
    optimal within it up to 0.5 %.
    """
    pinned = search.problem.graph.pinned_bytes
    for deflation in _DEFLATIONS if search.thorough else _QUICK_DEFLATIONS:
        left_s = search.left_s(_MOST_S)
        if left_s <= 0:
            return
        budget_bytes = pinned + int(deflation * (search.budget_bytes - pinned))
        drop = _decision(WindowModel(search.problem, budget_bytes, _SAMPLES, whole_numbers=True), left_s)
        if drop is not None:
            search.offer_decision(drop, search.budget_bytes)


def _decision(model: WindowModel, time_limit_s: float) -> BoolArray | None:
    """Which gaps are dropped: those across a sample over which the solution does not keep the storage; None if none."""
    linear = model.linear
    if not model.kept:
        return None
    solution = solve(linear, time_limit_s=time_limit_s, gap=_GAP, most_nodes=_MOST_NODES)
    if solution is None:
        return None
    problem = model.problem
    drop = problem.no_drops()
    for (s, sample), column in model.kept.items():
        place = int(model.places[sample])
        gap = problem.first_gap[s] + sum(use <= place for use in problem.uses[s]) - 1
        if problem.is_tail[gap] or problem.may_drop[gap]:
            drop[gap] = solution.values[column] < 0.5
    return drop
