"""Window MILP: the model of the chain-aware bound with whole numbers, solved for a few budgets and rounded off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from remat.core.simulator import simulate
from remat.planners.linear.binding_steps import binding_steps
from remat.planners.linear.highs import Solution, interior_point, solve
from remat.planners.linear.window import WindowModel
from remat.planners.registry import strategy
from remat.planners.replay.rematerialize import rematerialize
from remat.planners.replay.residents import TooManyRuns
from remat.planners.search import Search
from remat.planners.view.problem import BoolArray, IntArray

_DEFLATIONS: Final = (1.0, 0.98, 0.95, 0.9)
"""Shares of the budget that are solved for, since the model leaves out what recomputation itself needs; a judgement."""
_QUICK_DEFLATIONS: Final = (1.0, 0.95)
"""The same, in one of many searches for a step."""
_SAMPLES: Final = 1
"""Only the heaviest step is looked at, which keeps the MILP at a few hundred columns; a judgement."""
_GAP: Final = 0.005
_QUICK_GAP: Final = 0.02
"""The share of the optimum at which a solution is good enough; the second in one of many searches for a step. On a
vision transformer of 538 ops at 40 % of its peak that takes .2 s in place of 1.1, on a decoder .07 in place of .24, for
the same plans or others within .1 points. On a mixer at 60 % .08 s in place of .44 for a plan .7 points dearer, below
which the methods behind this one come anyway."""
_MOST_NODES: Final = 100
"""Measured: GPT-2 at 80 % takes 8.8 processor seconds instead of 11.7, BERT-large at half 2.1 instead of 6.9, with the
same plans. What a better solution would win is lost again in rounding and repair."""
_MOST_S: Final = 5.0
"""For one MILP; a judgement. The nodes end it long before, unless the machine is very busy."""

_MOST_COLUMNS: Final = 15_000
"""Of a model. HiGHS solves one of 9,600 columns in a second. With 24,000 it comes in five to a schedule at +10.7 %,
where the block programme finds +5.1, and with 49,000 to none."""

_MANY_COLUMNS: Final = 5000
"""From here on a schedule that costs no more than the solution ends the search, since each further one takes a second.
In a smaller budget the model costs no less, but its rounding may come out cheaper: a U-Net at 80 % costs 2.30 % by the
first and 2.17 by all four."""
_FAR_ABOVE: Final = 1.3
"""With so many columns a schedule that costs this many times the solution, or a replay without end, ends the search,
too: then what the model does not know decides, and smaller budgets tell nothing of it. On an LSTM over 512 steps all
four replays had no end, and took 10 s."""

_FIRST_SAMPLES: Final = 4
_CHOICES: Final = 2
"""The samples whose solution the first choice of steps rests on, and how often they are chosen; as for the bound."""
_MOST_COLUMNS_OF_LP: Final = 3000
_MOST_COLUMNS_OF_CHOSEN: Final = 1500
"""Of a model of chosen steps that is solved as an LP, and in whole numbers. A U-Net at 40 % of its peak has 1,325 and
takes 1 s; at 35 % it has 2,413, took 7 to 20 s, and no solution came within the budget; at 30 % 4,777."""
_FEW_NODES: Final = 20
_ROUNDS: Final = 3
"""Solutions that are looked at. On that U-Net the second one fits."""
_LEARNT: Final = 0.7
"""The share of what a solution needs too much at a step that stays free there in the next one. A judgement: keeping
other storages takes part of it away by itself."""
_MOST_S_OF_LP: Final = 20.0
"""For one LP of them, which takes half a second; a judgement. Only a very busy machine comes near."""


@strategy("window_milp", default_limit_s=10.0)
def window_milp(search: Search) -> None:
    """Solve the window MILP over the heaviest step for several deflated budgets, repair by eviction, then undrop.

    The model (:mod:`remat.planners.linear.window`) says what is kept across the heaviest step and what is made again
    behind it, with all that this reads; what it leaves out is how much lies in memory while things are made again. A
    coarser model than Checkmate's (Jain et al. 2020, arXiv:1910.02653) with a few hundred columns for thousands of ops;
    optimal within it up to 0.5 %. Models of more than 15,000 columns are left out.
    """
    _solve(search, _DEFLATIONS if search.thorough else _QUICK_DEFLATIONS)


def window_milp_of_other_budgets(search: Search) -> None:
    """The same for the budgets that a search which is not thorough leaves out."""
    _solve(search, tuple(sorted({*_DEFLATIONS} - {*_QUICK_DEFLATIONS}, reverse=True)))


def _solve(search: Search, deflations: Sequence[float]) -> None:
    pinned = search.problem.graph.pinned_bytes
    for deflation in deflations:
        left_s = search.left_s(_MOST_S)
        if left_s <= 0:
            return
        budget_bytes = pinned + int(deflation * (search.budget_bytes - pinned))
        model = WindowModel(search.problem, budget_bytes, _SAMPLES, whole_numbers=True)
        if len(model.linear.cost) > _MOST_COLUMNS:
            return
        gap = _GAP if search.thorough else _QUICK_GAP
        solution = _solution(model, left_s, gap=gap)
        if solution is None:
            continue
        reached_bytes = search.offer_decision(_decision(model, solution), search.budget_bytes)
        extra_s = float(model.linear.cost @ solution.values) * model.time_unit_s
        is_reached = solution.optimal and search.best_time_s - search.problem.graph.time_s <= (1 + gap) * extra_s
        is_in_vain = reached_bytes is None or search.best_time_s - search.problem.graph.time_s > _FAR_ABOVE * extra_s
        if (is_reached or is_in_vain) and len(model.linear.cost) > _MANY_COLUMNS:
            return


def window_milp_of_binding_steps(search: Search) -> None:
    """The same over the few steps that bind: for budgets at which what is found over the heaviest step is far off.

    The steps are chosen by the solution of the linear programme before (:mod:`remat.planners.linear.binding_steps`).
    The model does not know what recomputations need between these steps. So each solution is replayed without
    evictions, and what that takes too much near a step stays free there in the next round. With a tenth of the budget
    left free at every step, a U-Net at 40 % of its peak found the same schedule in six times the time. Models of more
    than 1,500 columns are left out. Complexity: two LPs and at most three MILPs of 20 nodes.
    """
    chosen = _chosen(search)
    reserved_bytes = dict.fromkeys(chosen, 0)
    for _ in range(_ROUNDS if chosen else 0):
        left_s = search.left_s(_MOST_S)
        model = WindowModel(
            search.problem,
            search.budget_bytes,
            len(chosen),
            whole_numbers=True,
            chosen=chosen,
            reserved_bytes=reserved_bytes,
        )
        if left_s <= 0 or len(model.linear.cost) > _MOST_COLUMNS_OF_CHOSEN:
            return
        solution = _solution(model, left_s, _FEW_NODES)
        if solution is None:
            return
        drop = _decision(model, solution)
        search.offer_decision(drop, search.budget_bytes)
        try:
            bare = rematerialize(search.problem, drop, deadline_s=search.deadline_s)
        except TooManyRuns:
            return
        excess_bytes = _excess_bytes(search, bare, chosen)
        if not any(excess_bytes):
            return
        for op, excess in zip(chosen, excess_bytes, strict=True):
            reserved_bytes[op] += int(_LEARNT * excess)


def _chosen(search: Search) -> tuple[int, ...]:
    """The steps that bind, rising; none where there are so many that choosing them takes long."""
    chosen: tuple[int, ...] = ()
    for _ in range(_CHOICES):
        model = WindowModel(search.problem, search.budget_bytes, _FIRST_SAMPLES, chosen=chosen)
        if not len(model.linear.cost) or len(model.linear.cost) > _MOST_COLUMNS_OF_LP:
            return ()
        solution = interior_point(model.linear, time_limit_s=search.left_s(_MOST_S_OF_LP))
        if solution is None:
            return ()
        chosen = binding_steps(model, *solution) or chosen
    return chosen


def _excess_bytes(search: Search, schedule: Sequence[int], chosen: Sequence[int]) -> list[int]:
    """What a schedule takes beyond the budget near the first run of each chosen op."""
    bytes_: IntArray = np.array(simulate(search.problem.graph, schedule).bytes, dtype=np.int64)
    first = np.array([schedule.index(op) for op in chosen])
    nearest = np.abs(np.arange(len(schedule))[:, None] - first).argmin(axis=1)
    over = np.maximum(bytes_ - search.budget_bytes, 0)
    return [int(over[nearest == number].max(initial=0)) for number in range(len(chosen))]


def _solution(
    model: WindowModel, time_limit_s: float, most_nodes: int = _MOST_NODES, gap: float = _GAP
) -> Solution | None:
    """What HiGHS finds for a model; None if nothing, or if there is nothing to decide."""
    linear = model.linear
    return solve(linear, time_limit_s=time_limit_s, gap=gap, most_nodes=most_nodes) if model.kept else None


def _decision(model: WindowModel, solution: Solution) -> BoolArray:
    """Which gaps are dropped: those across a sample over which the solution does not keep the storage."""
    problem = model.problem
    drop = problem.no_drops()
    for (s, sample), column in model.kept.items():
        place = int(model.places[sample])
        gap = problem.first_gap[s] + sum(use <= place for use in problem.uses[s]) - 1
        if problem.is_tail[gap] or problem.may_drop[gap]:
            drop[gap] = solution.values[column] < 0.5
    return drop
