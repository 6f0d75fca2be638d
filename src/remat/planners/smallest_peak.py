"""The smallest peak that planners reach for a step, whatever the budget: what an infeasible budget is answered with."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from remat.core.simulator import simulate
from remat.planners.chain.programme import BlockChain
from remat.planners.linear.stage import StageModel
from remat.planners.replay.improve import without_idle_runs
from remat.planners.replay.rematerialize import rematerialize
from remat.planners.replay.residents import TooManyRuns
from remat.planners.search import Search, without_spare_runs
from remat.planners.view.board import Board, Condensed, expand
from remat.planners.view.problem import Problem
from remat.planners.walk.annealing import Walk
from remat.planners.walk.orders import low_memory_order

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
_MOST_OPS_TWICE: Final = 6000
"""Ops above which only the reduced form is evicted from, and only below what nested blocks reach, for the sake of
time: a replay of 17,000 ops takes .5 to 1.5 s."""
_LARGE_SHARES: Final = (0.9, 0.97)
_LARGE_RULES: Final = ((1.0, 1.0), (0.5, 1.0), (0.5, 0.7))
"""There: shares of the peak so far that eviction is given, the next one where none of the rules ends, and the rules:
weights of the distance to the next use, with shares of the budget that the forward part may fill, as in ``dtr``."""
_LITTLE: Final = 0.01
"""Share of a peak below which less is no progress: each step of eviction there takes a second."""
_MOST_OPS_ASKED: Final = 200
"""Ops up to which whole methods are asked. A step of 37 ops was refused without them, though half of its peak is
possible; much larger steps would take long."""
_FEWEST_OPS_ASKED_IN_PART: Final = 61
"""Ops from which methods are asked only until a schedule is small enough. On fewer, all of it takes a second at most,
and the smallest schedule, less the runs that a budget can spare, is often the cheapest, too: per-example gradients, 56
ops, at 60 % of their peak cost 120 % that way and 153 the other."""
_SHARES_ASKED: Final = (0.9, 0.97)
"""Steps in which the budget sinks, first large, then small. In the end the quickest methods are asked in small steps,
and a walk follows: of PyTorch steps of 76 to 107 ops, a U-Net came to 41.9 % of its peak in place of
46.2 so, a ResNet to 59.2 in place of 63.3, and a stack of layers to 54.6 in place of 58.7. Both took .3 to 1.2 s."""
_MOST_IN_VAIN: Final = 2
"""A method that finds nothing within two budgets in a row finds nothing within smaller ones, on the seven models of
JAX's zoo of up to 200 ops. With 1, one of them comes to 48 % of its peak in place of 42; with more, a gradient penalty
of 135 ops takes half as long again."""
_COOL_SHRINK: Final = 0.94
_COOL_WALKS: Final = 6
_COOL_STEPS_PER_OP: Final = 60
_MOST_COOL_STEPS: Final = 4000
_HOT: Final = 3e-3
_COLD: Final = 1e-4
"""Walks from the best schedule under a sinking budget, before all others: its first step, how many walks of how many
edits, and their temperatures as shares of the plain step. They take a second or two, and where eviction comes to 99 %
of the peak the others come to 66 % without them and to 60 % with them."""
_SHRINKS: Final = (0.9, 0.95, 0.97)
"""Walks under a sinking budget: the share of the peak so far that they are asked for, the next one where no walk gets
any lower."""
_WALKS: Final = ((True, 1e-2, 1e-3), (False, 2e-2, 3e-4))
"""Each of them: whether it begins with a new order of first runs or with the best schedule, and its first and last
temperature as shares of the plain step. Cooler walks from the best schedule alone stay where they are: at 59, 56, 54
and 69 % of the peak on layered graphs of 180 and 200 ops, where with these it is 50, 55, 43 and 60."""
_STEPS_PER_OP: Final = 240
_MOST_STEPS: Final = 48_000
_PARTS: Final = 7
"""Their edits together, of which one walk has a seventh. 40,000 edits of 200 ops took 5.5 s of an idle core. More:
smaller peaks, now and then."""
_FIXED_SHRINKS: Final = (0.92, 0.95, 0.98)
_MOST_FIXED_WALKS: Final = 6
_FIXED_STEPS: Final = 8000
_FIXED_PATIENCE: Final = _FIXED_STEPS // 3
_FIXED_PATIENCE_PER_OP: Final = 48
"""The patience of small steps. With half as much, per-example gradients, 54 ops, came to 2.95 MB as compiled by JAX in
place of 2.49; with no such limit, steps of 10 ops were walked for .1 s each in vain."""
_FIXED_LOOKS: Final = ((24, 30.0), (8, 1.0), (3, 0.1), (2, 0.03))
"""Where these walks give up, see ``Walk``. Of 69 walks on 21 steps of JAX's zoo, those that came to a smaller peak were
below 25, .31, .04 and .02 there, but for one that won .1 % and was at 2.5 after an eighth. Those of four steps of 500
to 900 ops, at .4 to .6 s each, were above 25 and 1. A search takes .7 of its time so, for the same peaks otherwise."""
_FIXED_HOT: Final = 2e-2
_MOST_FIXED_OPS: Final = 1000
"""Walks in a fixed order: shares of the peak so far, the next one where a walk is in vain, how many walks, their edits,
after how many without progress they give up, first temperature as above, and the largest reduced step that is walked.
Judgements: a U-Net's 493 ops take 3 s, and come from 27.5 % of the peak to where plans begin. Without the last two
shares, a GPT-2 of two layers and a stack of layers with dropout ended 2 and 4 % higher. Twelve PyTorch steps of up to
300 ops ended where they do without that patience, in up to 3.7 times as long."""
_MOST_OPS: Final = 2000
"""The largest graph that is walked."""
_SHARES_SOLVED: Final = (0.9, 0.97, 1.0)
_MOST_COLUMNS_SOLVED: Final = 1000
_NODES_SOLVED: Final = 1
_MOST_S_SOLVED: Final = 30.0
"""The stage MILP of very small steps: shares of the peak so far that it is solved for, 1.0 being a byte less; columns
of a model, nodes, and a clock far beyond these. 1,000 columns are some 30 ops and take up to .4 s. Without it, ten of
40 random steps of 8 to 26 ops were planned below the smallest budget that an error named, by up to 30 %; with it none,
with 1 node as with 50. Larger models close that gap for larger steps: 1,600 columns, 40 ops, take up to 1.5 s each."""
_NO_ROOM: Final = 1.01
"""A peak within 1 % of what the largest op needs ends the search; a judgement. Of a scanned decoder of 48 ops, whose
loops are its largest ops, half a second is spared so in each of several ways to write it."""

Strategy = Callable[[Search], None]
Note = Callable[[tuple[int, ...]], int]
"""Keeps a schedule that was found, and returns its peak."""


def smallest_peak_schedules(
    problem: Problem, strategies: Sequence[Strategy], enough_bytes: int, quickest: Sequence[Strategy] = ()
) -> list[tuple[int, ...]]:
    """Schedules that aim at the smallest peak; deterministic, and not bound by time.

    First eviction: the budget is bisected on a logarithmic scale between the largest op and the plain peak, then the
    smallest peak reached is tried once more, and a little less. Then nested recomputation, where the step is a chain
    of blocks. Both are in program order. Where the order is free, walks under sinking budgets follow. Where it is not,
    the strategies are asked for ever smaller budgets, on a small graph, and at most six walks end the search.
    Complexity: some twenty replays, and walks of up to 600 edits per op, in a fixed order of 48,000 together, once for
    a step: equal graphs get the answer of the first, among the last 64 steps of this process. On a very small graph
    the stage MILP looks for less in the end.

    Args:
        problem: the step.
        strategies: methods to ask on a small graph, one after another until one finds a schedule.
        enough_bytes: a peak below which none is looked for. What is found does not depend on what was asked before.
        quickest: methods to ask in small steps once the others find nothing.
    """
    graph = problem.graph
    asked = (*strategies, *quickest)
    key = (graph.fingerprint, graph.turning_point, hash(tuple(op.time_s for op in graph.ops)), asked)
    if key not in _known:
        _known[key] = _Descending(_levels(problem, strategies, quickest))
    _known.move_to_end(key)
    while len(_known) > _MOST_KNOWN:
        _known.popitem(last=False)
    return _known[key].down_to(enough_bytes)


def is_asked_in_part(problem: Problem) -> bool:
    """Are methods asked only until a schedule is small enough? Else the first answer is what they all reach."""
    return problem.count >= _FEWEST_OPS_ASKED_IN_PART


_Level = tuple[int, list[tuple[int, ...]]]
"""A peak, and schedules that reach it."""


class _Descending:
    """Levels of ever smaller peaks, each looked for when it is asked for, and remembered."""

    def __init__(self, levels: Iterator[_Level]) -> None:
        self._left = levels
        self._found: list[_Level] = []

    def down_to(self, enough_bytes: int) -> list[tuple[int, ...]]:
        """The schedules of the first level within so many bytes; those of the last one where there is none."""
        for peak_bytes, schedules in self._found:
            if peak_bytes <= enough_bytes:
                return schedules
        for level in self._left:
            self._found.append(level)
            if level[0] <= enough_bytes:
                break
        return self._found[-1][1]


_Key = tuple[str, int | None, int, tuple[Strategy, ...]]
_known: OrderedDict[_Key, _Descending] = OrderedDict()
_MOST_KNOWN: Final = 64
"""A judgement: a schedule of 10,000 ops takes some 100 KB, so that these take a few MB."""


def _levels(problem: Problem, strategies: Sequence[Strategy], quickest: Sequence[Strategy]) -> Iterator[_Level]:
    # No generator itself: one that waits for the next question would hold what a large step was searched with.
    condensed = Condensed.of(problem)
    found: dict[tuple[int, ...], int] = {}

    def note(schedule: tuple[int, ...]) -> int:
        return note_whole(condensed.expand(without_idle_runs(condensed.problem, schedule)))

    def note_whole(schedule: tuple[int, ...]) -> int:
        found[schedule] = simulate(problem.graph, schedule).peak_bytes
        return found[schedule]

    is_large = condensed.problem.count > _MOST_OPS_TWICE
    if not is_large:
        _evict_to_the_smallest(condensed.problem, problem.largest_step_bytes, note)
    if problem.count <= _MOST_OPS_TWICE:
        # Eviction is a rule of thumb: now the reduced form of a step comes out smaller, now the whole one.
        _evict_to_the_smallest(problem, problem.largest_step_bytes, note_whole)
    nested = BlockChain.of(condensed.problem).smallest()
    if nested is not None:
        note(nested)
    if is_large:
        _evict_below(condensed.problem, min(found.values(), default=problem.plain.peak_bytes), note)
    smallest = min(found.values(), default=problem.plain.peak_bytes)
    reached = next((s for s, peak in found.items() if peak == smallest), problem.graph.plain_schedule)

    def level(schedule: tuple[int, ...]) -> _Level:
        peak_bytes = simulate(problem.graph, schedule).peak_bytes
        equal = [schedule, *(other for other, peak in found.items() if peak == peak_bytes)]
        return peak_bytes, [without_spare_runs(problem, one, peak_bytes) for one in dict.fromkeys(equal)]

    if smallest <= _NO_ROOM * problem.largest_step_bytes:
        return iter([level(reached)])
    if problem.graph.free_order and not problem.order_is_tied:
        return iter([level(_solve_for_less(problem, _walk_to_the_smallest(problem, reached)))])
    if problem.count <= _MOST_OPS_ASKED:
        return map(level, _ever_smaller(condensed, reached, strategies, quickest))
    return iter([level(_walk_in_fixed_order(condensed, reached))])


def _evict_below(problem: Problem, peak_bytes: int, note: Note) -> None:
    """Evict under budgets that sink from a peak that is reached; ``note`` judges what was found.

    A large step's blocks reach with few recomputations what eviction reaches with many, or less, so that there is
    nothing to bisect above. A rule that finds nothing is not asked for less in steps of that size.
    """
    pinned = problem.graph.pinned_bytes
    for share in _LARGE_SHARES:
        left = list(_LARGE_RULES)
        while left:
            power, forward_share = left[0]
            budget_bytes = max(problem.largest_step_bytes, pinned + int(share * (peak_bytes - pinned)))
            schedule = _evicted(problem, budget_bytes, power, forward_share)
            reached_bytes = peak_bytes if schedule is None else note(schedule)
            if reached_bytes > (1 - _LITTLE) * peak_bytes:
                left.pop(0)
            peak_bytes = min(peak_bytes, reached_bytes)


def _evicted(
    problem: Problem, budget_bytes: int, distance_power: float, forward_share: float
) -> tuple[int, ...] | None:
    """The schedule that eviction makes for a budget, which it may exceed; None where it makes far too many runs."""
    try:
        return rematerialize(
            problem,
            problem.no_drops(),
            budget_bytes,
            distance_power=distance_power,
            forward_share=forward_share,
            patience=_PATIENCE,
            max_runs=_MOST_RUNS_PER_OP * problem.count + 100,
        )
    except TooManyRuns:
        return None


def _evict_to_the_smallest(problem: Problem, least_bytes: int, note: Note) -> None:
    """Evict under budgets that close in on the smallest one that is kept; ``note`` judges what was found."""
    pinned = problem.graph.pinned_bytes
    peaks: list[int] = [problem.plain.peak_bytes]

    def attempt(budget_bytes: int, distance_power: float) -> int | None:
        schedule = _evicted(problem, budget_bytes, distance_power, _FORWARD_SHARE)
        if schedule is None:
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
    """A schedule with a peak at most that of the given one, where the order is free; the same one on a large graph.

    Walks (:class:`remat.planners.walk.annealing.Walk`) under budgets below the peak so far, pinned bytes left out, each
    of which ends with the first schedule that fits. First cool ones, then hotter ones, of which some begin with a new
    order.
    """
    if problem.count > _MOST_OPS:
        return schedule
    descent = _Descent(problem, schedule)
    shrink = _COOL_SHRINK
    for seed in range(_COOL_WALKS):
        steps = min(_MOST_COOL_STEPS, _COOL_STEPS_PER_OP * problem.count)
        if not descent.walk(shrink, seed, steps, _HOT, _COLD):
            shrink = (1 + shrink) / 2
    left = min(_MOST_STEPS, _STEPS_PER_OP * problem.count)
    most_steps = max(1, left // _PARTS)
    seed = kind = 0
    shrinks = list(_SHRINKS)
    while left > 0 and shrinks:
        is_new, hot, cold = _WALKS[kind]
        before_bytes = descent.peak_bytes
        fits = descent.walk(shrinks[0], seed, min(left, most_steps), hot, cold, is_new=is_new)
        left -= max(1, descent.tried)
        seed += 1
        if fits:
            continue
        kind += 1
        if kind == len(_WALKS):
            kind = 0
            if descent.peak_bytes == before_bytes:
                shrinks.pop(0)
    return descent.best


def _walk_in_fixed_order(condensed: Condensed, schedule: tuple[int, ...]) -> tuple[int, ...]:
    """The same for the recomputations of a graph in a fixed order, from the plain step.

    As methods for a budget walk, too: without it the smallest budget named for a U-Net was above one that they plan.
    """
    problem = condensed.problem
    plain_bytes = condensed.board.problem.plain.peak_bytes
    if problem.count > _MOST_FIXED_OPS or plain_bytes <= condensed.board.problem.largest_step_bytes:
        return schedule
    whole = condensed.board.problem.graph
    board, pinned = Board(problem, whole=False), problem.graph.pinned_bytes
    best, peak_bytes = schedule, simulate(whole, schedule).peak_bytes
    patience = min(_FIXED_PATIENCE, _FIXED_PATIENCE_PER_OP * problem.count)
    left = _MOST_FIXED_WALKS
    for shrink in _FIXED_SHRINKS:
        for seed in range(left):
            left -= 1
            budget_bytes = pinned + int(shrink * (peak_bytes - pinned))
            start = problem.graph.plain_schedule
            walk = Walk(board, start, budget_bytes, seed, first_fit=True, patience=patience, looks=_FIXED_LOOKS)
            walk.run(_FIXED_STEPS, _FIXED_HOT, _COLD, None)
            found = condensed.expand(expand(board, walk.slots.order() if walk.best is None else walk.best))
            reached_bytes = simulate(whole, found).peak_bytes
            if reached_bytes >= peak_bytes:
                break
            best, peak_bytes = found, reached_bytes
    return best


class _Descent:
    """The schedule of the smallest peak so far, and walks that look for one with a smaller one.

    Attributes:
        best: that schedule.
        peak_bytes: its peak.
        tried: edits of the last walk.
    """

    def __init__(self, problem: Problem, schedule: tuple[int, ...]) -> None:
        self.problem = problem
        self.board = Board(problem, whole=True)
        self.best = schedule
        self.peak_bytes = simulate(problem.graph, schedule).peak_bytes
        self.tried = 0

    def walk(self, shrink: float, seed: int, steps: int, hot: float, cold: float, *, is_new: bool = False) -> bool:
        """Walk under a share of the peak; does a schedule with a smaller peak fit it?

        Where the walk ends above its budget, but below the peak so far, what it ends with becomes the best, too.
        """
        problem, pinned = self.problem, self.problem.graph.pinned_bytes
        self.tried = 0
        if self.peak_bytes <= problem.largest_step_bytes:
            return False
        budget_bytes = max(problem.largest_step_bytes, pinned + int(shrink * (self.peak_bytes - pinned)))
        start = low_memory_order(problem, budget_bytes) if is_new else self.best
        walk = Walk(self.board, start, budget_bytes, seed, first_fit=True)
        self.tried = walk.run(steps, hot, cold, None)
        found = expand(self.board, walk.slots.order() if walk.best is None else walk.best)
        reached_bytes = simulate(problem.graph, found).peak_bytes
        if reached_bytes >= self.peak_bytes:
            return False
        self.best, self.peak_bytes = found, reached_bytes
        return walk.best is not None


def _ever_smaller(
    condensed: Condensed, reached: tuple[int, ...], strategies: Sequence[Strategy], quickest: Sequence[Strategy]
) -> Iterator[tuple[int, ...]]:
    """Of a small graph in a fixed order: the schedule that eviction reached, then what methods and a walk find."""
    problem = condensed.board.problem
    large, small = _SHARES_ASKED
    if is_asked_in_part(problem):
        yield reached
        for schedule in _ask_for_less(problem, reached, (large,), strategies):
            reached = schedule
            yield reached
    else:
        *_, reached = reached, *_ask_for_less(problem, reached, (large, small), strategies)
        yield reached
    for schedule in _ask_for_less(problem, reached, (small,), quickest):
        reached = schedule
        yield reached
    yield _solve_for_less(problem, _walk_in_fixed_order(condensed, reached))


def _ask_for_less(
    problem: Problem, reached: tuple[int, ...], shares: Sequence[float], strategies: Sequence[Strategy]
) -> Iterator[tuple[int, ...]]:
    """On a small graph, where eviction easily misses: what the strategies find for budgets that sink by these shares.

    A strategy that found nothing so often in a row (``_MOST_IN_VAIN``) is not asked any more.
    """
    peak_bytes = simulate(problem.graph, reached).peak_bytes
    in_vain = dict.fromkeys(strategies, 0)
    for share in shares:
        while peak_bytes > problem.largest_step_bytes:
            budget_bytes = max(problem.largest_step_bytes, int(share * peak_bytes))
            search = Search(problem, budget_bytes, thorough=False)
            for strategy in strategies:
                if search.best is None and in_vain[strategy] < _MOST_IN_VAIN:
                    in_vain[strategy] = 0 if _finds(strategy, search) else in_vain[strategy] + 1
            if search.best is None:
                break
            peak_bytes = simulate(problem.graph, search.best).peak_bytes
            yield search.best


def _solve_for_less(problem: Problem, reached: tuple[int, ...]) -> tuple[int, ...]:
    """A schedule of a smaller peak with the same order of first runs, as the stage MILP finds on a very small graph."""
    order = tuple(dict.fromkeys(reached))
    within = problem.in_order(order)
    peak_bytes = simulate(problem.graph, reached).peak_bytes
    shares = list(_SHARES_SOLVED)
    while shares and peak_bytes > problem.largest_step_bytes:
        budget_bytes = max(problem.largest_step_bytes, min(int(shares[0] * peak_bytes), peak_bytes - 1))
        model = StageModel(within, budget_bytes)
        if len(model.builder.cost) > _MOST_COLUMNS_SOLVED:
            break
        runs = model.optimum(time.monotonic() + _MOST_S_SOLVED, _NODES_SOLVED, at_any_cost=True)
        if runs is None:
            shares.pop(0)
            continue
        schedule = tuple(order[op] for op in expand(model.board, runs))
        reached_bytes = simulate(problem.graph, schedule).peak_bytes
        if reached_bytes >= peak_bytes:
            break
        reached, peak_bytes = schedule, reached_bytes
    return reached


def _finds(strategy: Strategy, search: Search) -> bool:
    strategy(search)
    return search.best is not None
