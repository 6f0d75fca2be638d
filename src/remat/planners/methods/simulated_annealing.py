"""Simulated annealing: over recomputations, and over the order too where the graph leaves it free."""

from __future__ import annotations

import math
import time
from typing import Final

from remat.planners.linear.gap import build_gap_model, solve_gap_model
from remat.planners.registry import strategy
from remat.planners.search import Search
from remat.planners.view.board import Board, expand
from remat.planners.walk.annealing import Walk
from remat.planners.walk.orders import low_memory_order

_ROUNDS: Final = ((5.0, 0.5), (0.0, 0.4), (1.5, 0.5), (5.0, 0.5), (0.0, 0.5), (0.0, 1.0))
"""In a free order: how hot each round begins, and its share of the edits and the time left; a judgement.

Heat is counted in runs of an op of median length; 0 begins with the best schedule known instead of a new start. Other
ways to cool bring nothing on layered graphs of 1000 ops that is more than chance (``docs/planners.md``).
"""

_STEPS_PER_OP: Final = 800
_FEWEST_STEPS: Final = 2000
_MOST_STEPS: Final = 400_000
"""Edits in all, in a free order. On layered graphs of 1000 ops four times as many bring .6 % of a step."""

_MOST_IDLE_ROUNDS: Final = 3
_NO_GAP: Final = 2e-4
_SMALL_GAP: Final = 5e-4
"""When to stop: after so many rounds that found nothing; where the proven bound leaves .02 % of a step to win; and no
round from a new start where it leaves .05 %. Judgements; smaller values cost seconds for what nobody would notice."""

_MOST_S_OF_BOUND: Final = 2.0
"""For that bound, an LP of milliseconds; without it every round is walked. A judgement."""

_FIXED_STEPS_PER_RUN: Final = 12
_MOST_FIXED_STEPS: Final = 24_000
"""Edits of the best schedule, in a fixed order: a judgement. There the walk mends little that other methods left."""

_HEAT: Final = 5.0
"""How hot a walk from a new start begins, in a fixed order; in the unit of ``_ROUNDS``. A judgement."""

_SMALL: Final = 200
_HEATS_OF_SMALL: Final = (1.5, 1.5, 1.5)
"""Up to so many ops, three walks from new starts. Where one walk ends is luck: on ten traced steps of up to 200 ops at
45, 60 and 35 % of the peak, three were .044 points of overhead above the best of four settings on average, one .109."""

_FRESH_STEPS: Final = 45_000
_FRESH_STEPS_PER_RUN: Final = 900
"""Edits of those walks. On layered graphs of 20 to 60 ops they brought one overhead from 84.2 % to 53.6, and another
from 8.8 to its optimum of 6.3."""

_LOOKS_IN_VAIN: Final = 3
_FEWEST_IN_VAIN: Final = 2500
"""In a search that is not thorough, a walk gives up after one part in so many of its edits without progress, but not
after fewer than this. With a third alone, 1,184 edits of a step of 74 ops, the smallest peak that was found for eight
products in TensorFlow was 24.6 MB where 20.7 fits; 2,500 edits of such a step take .1 s."""

_LAST_SEED: Final = 3
"""Of the last walk: none of the seeds of those before it."""

_ANEW_SEED: Final = 7
_ANEW_HOT: Final = 2e-2
_ANEW_STEPS: Final = 36_000
_ANEW_PATIENCE: Final = _ANEW_STEPS // 3
_MOST_OPS_ANEW: Final = 1000
"""Of the walk under a tight budget, see ``anneal_anew``: its first temperature as a share of the plain step, its edits,
after how many without progress it gives up where nothing fits yet, and the largest step. On a U-Net's 493 ops it takes
2 s; on GPT-2's 2,290, with 60,000 edits and 34 s, it found nothing that fits in a fifth of the peak."""
_PART_OF_WALK: Final = 0.75
"""Of the time left under a limit, what such a walk may use; the rest is for exact units after it. A judgement."""
BOLD_SEEDS: Final = (4, 1)
_MOST_OPS_BOLD: Final = 1500
"""Of ``anneal_boldly``, with as many edits for each walk: two new starts. Where one ends is luck: of four new starts on
a U-Net at 25 % of its peak, three were 3 points above the fourth. A ResNet50 of 1,371 ops takes 3 s for each. On an
EfficientNetB0 of 1,629 they took 10 s and found nothing. With patience the first walk gives up right above the smallest
peak of a residual network, where it came to 69 % and the second to 56."""

# Judgements, not measured, the rest.
_COLD: Final = 1e-5
_COLDEST: Final = 1e-6
_WARM: Final = 2e-4
"""Temperatures as shares of the plain step: the end of a walk from a new start, the end and the beginning of one from
the best schedule. Warmer ends leave the schedule a little above the nearest optimum; a warmer start forgets it."""
_LEAST_HOT: Final = 3e-4
_MOST_HOT: Final = 3e-2
_HOT_WITHOUT_TIMES: Final = 1e-3
"""Limits of a hot beginning, which is measured in runs of a median op, and what it is where no op takes time."""
_TIGHTENINGS: Final = 3
"""How often a walk is repeated shortly for a smaller budget, where its schedule missed the whole step's."""


@strategy("simulated_annealing")
def simulated_annealing(search: Search) -> None:
    """Walk from the plain schedule, over recomputations and, where the graph leaves it free, over the order.

    Imanishi et al. 2023, "A fast heuristic to optimize time-space tradeoff for large models" (FastSA, NeurIPS 2023),
    anneal too; the state and the edits here are others, see :class:`remat.planners.walk.annealing.Walk`. No guarantee.
    Without a time limit it is deterministic. Complexity: up to 800 edits per op and 400,000 in all, each of O(1) range
    additions in numpy.
    """
    problem = search.problem
    board = Board(problem, whole=problem.graph.free_order)
    if search.expired or not problem.count:
        return
    if board.whole:
        _anneal_order_too(search, board)
    elif any(board.repeatable):
        _anneal_recomputations(search, board)


def anneal_anew(search: Search) -> None:
    """In a fixed order, offer what a hot walk from the plain step finds: for a budget at which all else is far off.

    Near the smallest peak it ends somewhere else than rules of thumb do, since it may recompute a storage several times
    over, and keep for a short while what that reads.
    """
    if search.expired or search.problem.count > _MOST_OPS_ANEW:
        return
    board = Board(search.problem, whole=False)
    if any(board.repeatable):
        limit_s = _part(search, _PART_OF_WALK)
        _cool(search, board, _ANEW_SEED, _ANEW_HOT, _COLD, _ANEW_STEPS, limit_s, fresh=True, patience=_ANEW_PATIENCE)


def anneal_boldly(search: Search, seed: int, *, impatient: bool = False) -> None:
    """The same with a bold walk, from the plain step: where even that is far off.

    Args:
        search: what is offered to.
        seed: one of ``BOLD_SEEDS``.
        impatient: does the walk give up where it stays far above the budget?
    """
    board = Board(search.problem, whole=False)
    if search.expired or search.problem.count > _MOST_OPS_BOLD or not any(board.repeatable):
        return
    limit_s, patience = _part(search, _PART_OF_WALK), _ANEW_PATIENCE if impatient else None
    _cool(search, board, seed, _ANEW_HOT, _COLD, _ANEW_STEPS, limit_s, fresh=True, bold=True, patience=patience)


def _anneal_recomputations(search: Search, board: Board) -> None:
    """Offer what a short walk finds from the best schedule known; before it, on small steps, walks from the start."""
    counted = sum(board.counts)
    steps = min(_MOST_FIXED_STEPS, _FIXED_STEPS_PER_RUN * counted)
    if search.best is not None:
        # The longer the schedule, the longer each edit takes.
        steps = steps * search.problem.count // len(search.best)
    is_small = search.thorough and counted <= _SMALL
    if search.best is None or is_small:
        # On a small step many edits take little time, and find what no rule of thumb does.
        fresh = max(4 * steps, min(_FRESH_STEPS, _FRESH_STEPS_PER_RUN * counted) if is_small else 0)
        heats, share = (_HEATS_OF_SMALL, 0.3) if is_small else ((_HEAT,), 0.7)
        for seed, heat in enumerate(heats):
            hot, part = _hot(board, heat), fresh // len(heats)
            patience = None if search.thorough else max(_FEWEST_IN_VAIN, part // _LOOKS_IN_VAIN)
            if not _cool(search, board, seed, hot, _COLD, part, _part(search, share), fresh=True, patience=patience):
                return
    _cool(search, board, _LAST_SEED, _WARM, _COLDEST, steps, search.deadline_s)


def _anneal_order_too(search: Search, board: Board) -> None:
    """Offer what walks find in turn, from an order that needs little memory and from the best schedule known."""
    count, plain_s = search.problem.count, search.problem.graph.time_s
    extra_s, bound_s = search.best_time_s - plain_s, _bound_s(search)
    # A bound for program order says nothing once another order goes below it.
    gap = extra_s - bound_s if bound_s <= extra_s else extra_s
    if gap <= _NO_GAP * plain_s:
        return
    left = min(_MOST_STEPS, max(_FEWEST_STEPS, count * min(_STEPS_PER_OP, 10 * count)))
    idle = 0
    for seed, (heat, share) in enumerate(_ROUNDS):
        fresh = heat > 0
        before_s = search.best_time_s
        if idle == _MOST_IDLE_ROUNDS or search.expired or before_s <= plain_s:
            return
        if fresh and gap <= _SMALL_GAP * plain_s:
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
    patience: int | None = None,
    bold: bool = False,
) -> bool:
    """Offer what a walk finds; is it worth to look further? Not where it gave up far above the budget."""
    budget_bytes = search.budget_bytes
    start = low_memory_order(search.problem, budget_bytes) if fresh or search.best is None else search.best
    for _ in range(_TIGHTENINGS):
        walk = Walk(board, start, budget_bytes, seed, patience=patience, bold=bold)
        walk.run(steps, hot, cold, deadline_s)
        if walk.best is None:
            return not walk.is_hopeless
        schedule = expand(board, walk.best)
        excess_bytes = search.offer(schedule) - search.budget_bytes
        if excess_bytes <= 0:
            return True
        # The board counts small storages as the plain schedule has them; what it missed comes off the budget.
        budget_bytes -= excess_bytes
        start, hot, steps = schedule, min(hot, 10 * cold), steps // 4
    return True


def _hot(board: Board, heat: float) -> float:
    """The temperature that is worth ``heat`` runs of an op of median length, as a share of the plain step."""
    times = sorted(t for t, may in zip(board.repeat_time_s, board.repeatable, strict=True) if may and t > 0)
    if not times:
        return _HOT_WITHOUT_TIMES
    return min(_MOST_HOT, max(_LEAST_HOT, heat * times[len(times) // 2] / board.problem.graph.time_s))


def _bound_s(search: Search) -> float:
    """The least extra time in program order, as far as the gap LP knows: how much there is to win."""
    if not math.isfinite(search.best_time_s):
        return 0.0
    model = build_gap_model(search.problem, search.budget_bytes)
    solution = solve_gap_model(model, time_limit_s=search.left_s(_MOST_S_OF_BOUND))
    return 0.0 if solution is None else solution.bound_s


def _part(search: Search, share: float) -> float | None:
    if search.deadline_s is None:
        return None
    now_s = time.monotonic()
    return now_s + share * (search.deadline_s - now_s)
