"""What all planners share: judging schedules, and the smallest peak that can be reached."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from remat.core.simulator import simulate
from remat.planners.replay.improve import undrop, without_idle_runs
from remat.planners.replay.rematerialize import rematerialize
from remat.planners.replay.residents import TooManyRuns
from remat.planners.view.condensed import Condensed
from remat.planners.view.problem import BoolArray, Problem
from remat.planners.walk.orders import in_order
from remat.planners.walk.squeeze import squeeze

_MOST_RUNS_PER_OP: Final = 4
_BISECTIONS: Final = 8
_MARGIN: Final = 1.05
_MOST_TRIES: Final = 1000
_LONG: Final = 2
_OFFERS: Final = 3
_MOST_OPS_NESTED: Final = 6000
_MOST_OPS_TWICE: Final = 6000
_MOST_OPS_ASKED: Final = 200
_SHARES_ASKED: Final = (0.9, 0.97)
_MOST_MISSED: Final = 5e-3


@dataclass
class Search:
    """Collects schedules for one budget and remembers the cheapest that fits.

    Attributes:
        problem: the graph.
        budget_bytes: what a schedule must fit.
        deadline_s: ``time.monotonic()`` after which nothing new is started; None for none.
        whole: the search over the whole step, where this one is over another form of it: what is offered here must fit
            there, and where it does not, this budget sinks by what it missed.
        translate: makes a schedule of the whole step from one of this form.
    """

    problem: Problem
    budget_bytes: int
    deadline_s: float | None = None
    whole: Search | None = None
    translate: Callable[[Sequence[int]], tuple[int, ...]] = tuple
    best: tuple[int, ...] | None = None
    best_time_s: float = field(default=float("inf"))

    @property
    def expired(self) -> bool:
        """Is the time used up?"""
        return self.deadline_s is not None and time.monotonic() > self.deadline_s

    def reduced(self) -> Search:
        """A search over the reduced step, which offers what it finds to this one."""
        condensed = Condensed.of(self.problem)
        return Search(condensed.problem, self.budget_bytes, self.deadline_s, self, condensed.expand)

    def reordered(self, order: Sequence[int]) -> Search:
        """A search over schedules whose first runs stand in another order than the program's."""

        def translate(schedule: Sequence[int]) -> tuple[int, ...]:
            return tuple(order[op] for op in schedule)

        return Search(in_order(self.problem, order), self.budget_bytes, self.deadline_s, self, translate)

    def offer(self, schedule: Sequence[int]) -> int:
        """Judge a schedule; it becomes the best if it fits and costs less. Returns its peak in bytes."""
        timeline = simulate(self.problem.graph, schedule)
        peak_bytes = timeline.peak_bytes
        if peak_bytes > self.budget_bytes or timeline.time_s >= self.best_time_s:
            return peak_bytes
        if self.whole is not None:
            excess_bytes = self.whole.offer(self.translate(schedule)) - self.whole.budget_bytes
            if excess_bytes > 0:
                peak_bytes = self.budget_bytes + excess_bytes
                if excess_bytes <= _MOST_MISSED * self.budget_bytes:
                    self.budget_bytes -= excess_bytes
                return peak_bytes
        self.best, self.best_time_s = tuple(schedule), timeline.time_s
        return peak_bytes

    def offer_improved(self, schedule: Sequence[int]) -> int:
        """Judge a schedule without the runs that the budget can spare. Returns its own peak in bytes."""
        bare = without_idle_runs(self.problem, schedule)
        peak_bytes = simulate(self.problem.graph, bare).peak_bytes
        # Of a very long schedule only the runs that are worth most are looked at.
        most_tries = _MOST_TRIES if len(bare) > _LONG * self.problem.count else None
        for _ in range(_OFFERS):
            better = undrop(self.problem, bare, self.budget_bytes, deadline_s=self.deadline_s, most_tries=most_tries)
            if self.offer(better) <= self.budget_bytes:
                break
        return peak_bytes

    def offer_decision(
        self,
        drop: BoolArray,
        inner_budget_bytes: int,
        *,
        distance_power: float = 0.5,
        forward_share: float = 1.0,
    ) -> None:
        """Turn a decision into a schedule, evicting beyond ``inner_budget_bytes``; then undrop, and judge it."""
        try:
            schedule = rematerialize(
                self.problem,
                drop,
                inner_budget_bytes,
                distance_power=distance_power,
                forward_share=forward_share,
                patience=0.05,
                max_runs=4 * self.problem.count + 100,
                deadline_s=self.deadline_s,
            )
        except TooManyRuns:
            return
        self.offer_improved(schedule)

    def result(self, fallbacks: Iterable[Sequence[int]]) -> tuple[int, ...]:
        """The best schedule; else the best of what the budget makes of the fallbacks, or the one of the smallest peak.

        Fallbacks must not depend on the budget: the smallest peak that they reach is then reached again when it
        is asked for as a budget.
        """
        if self.best is not None:
            return self.best
        reached = []
        for schedule in (self.problem.graph.plain_schedule, *fallbacks):
            peak_bytes = self.offer(schedule)
            if peak_bytes <= self.budget_bytes:
                self.offer(_spared(self.problem, tuple(schedule), self.budget_bytes))
            reached.append((peak_bytes, simulate(self.problem.graph, schedule).time_s, tuple(schedule)))
        return self._chosen() or min(reached)[2]

    def _chosen(self) -> tuple[int, ...] | None:
        return self.best


def smallest_peak_schedules(problem: Problem) -> list[tuple[int, ...]]:
    """Schedules that aim at the smallest peak, whatever the budget; deterministic, and not bound by time.

    Eviction, with the budget bisected on a logarithmic scale between the largest op and the plain peak; then
    once more just under the smallest peak reached; and nested recomputation where the step is a chain of blocks. All
    in program order on the reduced step. Complexity: some twenty replays, once for a problem.
    """
    if problem not in _smallest_known:
        _smallest_known[problem] = _find_smallest_peak(problem)
    return _smallest_known[problem]


_smallest_known: weakref.WeakKeyDictionary[Problem, list[tuple[int, ...]]] = weakref.WeakKeyDictionary()


def _find_smallest_peak(problem: Problem) -> list[tuple[int, ...]]:
    from remat.planners.methods.block_chain import BlockChain

    condensed = Condensed.of(problem)
    found: dict[tuple[int, ...], int] = {}

    def note(schedule: tuple[int, ...]) -> int:
        whole = condensed.expand(without_idle_runs(condensed.problem, schedule))
        found[whole] = simulate(problem.graph, whole).peak_bytes
        return found[whole]

    def note_whole(schedule: tuple[int, ...]) -> int:
        found[schedule] = simulate(problem.graph, schedule).peak_bytes
        return found[schedule]

    _evict_to_the_smallest(condensed.problem, problem.largest_step_bytes, note)
    if problem.count <= _MOST_OPS_TWICE:
        # Neither form is always the better one for a rule of thumb.
        _evict_to_the_smallest(problem, problem.largest_step_bytes, note_whole)
    if condensed.problem.count <= _MOST_OPS_NESTED:
        nested = BlockChain.of(condensed.problem).smallest()
        if nested is not None:
            note(nested)
    smallest = min(found.values(), default=problem.plain.peak_bytes)
    reached = next((s for s, peak in found.items() if peak == smallest), problem.graph.plain_schedule)
    squeezed = _ask_for_less(problem, squeeze(problem, reached))
    smallest = simulate(problem.graph, squeezed).peak_bytes
    candidates = [squeezed, *(schedule for schedule, peak in found.items() if peak == smallest)]
    return [_spared(problem, schedule, smallest) for schedule in dict.fromkeys(candidates)]


def _ask_for_less(problem: Problem, reached: tuple[int, ...]) -> tuple[int, ...]:
    """On a small graph, where a rule of thumb easily misses: what the methods find for ever smaller budgets."""
    from remat.planners.methods.dtr import evict
    from remat.planners.methods.gap_lp import round_gap_lp
    from remat.planners.methods.keep_milp import round_keep_milp
    from remat.planners.methods.peak_greedy import drop_greedily
    from remat.planners.methods.simulated_annealing import anneal

    if problem.count > _MOST_OPS_ASKED:
        return reached
    peak_bytes = simulate(problem.graph, reached).peak_bytes
    for share in _SHARES_ASKED:
        while peak_bytes > problem.largest_step_bytes:
            search = Search(problem, max(problem.largest_step_bytes, int(share * peak_bytes)))
            for strategy in (drop_greedily, evict, round_keep_milp, round_gap_lp, partial(anneal, thorough=False)):
                if search.best is None:
                    strategy(search)
            if search.best is None:
                break
            reached = search.best
            peak_bytes = simulate(problem.graph, reached).peak_bytes
    return reached


def _spared(problem: Problem, schedule: tuple[int, ...], budget_bytes: int) -> tuple[int, ...]:
    """Without the runs that the budget can spare, unless the schedule is so long that looking takes too much time."""
    if len(schedule) > _MOST_RUNS_PER_OP * problem.count:
        return schedule
    return undrop(problem, schedule, budget_bytes, most_tries=_MOST_TRIES)


def _evict_to_the_smallest(problem: Problem, least_bytes: int, note: Callable[[tuple[int, ...]], int]) -> None:
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
                forward_share=0.8,
                patience=0.05,
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
