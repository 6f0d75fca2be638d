"""Peak-greedy: drop what is cheapest per byte at the peak, until the peak fits."""

from __future__ import annotations

from typing import Final

from remat.planners.registry import strategy
from remat.planners.replay.greedy import greedy_drops
from remat.planners.search import Search

_DEFLATIONS: Final = (1.0, 0.97, 0.93, 0.88)
"""Shares of the budget to drop for: the greedy does not count what recomputation itself needs. A judgement; where none
is low enough, eviction mends what does not fit, which costs more."""
_QUICK_DEFLATIONS: Final = (1.0, 0.93)
_FEW_OPS: Final = 60
"""The same in one of many searches for a step of more than so many ops. At 160 budgets of 20 steps of JAX's zoo a
search takes .85 of its time so, and four plans are dearer, by .1, .1, .2 and 1.4 points. On a step of 56 ops the other
two found the only schedules that fit at two budgets."""


@strategy("peak_greedy", default_limit_s=10.0)
def peak_greedy(search: Search) -> None:
    """Greedy over the gaps at the peak, for several deflated budgets; then eviction for what it missed, and undrop.

    A heuristic without guarantee, known from register allocation as spilling by cost per use (Chaitin 1982,
    doi:10.1145/872726.806984). Complexity: O(gaps) numpy work per dropped gap.
    """
    is_quick = not search.thorough and search.problem.count > _FEW_OPS
    for deflation in _QUICK_DEFLATIONS if is_quick else _DEFLATIONS:
        if not search.expired:
            _drop_greedily(search, deflation)


def drop_at_once(search: Search) -> None:
    """Offer the greedy's first schedule that fits, to a search that has none; the time, used up or not, is ignored."""
    search.deadline_s = None
    for deflation in _DEFLATIONS:
        if search.best is None:
            _drop_greedily(search, deflation)


def _drop_greedily(search: Search, deflation: float) -> None:
    pinned = search.problem.graph.pinned_bytes
    inner_budget_bytes = pinned + int((search.budget_bytes - pinned) * deflation)
    drop = greedy_drops(search.problem, inner_budget_bytes, search.deadline_s)
    search.offer_decision(drop, search.budget_bytes)
