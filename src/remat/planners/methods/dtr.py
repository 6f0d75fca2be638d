"""Eviction with foresight: dynamic tensor rematerialisation, run offline."""

from __future__ import annotations

import math
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
_FAR_OVER: Final = 1.02
"""A search that is not thorough ends where the first three replays come to more than this share of the budget. On the
steps of JAX's zoo, at 33 budgets at which other methods found nothing, the other eight replays found nothing, either:
each came to what the first ones had come to, 2 to 160 % above the budget, or had no end."""


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
        reached = [peak for peak in peaks if peak is not None]
        if (
            not search.thorough
            and search.best is None
            and min(reached, default=math.inf) > _FAR_OVER * search.budget_bytes
        ):
            return
    for share in _FORWARD_SHARES:
        if not search.expired:
            search.offer_decision(keep_all, search.budget_bytes, forward_share=share)
