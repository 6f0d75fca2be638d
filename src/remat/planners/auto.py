"""The default planner: several methods in turn, the cheapest schedule that fits."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from remat.graph import Graph
from remat.planners.block_chain import BlockChain, nest_blocks
from remat.planners.dtr import evict
from remat.planners.gap_lp import round_gap_lp
from remat.planners.keep_milp import round_keep_milp
from remat.planners.peak_greedy import drop_greedily, drop_unhurried
from remat.planners.problem import Problem
from remat.planners.registry import register
from remat.planners.search import Search, smallest_peak_schedules
from remat.planners.simulated_annealing import anneal

Strategy = Callable[[Search], None]
"""A method that offers schedules to a search, each after its own improvement pass, until the search has expired."""

CHAIN_STRATEGIES: Final[tuple[Strategy, ...]] = (nest_blocks, drop_greedily, evict, round_keep_milp, anneal)
"""For a training step that falls into blocks, in the order of what they bring per second, since the time may end."""

STRATEGIES: Final[tuple[Strategy, ...]] = (drop_greedily, evict, round_keep_milp, round_gap_lp, anneal)
"""For any other graph."""

_SECONDS_PER_OP: Final = 6e-4
_SECONDS_PER_FREE_OP: Final = 0.06
_MOST_FREE_S: Final = 50.0
# The rest is for the lower bound and the replays.
_SHARE_FOR_SEARCH: Final = 0.8
_LEAST_S: Final = 2.0
_MOST_S: Final = 20.0


@register("auto")
def auto(graph: Graph, budget_bytes: int, *, time_limit_s: float | None = None) -> tuple[int, ...]:
    """Run every strategy within the time limit and return the cheapest schedule that fits.

    Where none fits it returns the smallest peak that eviction reaches, whatever the budget. The result is
    deterministic as long as the strategies end before the time does. First runs stay in program order, unless the
    graph leaves the order free.

    Args:
        graph: the training step.
        budget_bytes: peak bytes of the step.
        time_limit_s: seconds; None allows 2 s and 0.6 ms per op, at most 20 s; where the order is free, 2 s and 60 ms
            per op, at most 50 s.
    """
    if time_limit_s is None:
        seconds_per_op, most_s = (
            (_SECONDS_PER_FREE_OP, _MOST_FREE_S) if graph.free_order else (_SECONDS_PER_OP, _MOST_S)
        )
        time_limit_s = min(most_s, _LEAST_S + seconds_per_op * len(graph.ops))
    search = Search(Problem.of(graph), budget_bytes, time.monotonic() + _SHARE_FOR_SEARCH * time_limit_s)
    search.offer(graph.plain_schedule)
    if search.best is None and budget_bytes >= search.problem.largest_step_bytes:
        inner = search if graph.free_order else search.reduced()
        strategies = CHAIN_STRATEGIES if BlockChain.of(inner.problem).blocks and inner is not search else STRATEGIES
        for strategy in strategies:
            if not search.expired:
                strategy(inner)
        if search.expired:
            # On a busy machine no method may have come to an end, and the schedule of least memory is the dearest.
            drop_unhurried(inner)
    return search.result(smallest_peak_schedules(search.problem) if search.best is None else ())
