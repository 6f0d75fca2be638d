"""The default planner: several methods in turn, the cheapest schedule that fits."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Final

from remat.planners.chain.programme import BlockChain
from remat.planners.linear.bounds import chain_lower_bound_s
from remat.planners.methods.block_chain import block_chain
from remat.planners.methods.dtr import dtr
from remat.planners.methods.exact_units import exact_units, few_exact_units, more_exact_units
from remat.planners.methods.exact_windows import exact_windows
from remat.planners.methods.gap_lp import gap_lp
from remat.planners.methods.peak_greedy import drop_at_once, peak_greedy
from remat.planners.methods.simulated_annealing import BOLD_SEEDS, anneal_anew, anneal_boldly, simulated_annealing
from remat.planners.methods.squeeze import squeeze
from remat.planners.methods.window_milp import (
    window_milp,
    window_milp_of_binding_steps,
    window_milp_of_other_budgets,
)
from remat.planners.registry import Strategy, strategy
from remat.planners.search import Search
from remat.planners.view.board import Condensed
from remat.planners.walk.orders import low_memory_order

FOR_CHAINS: Final[tuple[Strategy, ...]] = (
    window_milp,
    block_chain,
    peak_greedy,
    dtr,
    simulated_annealing,
    exact_windows,
)
"""For a training step that falls into blocks, in the order of what they bring per second, since the time may end."""

FOR_ANY_GRAPH: Final[tuple[Strategy, ...]] = (
    peak_greedy,
    dtr,
    window_milp,
    gap_lp,
    simulated_annealing,
    exact_windows,
)
"""For any other graph in a fixed order."""

FOR_A_FREE_ORDER: Final[tuple[Strategy, ...]] = (gap_lp, peak_greedy, dtr, window_milp)
"""For one order of a graph that leaves the order free, before annealing changes that order, too."""

QUICK: Final[frozenset[Strategy]] = frozenset((window_milp, block_chain, peak_greedy, dtr, gap_lp))
"""What is asked where a step is planned many times over, as under a compiler: the others take most of the time, and
find what is lost again when the compiler fuses."""

QUICK_ON_SMALL: Final = QUICK | {exact_windows}
"""On a step of up to ``_SMALL`` ops, one window is the whole step, and nothing else finds as much in irregular ones. A
step of 37 ops got to 51 % of its peak by it, and to 63 % without."""

_SMALL: Final = 60

_SHARE_FOR_SEARCH: Final = 0.8
"""Of the time limit; the rest is for replays, and for the proof of the bound. A judgement; more, and a plan has no
bound where time is short."""
_NEAR_ENOUGH: Final = 1.01
"""A schedule within 1 % of the bound's extra time ends the search; the next methods would win less than that."""
_NOISE: Final = 0.003
"""The same in a search that is not thorough, as a share of the plain step: less than what a compiler's fusion changes
in the time of a plan. On a decoder of four layers the first method ends .1 points above the bound, and the other two
took half of the search. Larger, and plans get dearer that another method makes cheaper; smaller, and every budget of
such a step is searched by all methods."""
_LARGE: Final = 10_000
"""Ops of a step from which on the noise is near enough in every search: each further method takes seconds to half a
minute. On 25,000 ops three of them took 48 s after the first that came so near, and won .16 points.
An LSTM over 512 steps, 17,272 ops, costs 20.4 % at half of its peak before eviction is asked, and after its 30 s.
There annealing, whose edits are limited, took 5 s, and won 0 to .07 points at five budgets."""
_FAR: Final = 0.015
"""Of the plain step: where a schedule of a fixed order costs so much more than the bound, as near the smallest peak,
the blocks of the whole step are planned, too, and a hot walk looks for another schedule; in a search that is not
thorough, other budgets of the window MILP are solved. A judgement; lower, and steps are planned longer that this cannot
make cheaper."""
_VERY_FAR: Final = 0.03
"""The same for bold walks, which take 3 s on a U-Net and 5 s on a ResNet50. At 40 % of a U-Net's peak, 1.54 points
above this bound and .6 above the better one, they found nothing; at 25 %, 19 points above, they won 1.7."""
_FAR_FOR_UNITS: Final = 0.016
"""The same for exact units, which take 1.5 to 4 s, and .2 to .6 for their first rounds. A U-Net at 40 % of its peak is
1.54 points above this bound and .6 above the better one; a DenseNet121 at 22 % is 1.75 and 1.66 above them, and comes
nearer."""
_FAR_FOR_EVICTION: Final = 0.02
"""The same for eviction in a search that is not thorough, where something fits: it takes .2 to .5 s on steps of 2,000
ops, and 1.2 to 2.5 on larger ones. GPT-2 at 40 % of its peak, 1.54 points above the bound, and T5, 1.85, got nothing by
it; a ViT and a Whisper, 2.5 and 2.8 above, .6 and .3 points."""
_FARTHEST: Final = 0.05
"""The same there for annealing and for the blocks of the whole step. In Keras' GPT-2 right above its smallest peak
annealing won 13 points in .3 s, and the blocks of a GPT-2 small in a fifth of its peak won 6 in .3; nearer to the bound
each won less than .1 a second."""
_MANY: Final = 2000
_FAR_FOR_EVICTION_OF_MANY: Final = 0.2
"""Ops of a reduced step from which on such a search leaves annealing out, asks eviction from so many points on, and
exact units from five: there these take .5 to 2.5 s each. BERT-large right above its smallest peak, 34 points above the
bound, got 30 by eviction; a DenseNet121 in a fifth, 2.5 above, .7 by eviction and exact units in 2.5 s."""
_MOST_OPS_OF_MORE: Final = 5000
_MOST_OPS_OF_BLOCKS_QUICKLY: Final = 4000
"""The largest reduced step for which a search that is not thorough asks for more, and the largest whole step whose
blocks are planned there; judgements. Menus of the blocks of 6,000 to 7,000 ops took 1 to 1.3 s, and won .9 points once
in four steps."""
_MOST_OPS_OF_BLOCKS: Final = 8000
"""The largest whole step whose blocks are planned; a judgement. BERT-large has 7,353 ops."""
_MOST_OPS_OF_BINDING_STEPS: Final = 1000
"""The largest reduced step whose binding steps are solved for in whole numbers. A ResNet50 has 1,371 ops, and takes 5 s
to choose them at a quarter of its peak."""
_SAFETY_S: Final = 120.0
_SAFETY_S_PER_OP: Final = 2e-3
_SAFETY_S_PER_FREE_OP: Final = 0.2
"""The clock where the caller gives none, far beyond what the fixed work takes on the graphs of ``benchmarks`` even on a
busy machine. Shorter, and a busy machine finds a dearer plan than an idle one."""


@strategy("auto")
def auto(search: Search) -> None:
    """Run several methods and keep the cheapest schedule that fits.

    First runs stay in program order, unless the graph leaves the order free. In a fixed order the methods end early
    where what was found costs at most 1 % more than a proven bound. Where it costs 1.5 points of a step more, the
    blocks of the whole step are planned, too, the repeated runs of a few ops at a time planned again exactly, and steps
    that are not too large solved at the steps that bind, and walked anew; three points above it, by bold walks, too.
    Where it is 1.6 points above the bound at last, many more rounds of exact units follow. Where there was no time for
    any method, the first schedule of the greedy one that fits is the answer.

    Without a time limit each method does a fixed amount of work, so that the result is the same however fast or busy
    the machine is; only for graphs unlike any training step a clock ends it, after two minutes and 2 ms per op, or
    0.2 s per op where the order is free.

    In a search that is not thorough, one of many for the same step, annealing, exact windows and eviction are left out
    at first. There, and for steps of 10,000 ops and more, .3 % of the plain step above the bound is near enough. Where
    the plan is far above the bound, what brings most for its seconds is asked there, too: from 1.5 points on the window
    MILP for other budgets, from 1.6 the first rounds of exact units, from 2 eviction, and from 5 annealing and the
    blocks of the whole step.
    """
    graph = search.problem.graph
    now_s = time.monotonic()
    limit_s = _SAFETY_S + (_SAFETY_S_PER_FREE_OP if graph.free_order else _SAFETY_S_PER_OP) * len(graph.ops)
    if search.deadline_s is not None:
        limit_s = search.deadline_s - now_s
    search.deadline_s = now_s + _SHARE_FOR_SEARCH * limit_s
    if not search.expired:
        if graph.free_order and not search.problem.order_is_tied:
            _search_any_order(search)
        else:
            _search_fixed_order(search)
    if search.expired and search.best is None:
        # No method came to an end, and the schedule of the smallest peak is the dearest of all.
        drop_at_once(search.reduced())


def _search_fixed_order(search: Search) -> None:
    inner = search.reduced()
    plain_s = search.problem.graph.time_s
    bound_s = chain_lower_bound_s(search.problem, search.budget_bytes, most_samples=1)
    enough_s = _NEAR_ENOUGH * bound_s
    is_large = inner.problem.count >= _LARGE
    if not search.thorough or is_large:
        enough_s = max(enough_s, bound_s + _NOISE * plain_s)
    for method in FOR_CHAINS if BlockChain.of(inner.problem).blocks else FOR_ANY_GRAPH:
        if method is exact_windows and inner.problem.count > _SMALL and search.best is not None:
            continue
        if not search.thorough and method not in (QUICK_ON_SMALL if inner.problem.count <= _SMALL else QUICK):
            continue
        if search.best is not None and (
            (method is dtr and (is_large or not search.thorough)) or (method is simulated_annealing and is_large)
        ):
            continue  # Eviction reaches small peaks, and rarely the cheapest schedule. A walk has an edit for each op.
        if not search.expired and search.best_time_s - plain_s > enough_s:
            method(inner)
    if inner.problem.count > _SMALL:
        _search_further(search, inner, plain_s + bound_s)


def _search_further(search: Search, inner: Search, least_s: float) -> None:
    """Ask for more where what was found is far above the bound, first what brings most for its seconds."""
    plain_s = search.problem.graph.time_s

    def is_beyond(share: float) -> bool:
        return search.best_time_s > least_s + share * plain_s

    far_for_units = _FAR_FOR_UNITS
    if not search.thorough:
        if search.best is None or inner.problem.count > _MOST_OPS_OF_MORE:
            return
        has_many = inner.problem.count > _MANY
        if is_beyond(_FAR):
            window_milp_of_other_budgets(inner)
        if is_beyond(_FAR_FOR_EVICTION_OF_MANY if has_many else _FAR_FOR_EVICTION):
            dtr(inner)
        if is_beyond(_FARTHEST) and not has_many:
            simulated_annealing(inner)
        far_for_units = _FARTHEST if has_many else _FAR_FOR_UNITS
    most_ops, blocks_from = (_MOST_OPS_OF_BLOCKS, _FAR) if search.thorough else (_MOST_OPS_OF_BLOCKS_QUICKLY, _FARTHEST)
    if is_beyond(blocks_from) and search.problem.count <= most_ops:
        # The reduced step's menus have fewer options, and count small storages as if they were always there: GPT-2 in
        # a fifth of its peak costs 33.6 % by it and 27.4 by the whole step.
        block_chain(search)
        _adopt(inner, search)
    begun = few_exact_units(inner) if is_beyond(far_for_units) else None
    if not search.thorough:
        return
    if is_beyond(_FAR) and inner.problem.count <= _MOST_OPS_OF_BINDING_STEPS:
        window_milp_of_binding_steps(inner)
    if is_beyond(_FAR):
        _walk_afresh(inner, anneal_anew)
    for seed in BOLD_SEEDS:
        walk = partial(anneal_boldly, seed=seed, impatient=search.best is None)
        if is_beyond(_VERY_FAR) and not _walk_afresh(inner, walk):
            break
    if is_beyond(_FAR_FOR_UNITS):
        exact_units(inner, begun)


def improve(search: Search) -> None:
    """Look for cheaper schedules near the best one that a search knows, as in one that was not thorough."""
    inner = search.reduced()
    _adopt(inner, search)
    more_exact_units(inner)


def squeeze_into(search: Search, schedule: Sequence[int]) -> None:
    """Offer what becomes of a schedule that is somewhat over the budget, made cheaper there by a few exact units."""
    inner = search.reduced()
    squeeze(inner, Condensed.of(search.problem).contract(schedule))
    few_exact_units(inner)


def _adopt(inner: Search, search: Search) -> None:
    """Make the best schedule of the whole step known to the search over the reduced one, if it fits there."""
    if search.best is not None and (inner.best is None or inner.translate(inner.best) != search.best):
        budget_bytes = inner.budget_bytes
        inner.offer(Condensed.of(search.problem).contract(search.best))
        inner.budget_bytes = budget_bytes  # What its small storages need too much is its own.


def _walk_afresh(search: Search, walk: Strategy) -> bool:
    """Offer what the first rounds of exact units make of what a walk finds, best or not; does it find anything?"""
    afresh = search.afresh()
    walk(afresh)
    few_exact_units(afresh)
    if afresh.best is not None:
        search.offer(afresh.best)
    return afresh.best is not None


def _search_any_order(search: Search) -> None:
    """The methods for a fixed order over one that needs less memory than the program's, then annealing."""
    order = low_memory_order(search.problem, search.budget_bytes)
    search.offer(order)
    if search.best_time_s <= search.problem.graph.time_s:
        return
    inner = search.reordered(order)
    for method in FOR_A_FREE_ORDER:
        if not search.expired:
            method(inner)
    if search.thorough:
        simulated_annealing(search)
        exact_windows(search)
