"""The smallest peak that planners reach for a step, whatever the budget: what an infeasible budget is answered with."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

from remat.core.simulator import simulate
from remat.planners.chain.programme import BlockChain
from remat.planners.replay.improve import without_idle_runs
from remat.planners.replay.rematerialize import rematerialize
from remat.planners.replay.residents import TooManyRuns
from remat.planners.search import Search, without_spare_runs
from remat.planners.view.board import Board, Condensed, expand
from remat.planners.view.problem import Problem
from remat.planners.walk.annealing import Walk

# Judgements, not measured, unless it says otherwise: the work is done once for a graph and is bound by no clock, so it
# is what an infeasible budget costs. Less of it, and the smallest peak that an error names is larger than it need be.
_MOST_RUNS_PER_OP: Final = 4
"""A schedule that computes everything three times again is of no use to anyone."""
_BISECTIONS: Final = 8
"""Halvings of the range between the largest op and the plain peak; eight leave 2 % of a range of a factor 100."""
_PATIENCE: Final = 0.05
_FORWARD_SHARE: Final = 0.8
"""What one storage may take to compute again, as a share of the plain step, and how much of the budget the forward part
may fill, so that the backward part has room to compute in: as in the planner ``dtr``."""
_MARGIN: Final = 1.05
"""By how much a schedule may miss the budget that eviction was given, and still count as a success of bisection."""
_MOST_OPS_NESTED: Final = 6000
_MOST_OPS_TWICE: Final = 6000
"""Ops above which blocks are not nested, and only the reduced form is evicted from, for the sake of time."""
_MOST_OPS_ASKED: Final = 200
"""Ops up to which whole methods are asked. A step of 37 ops was refused without them, though half of its peak is
possible; much larger steps would take long."""
_SHARES_ASKED: Final = (0.9, 0.97)
"""Steps in which the budget sinks, first large, then small."""
_SHRINK: Final = 0.94
_ROUNDS: Final = 6
_STEPS_PER_OP: Final = 60
_MOST_STEPS: Final = 4000
_MOST_OPS: Final = 2000
"""Walks under a sinking budget: its first step, how many walks of how many edits, and the largest graph."""
_HOT: Final = 3e-3
_COLD: Final = 1e-4
"""Their temperatures, as shares of the plain step; cool, since a walk ends at the first schedule that fits."""

Strategy = Callable[[Search], None]
Note = Callable[[tuple[int, ...]], int]
"""Keeps a schedule that was found, and returns its peak."""


def smallest_peak_schedules(problem: Problem, strategies: Sequence[Strategy]) -> list[tuple[int, ...]]:
    """Schedules that aim at the smallest peak, whatever the budget; deterministic, and not bound by time.

    First eviction: the budget is bisected on a logarithmic scale between the largest op and the plain peak, then the
    smallest peak reached is tried once more, and a little less. Then nested recomputation, where the step is a chain
    of blocks. Both are in program order. Where the order is free, walks under sinking budgets follow; on a small graph
    the strategies are asked for ever smaller budgets. Complexity: some twenty replays, once for a step: equal graphs
    get the answer of the first, among the last 64 steps of this process.

    Args:
        problem: the step.
        strategies: methods to ask on a small graph, one after another until one finds a schedule.
    """
    graph = problem.graph
    key = (graph.fingerprint, hash(tuple(op.time_s for op in graph.ops)), tuple(strategies))
    if key not in _known:
        _known[key] = _find(problem, strategies)
    _known.move_to_end(key)
    while len(_known) > _MOST_KNOWN:
        _known.popitem(last=False)
    return _known[key]


_Key = tuple[str, int, tuple[Strategy, ...]]
_known: OrderedDict[_Key, list[tuple[int, ...]]] = OrderedDict()
_MOST_KNOWN: Final = 64
"""A judgement: a schedule of 10,000 ops takes some 100 KB, so that these take a few MB."""


def _find(problem: Problem, strategies: Sequence[Strategy]) -> list[tuple[int, ...]]:
    condensed = Condensed.of(problem)
    found: dict[tuple[int, ...], int] = {}

    def note(schedule: tuple[int, ...]) -> int:
        return note_whole(condensed.expand(without_idle_runs(condensed.problem, schedule)))

    def note_whole(schedule: tuple[int, ...]) -> int:
        found[schedule] = simulate(problem.graph, schedule).peak_bytes
        return found[schedule]

    _evict_to_the_smallest(condensed.problem, problem.largest_step_bytes, note)
    if problem.count <= _MOST_OPS_TWICE:
        # Eviction is a rule of thumb: now the reduced form of a step comes out smaller, now the whole one.
        _evict_to_the_smallest(problem, problem.largest_step_bytes, note_whole)
    if condensed.problem.count <= _MOST_OPS_NESTED:
        nested = BlockChain.of(condensed.problem).smallest()
        if nested is not None:
            note(nested)
    smallest = min(found.values(), default=problem.plain.peak_bytes)
    reached = next((s for s, peak in found.items() if peak == smallest), problem.graph.plain_schedule)
    squeezed = _ask_for_less(problem, _walk_to_the_smallest(problem, reached), strategies)
    smallest = simulate(problem.graph, squeezed).peak_bytes
    candidates = [squeezed, *(schedule for schedule, peak in found.items() if peak == smallest)]
    return [without_spare_runs(problem, schedule, smallest) for schedule in dict.fromkeys(candidates)]


def _evict_to_the_smallest(problem: Problem, least_bytes: int, note: Note) -> None:
    """Evict under budgets that close in on the smallest one that is kept; ``note`` judges what was found."""
    pinned = problem.graph.pinned_bytes
    peaks: list[int] = [problem.plain.peak_bytes]

    def attempt(budget_bytes: int, distance_power: float) -> int | None:
        try:
            schedule = rematerialize(
                problem,
                problem.no_drops(),
                budget_bytes,
                distance_power=distance_power,
                forward_share=_FORWARD_SHARE,
                patience=_PATIENCE,
                max_runs=_MOST_RUNS_PER_OP * problem.count + 100,
            )
        except TooManyRuns:
            return None
        peaks.append(note(schedule))
        return peaks[-1]

    low = max(least_bytes - pinned, 1)
    high = max(problem.plain.peak_bytes - pinned, low)
    for _ in range(_BISECTIONS):
        middle = math.isqrt(low * high)
        peak = attempt(pinned + middle, 0.5)
        if peak is not None and peak <= pinned + _MARGIN * middle:
            high = middle
        else:
            low = middle
    for factor in (1.0, 0.98):
        attempt(pinned + int(factor * (min(peaks) - pinned)), 1.0)


def _walk_to_the_smallest(problem: Problem, schedule: tuple[int, ...]) -> tuple[int, ...]:
    """A schedule with a peak at most that of the given one, where the order is free and the graph is not too large.

    Each round walks (:class:`remat.planners.walk.annealing.Walk`) under a budget of 94 % of the peak so far,
    pinned bytes left out, and ends with the first schedule that fits.
    """
    best = schedule
    pinned = problem.graph.pinned_bytes
    peak_bytes = simulate(problem.graph, best).peak_bytes
    floor_bytes = problem.largest_step_bytes
    # In a fixed order the walk finds nothing that eviction did not: measured on the traced graphs.
    fixed = not problem.graph.free_order or problem.order_is_tied
    if fixed or problem.count > _MOST_OPS or peak_bytes <= floor_bytes:
        return best
    board = Board(problem, whole=True)
    shrink = _SHRINK
    for seed in range(_ROUNDS):
        budget_bytes = max(floor_bytes, pinned + int(shrink * (peak_bytes - pinned)))
        walk = Walk(board, best, budget_bytes, seed, first_fit=True)
        walk.run(min(_MOST_STEPS, _STEPS_PER_OP * problem.count), _HOT, _COLD, None)
        found = None if walk.best is None else expand(board, walk.best)
        reached_bytes = peak_bytes if found is None else simulate(problem.graph, found).peak_bytes
        if found is None or reached_bytes >= peak_bytes:
            # A smaller step may still succeed.
            shrink = (1 + shrink) / 2
            continue
        best, peak_bytes = found, reached_bytes
        if peak_bytes <= floor_bytes:
            break
    return best


def _ask_for_less(problem: Problem, reached: tuple[int, ...], strategies: Sequence[Strategy]) -> tuple[int, ...]:
    """On a small graph, where eviction easily misses: what the strategies find for ever smaller budgets."""
    if problem.count > _MOST_OPS_ASKED:
        return reached
    peak_bytes = simulate(problem.graph, reached).peak_bytes
    for share in _SHARES_ASKED:
        while peak_bytes > problem.largest_step_bytes:
            budget_bytes = max(problem.largest_step_bytes, int(share * peak_bytes))
            search = Search(problem, budget_bytes, thorough=False)
            for strategy in strategies:
                if search.best is None:
                    strategy(search)
            if search.best is None:
                break
            reached = search.best
            peak_bytes = simulate(problem.graph, reached).peak_bytes
    return reached
