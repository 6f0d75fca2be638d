"""Peak-greedy: drop what is cheapest per byte at the peak, until the peak fits."""

from __future__ import annotations

from typing import Final

from remat.core.graph import Graph
from remat.planners.registry import strategy
from remat.planners.replay.greedy import greedy_drops
from remat.planners.search import Search
from remat.planners.view.problem import Problem

_DEFLATIONS: Final = (1.0, 0.97, 0.93, 0.88)
"""Shares of the budget to drop for: the greedy does not count what recomputation itself needs. A judgement; where none
is low enough, eviction mends what does not fit, which costs more."""
_QUICK_DEFLATIONS: Final = (1.0, 0.93)
_FEW_OPS: Final = 60
"""The same in one of many searches for a step of more than so many ops. At 160 budgets of 20 steps of JAX's zoo a
search takes .85 of its time so, and four plans are dearer, by .1, .1, .2 and 1.4 points. On a step of 56 ops the other
two found the only schedules that fit at two budgets."""
_MANY_OPS: Final = 10_000
"""Ops from which on the first deflation that fits is the last one, since each further one takes a second or more. On an
LSTM over 512 steps, 17,272 ops, the first one fits, and the other three are .05 to .6 points dearer at 40 and 50 % of
the peak. On smaller steps they bring a cheaper schedule now and then."""


@strategy("peak_greedy", default_limit_s=10.0)
def peak_greedy(search: Search) -> None:
    """Greedy over the gaps at the peak, for several deflated budgets; then eviction for what it missed, and undrop.

    A heuristic without guarantee, known from register allocation as spilling by cost per use (Chaitin 1982,
    doi:10.1145/872726.806984). Complexity: O(gaps) numpy work per dropped gap.
    """
    is_quick = not search.thorough and search.problem.count > _FEW_OPS
    is_large = search.problem.count >= _MANY_OPS
    for deflation in _QUICK_DEFLATIONS if is_quick else _DEFLATIONS:
        if search.expired:
            return
        peak_bytes = _drop_greedily(search, deflation)
        if is_large and peak_bytes is not None and peak_bytes <= search.budget_bytes:
            return


def drop_at_once(search: Search) -> None:
    """Offer the greedy's first schedule that fits, to a search that has none; the time, used up or not, is ignored."""
    search.deadline_s = None
    for deflation in _DEFLATIONS:
        if search.best is None:
            _drop_greedily(search, deflation)


def greedy_schedule(graph: Graph, budget_bytes: int) -> tuple[int, ...] | None:
    """What the greedy finds at once, for who wants to know roughly what a budget asks for; None where nothing fits."""
    search = Search(Problem.of(graph), budget_bytes, thorough=False)
    if search.offer(graph.plain_schedule) > budget_bytes:
        _drop_greedily(search.reduced(), _DEFLATIONS[0])
    return search.best


def _drop_greedily(search: Search, deflation: float) -> int | None:
    """Offer a schedule; its peak before runs that the budget can spare were left out, None where there is none."""
    pinned = search.problem.graph.pinned_bytes
    inner_budget_bytes = pinned + int((search.budget_bytes - pinned) * deflation)
    drop = greedy_drops(search.problem, inner_budget_bytes, search.deadline_s)
    return search.offer_decision(drop, search.budget_bytes)
