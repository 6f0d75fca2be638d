"""The base of every method: one budget, the schedules that were offered for it, and the cheapest that fits."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from remat.core.simulator import simulate
from remat.planners.replay.improve import undrop, without_idle_runs
from remat.planners.replay.rematerialize import rematerialize
from remat.planners.replay.residents import TooManyRuns
from remat.planners.view.board import Condensed
from remat.planners.view.problem import BoolArray, Problem

# Judgements, not measured.
_MOST_RUNS_PER_OP: Final = 4
"""A schedule that grows longer is given up: nobody would run it, and longer ones are what planning waits for."""
_LONG: Final = 2
_MOST_TRIES: Final = 1000
"""Runs per op above which a schedule is long, and runs of it that the undrop sweep then looks at. Without a limit the
sweep is quadratic; with a lower one, runs stay in that the budget could spare."""
_OFFERS: Final = 3
"""Rounds in which a schedule of a reduced step that misses the whole budget is improved for a smaller one."""
_MOST_MISSED: Final = 5e-3
"""The share of the budget by which it may sink for that; it is what all small storages together may be. A larger miss
is that schedule's own, and must not cost the others."""
_FAR_OVER: Final = 1.02
"""Of a method in a search that is not thorough: replays that all come to more than this share of the budget are in
vain. On the steps of JAX's zoo, at 33 budgets at which other methods found nothing, eight further replays of ``dtr``
found nothing, either: each came to what the first three had come to, 2 to 160 % above the budget, or had no end."""
_PATIENCE: Final = 0.05
"""The share of the plain step that one storage may take to compute again; what takes longer is a chain of gradients."""


@dataclass
class Search:
    """Collects schedules for one budget and remembers the cheapest that fits.

    Attributes:
        problem: the step.
        budget_bytes: what a schedule must fit.
        deadline_s: ``time.monotonic()`` after which nothing new is started; None for none.
        whole: the search over the whole step, where this one is over a reduced or reordered form of it. A schedule
            that is offered here must fit there, too; where it misses, this budget sinks by as many bytes.
        translate: makes a schedule of the whole step from one of this form.
        thorough: False in one of many short searches, where a method should spend no extra work on a small step.
        best: the cheapest schedule so far that fits, None for none.
        best_time_s: its seconds.
        fallbacks: schedules that a method knows whatever the budget is; see ``result``.
    """

    problem: Problem
    budget_bytes: int
    deadline_s: float | None = None
    whole: Search | None = None
    translate: Callable[[Sequence[int]], tuple[int, ...]] = tuple
    thorough: bool = True
    best: tuple[int, ...] | None = None
    best_time_s: float = math.inf
    fallbacks: list[tuple[int, ...]] = field(default_factory=list)
    _improved: set[tuple[tuple[int, ...], int]] = field(default_factory=set)

    @property
    def expired(self) -> bool:
        """Whether the time is used up."""
        return self.deadline_s is not None and time.monotonic() >= self.deadline_s

    def left_s(self, most_s: float) -> float:
        """The seconds until the deadline, but at most so many; 0 or less where the time is used up."""
        return most_s if self.deadline_s is None else min(most_s, self.deadline_s - time.monotonic())

    def reduced(self) -> Search:
        """A search over the reduced step, which offers what it finds to this one."""
        condensed = Condensed.of(self.problem)
        return Search(condensed.problem, self.budget_bytes, self.deadline_s, self, condensed.expand, self.thorough)

    def afresh(self) -> Search:
        """A search over the same step that knows no schedule yet, and offers what it finds to the whole step's, too."""
        return Search(self.problem, self.budget_bytes, self.deadline_s, self.whole, self.translate, self.thorough)

    def reordered(self, order: Sequence[int]) -> Search:
        """A search over schedules whose first runs stand in another order than the program's."""

        def translate(schedule: Sequence[int]) -> tuple[int, ...]:
            return tuple(order[op] for op in schedule)

        return Search(self.problem.in_order(order), self.budget_bytes, self.deadline_s, self, translate, self.thorough)

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
            budget_bytes = self.budget_bytes
            if (bare, budget_bytes) in self._improved:
                break  # Several decisions lead to one schedule.
            self._improved.add((bare, budget_bytes))
            better = undrop(self.problem, bare, budget_bytes, deadline_s=self.deadline_s, most_tries=most_tries)
            if self.offer(better) <= self.budget_bytes or self.budget_bytes == budget_bytes:
                break
        return peak_bytes

    def offer_decision(
        self,
        drop: BoolArray,
        inner_budget_bytes: int,
        *,
        distance_power: float = 0.5,
        forward_share: float = 1.0,
    ) -> int | None:
        """Turn a decision into a schedule, evicting beyond ``inner_budget_bytes``; then undrop, and judge it.

        Returns:
            The peak in bytes of the schedule before runs were left out of it again; None where there is none.
        """
        try:
            schedule = rematerialize(
                self.problem,
                drop,
                inner_budget_bytes,
                distance_power=distance_power,
                forward_share=forward_share,
                patience=_PATIENCE,
                max_runs=_MOST_RUNS_PER_OP * self.problem.count + 100,
                deadline_s=self.deadline_s,
            )
        except TooManyRuns:
            return None
        return self.offer_improved(schedule)

    def is_in_vain(self, peaks: Iterable[int | None]) -> bool:
        """Is a method to give up, in a search that is not thorough and has found nothing yet?

        Args:
            peaks: what its decisions so far have come to, as ``offer_decision`` says.
        """
        if self.thorough or self.best is not None:
            return False
        return min((peak for peak in peaks if peak is not None), default=math.inf) > _FAR_OVER * self.budget_bytes

    def result(self, fallbacks: Iterable[Sequence[int]]) -> tuple[int, ...]:
        """The best schedule; where none fits yet, the cheapest fallback that does, else the one of the smallest peak.

        Fallbacks must not depend on the budget: the smallest peak that they reach is then reached again when it
        is asked for as a budget.
        """
        known = self.best
        if known is not None:
            return known
        reached = []
        for schedule in (self.problem.graph.plain_schedule, *fallbacks):
            peak_bytes = self.offer(schedule)
            if peak_bytes <= self.budget_bytes:
                self.offer(without_spare_runs(self.problem, tuple(schedule), self.budget_bytes))
            reached.append((peak_bytes, simulate(self.problem.graph, schedule).time_s, tuple(schedule)))
        return self.best if self.best is not None else min(reached)[2]


def without_spare_runs(problem: Problem, schedule: tuple[int, ...], budget_bytes: int) -> tuple[int, ...]:
    """Without the runs that the budget can spare, unless the schedule is so long that looking takes too much time."""
    if len(schedule) > _MOST_RUNS_PER_OP * problem.count:
        return schedule
    return undrop(problem, schedule, budget_bytes, most_tries=_MOST_TRIES)
