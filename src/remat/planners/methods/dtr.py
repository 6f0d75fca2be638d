"""Eviction with foresight: dynamic tensor rematerialisation, run offline."""

from __future__ import annotations

from typing import Final

from remat.planners.registry import strategy
from remat.planners.search import Search

# Judgements, not measured: each value is one more replay, and which one wins differs from graph to graph.
_INNER_BUDGETS: Final = (1.0, 0.97, 0.94)
"""Shares of the budget to evict for; the undrop sweep then uses the rest better than eviction did."""
_DISTANCE_POWERS: Final = (0.5, 0.0, 1.0)
"""Weights of the distance to the next use; 1 is the paper's staleness, 0 leaves it out."""
_FORWARD_SHARES: Final = (0.8, 0.6)
"""Shares of the budget that the forward part may fill, so that the backward part has room to compute in."""


@strategy("dtr", default_limit_s=10.0)
def dtr(search: Search) -> None:
    """Kirisame et al. 2021, "Dynamic Tensor Rematerialization" (arXiv:2006.09616), with the future known.

    Runs the ops in program order and, where the budget would be exceeded, evicts what is cheapest to remake per byte
    and per step until its next use; see :mod:`remat.planners.replay.rematerialize`. Then an undrop sweep. This is done
    for several weights of the distance to the next use and several inner budgets. Complexity: about a dozen replays of
    O(steps + reads).
    """
    pinned = search.problem.graph.pinned_bytes
    keep_all = search.problem.no_drops()
    for share in _INNER_BUDGETS:
        inner = pinned + int(share * (search.budget_bytes - pinned))
        peaks: list[int | None] = []
        for power in _DISTANCE_POWERS:
            if search.expired:
                return
            peaks.append(search.offer_decision(keep_all, inner, distance_power=power))
        if search.is_in_vain(peaks):
            return
    for share in _FORWARD_SHARES:
        if not search.expired:
            search.offer_decision(keep_all, search.budget_bytes, forward_share=share)
