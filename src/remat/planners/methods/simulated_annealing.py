"""Simulated annealing, as a planner of its own and as the strategy of ``auto`` that finds orders."""

from __future__ import annotations

import math
import time
from typing import Final

from remat.core.graph import Graph
from remat.planners.linear.gap import build_gap_model, solve_gap_model
from remat.planners.registry import register
from remat.planners.search import Search, smallest_peak_schedules
from remat.planners.view.problem import Problem
from remat.planners.walk.annealing import Walk
from remat.planners.walk.board import Board, expand
from remat.planners.walk.orders import low_memory_order

_ROUNDS: Final = ((5.0, 0.5), (0.0, 0.4), (1.5, 0.5), (5.0, 0.5), (0.0, 0.5), (0.0, 1.0))
"""How hot each round begins, in runs of an op of middling length (0: from the best schedule known), and its share of
the steps and of the time left."""

_STEPS_PER_OP: Final = 800
_MOST_STEPS: Final = 400_000
_FIXED_STEPS_PER_RUN: Final = 12
_MOST_FIXED_STEPS: Final = 24_000
_SMALL: Final = 200
_HEATS: Final = (5.0,)
# Where one walk ends is luck, so that several short ones find more than a long one that takes as long.
_HEATS_OF_SMALL: Final = (1.5, 1.5, 1.5)
_LAST_SEED: Final = 3
_FRESH_STEPS: Final = 45_000
_FRESH_STEPS_PER_RUN: Final = 900
_COLD: Final = 1e-5
_COLDEST: Final = 1e-6
_WARM: Final = 2e-4
_SMALL_GAP: Final = 5e-4
_NO_GAP: Final = 2e-4
_TIGHTENINGS: Final = 3
_MOST_IDLE_ROUNDS: Final = 3
_FEWEST_STEPS: Final = 2000


@register("simulated_annealing")
def simulated_annealing(graph: Graph, budget_bytes: int, *, time_limit_s: float | None = None) -> tuple[int, ...]:
    """Walk from the plain schedule, over recomputations and, where the graph leaves it free, over the order.

    Imanishi et al. 2023, "A fast heuristic to optimize time-space tradeoff for large models" (FastSA, NeurIPS 2023),
    anneal too; the state and the edits here are others, see :class:`remat.planners.walk.annealing.Walk`. No guarantee.
    Without a time limit it is deterministic. Complexity: up to 800 edits per op and 400,000 in all, each of O(1) range
    additions in numpy.
    """
    deadline_s = None if time_limit_s is None else time.monotonic() + time_limit_s
    search = Search(Problem.of(graph), budget_bytes, deadline_s)
    search.offer(graph.plain_schedule)
    if search.best is None and budget_bytes >= search.problem.largest_step_bytes:
        anneal(search)
    return search.result(smallest_peak_schedules(search.problem) if search.best is None else ())


def anneal(search: Search, *, thorough: bool = True) -> None:
    """Offer what annealing finds, in a free order from one that needs little memory, then from the best known.

    Where the order is fixed, the step is small and it is to be ``thorough``, many edits are tried from the start, too.
    """
    problem = search.problem
    board = Board(problem, whole=problem.graph.free_order)
    count = problem.count
    if not count or (not any(board.repeatable) and not board.whole):
        return
    if not board.whole:
        counted = sum(board.counts)
        steps = min(_MOST_FIXED_STEPS, _FIXED_STEPS_PER_RUN * counted)
        if search.best is not None:
            # The longer the schedule, the longer each edit takes.
            steps = steps * count // len(search.best)
        is_small = thorough and counted <= _SMALL
        if search.best is None or is_small:
            # On a small step many edits take little time, and find what no rule of thumb does.
            fresh = max(4 * steps, min(_FRESH_STEPS, _FRESH_STEPS_PER_RUN * counted) if is_small else 0)
            heats, share = (_HEATS_OF_SMALL, 0.3) if is_small else (_HEATS, 0.7)
            for seed, heat in enumerate(heats):
                hot, part = _hot(board, heat), fresh // len(heats)
                _cool(search, board, seed, hot, _COLD, part, _part(search, share), fresh=True)
        _cool(search, board, _LAST_SEED, _WARM, _COLDEST, steps, search.deadline_s)
        return
    extra_s, bound_s = search.best_time_s - problem.graph.time_s, _bound_s(search)
    # A bound for program order says nothing once another order goes below it.
    gap = extra_s - bound_s if bound_s <= extra_s else extra_s
    if gap <= _NO_GAP * problem.graph.time_s:
        return
    left = min(_MOST_STEPS, max(_FEWEST_STEPS, count * min(_STEPS_PER_OP, 10 * count)))
    idle = 0
    for seed, (heat, share) in enumerate(_ROUNDS):
        fresh = heat > 0
        before_s = search.best_time_s
        if idle == _MOST_IDLE_ROUNDS:
            return
        if search.expired or search.best_time_s <= problem.graph.time_s:
            return
        if fresh and gap <= _SMALL_GAP * problem.graph.time_s:
            continue
        steps = int(share * left)
        left -= steps
        hot, cold = (_hot(board, heat), _COLD) if fresh else (_WARM, _COLDEST)
        _cool(search, board, seed, hot, cold, steps, _part(search, share), fresh=fresh)
        idle = 0 if search.best_time_s < before_s else idle + 1


def _cool(
    search: Search,
    board: Board,
    seed: int,
    hot: float,
    cold: float,
    steps: int,
    deadline_s: float | None,
    *,
    fresh: bool = False,
) -> None:
    budget_bytes = search.budget_bytes
    start = low_memory_order(search.problem, budget_bytes) if fresh or search.best is None else search.best
    for _ in range(_TIGHTENINGS):
        walk = Walk(board, start, budget_bytes, seed)
        walk.run(steps, hot, cold, deadline_s)
        if walk.best is None:
            return
        schedule = expand(board, walk.best)
        excess_bytes = search.offer(schedule) - search.budget_bytes
        if excess_bytes <= 0:
            return
        # The board counts small storages as the plain schedule has them; what it missed comes off the budget.
        budget_bytes -= excess_bytes
        start, hot, steps = schedule, min(hot, 10 * cold), steps // 4


def _hot(board: Board, heat: float) -> float:
    """The temperature of so many runs of an op of middling length, as a share of the plain step."""
    times = sorted(t for t, may in zip(board.repeat_time_s, board.repeatable, strict=True) if may and t > 0)
    if not times:
        return 1e-3
    return min(3e-2, max(3e-4, heat * times[len(times) // 2] / board.problem.graph.time_s))


def _bound_s(search: Search) -> float:
    """The least extra time in program order, as far as the gap LP knows: how much there is to win."""
    if not math.isfinite(search.best_time_s):
        return 0.0
    solution = solve_gap_model(build_gap_model(search.problem, search.budget_bytes), time_limit_s=2.0)
    return 0.0 if solution is None else solution.bound_s


def _part(search: Search, share: float) -> float | None:
    if search.deadline_s is None:
        return None
    now_s = time.monotonic()
    return now_s + share * (search.deadline_s - now_s)
