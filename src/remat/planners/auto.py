"""The default planner: several methods in turn, the cheapest schedule that fits."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from remat.core.graph import Graph
from remat.planners.linear.chain_bound import chain_lower_bound_s
from remat.planners.linear.exact_windows import plan_windows_again
from remat.planners.methods.block_chain import BlockChain, nest_blocks
from remat.planners.methods.dtr import evict
from remat.planners.methods.gap_lp import round_gap_lp
from remat.planners.methods.peak_greedy import drop_greedily, drop_unhurried
from remat.planners.methods.simulated_annealing import anneal
from remat.planners.methods.window_milp import round_window_milp
from remat.planners.registry import register
from remat.planners.search import Search, smallest_peak_schedules
from remat.planners.view.problem import Problem
from remat.planners.walk.orders import low_memory_order

Strategy = Callable[[Search], None]
"""A method that offers schedules to a search, each after its own improvement pass, until the search has expired."""

CHAIN_STRATEGIES: Final[tuple[Strategy, ...]] = (
    round_window_milp,
    nest_blocks,
    drop_greedily,
    evict,
    anneal,
    plan_windows_again,
)
"""For a training step that falls into blocks, in the order of what they bring per second, since the time may end."""

STRATEGIES: Final[tuple[Strategy, ...]] = (
    drop_greedily,
    evict,
    round_window_milp,
    round_gap_lp,
    anneal,
    plan_windows_again,
)
"""For any other graph."""

STRATEGIES_IN_ORDER: Final[tuple[Strategy, ...]] = (round_gap_lp, drop_greedily, evict, round_window_milp)
"""For an order that annealing changes later."""

# The rest is for the lower bound and the replays.
_SHARE_FOR_SEARCH: Final = 0.8
_NEAR_ENOUGH: Final = 1.01
# Far beyond what the fixed work takes on the graphs of the suite.
_SAFETY_S: Final = 120.0
_SAFETY_S_PER_OP: Final = 2e-3
_SAFETY_S_PER_FREE_OP: Final = 0.2


@register("auto")
def auto(graph: Graph, budget_bytes: int, *, time_limit_s: float | None = None) -> tuple[int, ...]:
    """Run every strategy and return the cheapest schedule that fits.

    Where none fits it returns the smallest peak that eviction reaches, whatever the budget. First runs stay in program
    order, unless the graph leaves the order free. In a fixed order the strategies end early where what was found costs
    at most 1 % more than a proven bound.

    Args:
        graph: the training step.
        budget_bytes: peak bytes of the step.
        time_limit_s: wall seconds, after which no strategy is started and those at work return what they have. None:
            each does a fixed amount of work, so that the result is the same however fast or busy the machine is; only
            for graphs unlike any training step a clock ends it, after two minutes and 2 ms per op, or 0.2 s per op
            where the order is free.
    """
    if time_limit_s is None:
        time_limit_s = _SAFETY_S + (_SAFETY_S_PER_FREE_OP if graph.free_order else _SAFETY_S_PER_OP) * len(graph.ops)
    search = Search(Problem.of(graph), budget_bytes, time.monotonic() + _SHARE_FOR_SEARCH * time_limit_s)
    search.offer(graph.plain_schedule)
    if search.best is None and budget_bytes >= search.problem.largest_step_bytes:
        if graph.free_order and not search.problem.order_is_tied:
            _search_any_order(search)
        else:
            _search_fixed_order(search)
        if search.expired:
            # On a busy machine no method may have come to an end, and the schedule of least memory is the dearest.
            drop_unhurried(search.reduced())
    return search.result(smallest_peak_schedules(search.problem) if search.best is None else ())


def _search_fixed_order(search: Search) -> None:
    inner = search.reduced()
    enough_s = _NEAR_ENOUGH * chain_lower_bound_s(search.problem, search.budget_bytes, most_samples=1)
    for strategy in CHAIN_STRATEGIES if BlockChain.of(inner.problem).blocks else STRATEGIES:
        if not search.expired and search.best_time_s - search.problem.graph.time_s > enough_s:
            strategy(inner)


def _search_any_order(search: Search) -> None:
    """The strategies for a fixed order over one that needs less memory than the program's, then annealing."""
    order = low_memory_order(search.problem, search.budget_bytes)
    search.offer(order)
    if search.best_time_s <= search.problem.graph.time_s:
        return
    inner = search.reordered(order)
    for strategy in STRATEGIES_IN_ORDER:
        if not search.expired:
            strategy(inner)
    anneal(search)
    plan_windows_again(search)
