"""The plans that one search for a budget has tried, and what to try next."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from remat.core.plan import Plan
from remat.fit.peaks import PeakRange

# The figures below steer the search. They are judgements, without a measurement of their own. Other values cost a round
# more or leave a little of the budget unused; no plan breaks a budget because of them.
_SMALLEST_STEP: Final = 0.02  # The next guess is lower by at least this share of the target.
# When the planner's budget falls by one byte, the real peak falls by this much at least. Where two guesses say less,
# they are taken for an accident: the next guess would be far too low.
_SMALLEST_RATE: Final = 0.4
# While nothing fits, the next guess is at least this share of the last one. A compiler's peak may hardly move over a
# stretch of budgets, and then falls at once; a line through two such points leads to a budget that nothing keeps.
_LARGEST_STEP: Final = 0.6
# A compiled peak so many times above what its tensors say falls with them by as large a share, and by more bytes. Of a
# Mamba at 40 %, whose peak is 1.76 times its tensors, a guess by bytes passed by plans at +24 % that fit, and nothing
# was found. Below this, at 1.35 to 1.47 times, guesses by share led to plans that are up to 1.1 % dearer.
_FAR_ABOVE: Final = 1.5
# A plan is chosen in place of the one with the least work where a run of it is expected to take less by this share: a
# step in less memory may save more than it recomputes. Of a scanned decoder in 88 MiB, two plans were tried that fit,
# +3 % in 82 MiB and +14 % in 44; the second one took .82 of the first one's time. Predictions are off by some points.
_MUCH_FASTER: Final = 0.05
_MUCH_DEARER: Final = 0.03  # Than a plan that failed: what fits is then looked for once more between the failed ones.
# There a plan is looked for where it would fit with luck: where the line through the peaks of four or more plans is at
# most so many times their spread above the target.
_ENOUGH_FOR_A_LINE: Final = 4
_LUCK: Final = 1.5
_NEAR_MISS: Final = 0.03  # The share of the target by which a plan fails that may fit by small changes.
_MOST_OF_THE_WAY: Final = 0.8  # Between a guess that fits and one that does not, the next is never closer to either.


@dataclass(frozen=True)
class TriedPlan:
    """A plan, and what the device will show of it.

    Attributes:
        guess_bytes: the planner's budget that led to it.
        plan: as the planner made it, or with its ops held one by one.
        peak: its real peak.
        order_time_s: seconds that a run takes beside those of its ops, to hold them one by one.
    """

    guess_bytes: int
    plan: Plan
    peak: PeakRange
    order_time_s: float = 0.0

    @property
    def time_s(self) -> float:
        """Predicted seconds of a run."""
        return self.plan.time_s + self.order_time_s

    def is_of(self, plan: Plan) -> bool:
        """Is it what ``plan`` comes to? Variants of a step may share a schedule."""
        return (self.plan.fingerprint, self.plan.schedule) == (plan.fingerprint, plan.schedule)

    def with_real_peak(self) -> Plan:
        """The plan with the real peak that is expected in place of the planner's."""
        budget_bytes = max(self.guess_bytes, self.plan.budget_bytes)
        return dataclasses.replace(self.plan, peak_bytes=self.peak.expected_bytes, budget_bytes=budget_bytes)


class TriedPlans:
    """What was tried for one target, in the order in which it was.

    Args:
        target_bytes: what the real peak may be.
        real_peak: plan -> what the device will show.

    Attributes:
        target_bytes: the same.
        all: the plans.
    """

    def __init__(self, target_bytes: int, real_peak: Callable[[Plan], PeakRange]) -> None:
        self.target_bytes = target_bytes
        self.all: list[TriedPlan] = []
        self._real_peak = real_peak

    @property
    def fitting(self) -> list[TriedPlan]:
        """Those whose highest real peak is within the target."""
        return [one for one in self.all if one.peak.highest_bytes <= self.target_bytes]

    def knows(self, plan: Plan) -> bool:
        """Was it tried?"""
        return any(one.is_of(plan) for one in self.all)

    def add(self, guess_bytes: int, plan: Plan, order_time_s: float = 0.0) -> TriedPlan:
        """Ask for the real peak of a plan; of one that was tried it is known.

        Args:
            guess_bytes: the planner's budget that led to it.
            plan: as it is to be run.
            order_time_s: seconds that a run takes beside those of its ops.
        """
        for one in self.all:
            if one.is_of(plan):
                return one
        self.all.append(TriedPlan(guess_bytes, plan, self._real_peak(plan), order_time_s))
        return self.all[-1]

    def narrow(self, guess_bytes: int, plan: Plan) -> bool:
        """Where a guess leads to a plan that was too large, the next guess lies below it; is that so?

        A step of few variants has few plans, so that a guess far above a suggestion that fits often leads to a known
        one.
        """
        fits = bool(self.fitting)
        for number, one in enumerate(self.all):
            too_large = one.peak.highest_bytes > self.target_bytes and guess_bytes < one.guess_bytes
            if fits and one.is_of(plan) and too_large:
                self.all[number] = dataclasses.replace(one, guess_bytes=guess_bytes)
                return True
        return False

    def raise_guess(self, guess_bytes: int, plan: Plan) -> None:
        """Where a larger guess leads to a plan that was tried, this is the budget that the planner had for it."""
        for number, one in enumerate(self.all):
            if one.is_of(plan) and one.guess_bytes < guess_bytes:
                self.all[number] = dataclasses.replace(one, guess_bytes=guess_bytes)

    def is_close(self, one: TriedPlan, close_enough: float) -> bool:
        """Does a plan fit, and leave at most this share of the target unused?"""
        return self.target_bytes * (1 - close_enough) <= one.peak.highest_bytes <= self.target_bytes

    def may_gain(self, least_gain: float) -> bool:
        """Could a plan between the largest guess that fits and the next one that does not be cheaper by so much?

        Where every guess fits, the step as it is lies above: a plan that costs next to nothing leaves nothing to win.
        """
        fitting = self.fitting
        if not fitting:
            return True
        guess = max(one.guess_bytes for one in fitting)
        best = min((one.plan for one in fitting), key=lambda plan: plan.time_s)
        above = [one for one in self.all if one.guess_bytes > guess]
        if not above:
            return best.overhead > least_gain
        return best.time_s - min(above, key=lambda one: one.guess_bytes).plan.time_s > least_gain * best.time_s

    def failed_below(self, time_s: float) -> list[TriedPlan]:
        """Plans that failed and take less time, the cheapest first."""
        failed = [one for one in self.all if one.peak.highest_bytes > self.target_bytes and one.time_s < time_s]
        return sorted(failed, key=lambda one: one.time_s)

    def widest_gap(self, asked: Sequence[int], best_s: float) -> tuple[int, int] | None:
        """Two neighbours of the budgets that were asked for, between which much cheaper plans than those that fit lie.

        Args:
            asked: budgets of the planner; at least one plan fits.
            best_s: what the cheapest plan takes that fits, however it is run.

        Returns:
            None where there are none, or the budgets lie close together.
        """
        best = min(self.fitting, key=lambda one: one.plan.time_s)
        dearest_s = best_s / (1 + _MUCH_DEARER)
        above = [one.guess_bytes for one in self.all if one.plan.time_s < dearest_s]
        ends = sorted(
            {best.guess_bytes, *(guess for guess in asked if best.guess_bytes < guess <= max(above, default=0))}
        )
        gaps = [pair for pair in itertools.pairwise(ends) if pair[1] - pair[0] > _SMALLEST_STEP * self.target_bytes]
        hopeful = [pair for pair in gaps if self._may_fit(sum(pair) // 2)]
        return max(hopeful, key=lambda pair: pair[1] - pair[0], default=None)

    def near_miss(self, seen: Sequence[TriedPlan], best_s: float) -> TriedPlan | None:
        """The cheapest plan that failed by little, if it is much cheaper than those that fit.

        Args:
            seen: those that are not to be named again.
            best_s: what the cheapest plan takes that fits, however it is run.
        """
        most_bytes = (1 + _NEAR_MISS) * self.target_bytes
        failed = self.failed_below(best_s / (1 + _MUCH_DEARER))
        return next((one for one in failed if one.peak.highest_bytes <= most_bytes and one not in seen), None)

    def _may_fit(self, guess_bytes: int) -> bool:
        """May the real peak of a plan for this guess be within the target, by the line through what was tried?"""
        guesses = np.array([one.guess_bytes for one in self.all], dtype=np.float64)
        peaks = np.array([one.peak.highest_bytes for one in self.all], dtype=np.float64)
        if len(guesses) < _ENOUGH_FOR_A_LINE or np.ptp(guesses) == 0:
            return True
        line = np.polynomial.Polynomial.fit(guesses, peaks, 1)
        spread = np.sqrt(np.sum((peaks - line(guesses)) ** 2) / (len(guesses) - 2))
        return bool(line(guess_bytes) - _LUCK * spread <= self.target_bytes)

    def next_guess(self, aim: float, by_share: bool) -> int:
        """The planner's budget to try next. The real peak grows with it, by leaps and not at the same rate.

        Args:
            aim: the share of the target that is aimed at while nothing fits.
            by_share: may the second guess fall by the share by which the real peak is to fall, and not by the bytes?
        """
        by_guess = sorted(self.all, key=lambda one: one.guess_bytes)
        fitting = [one for one in by_guess if one.peak.highest_bytes <= self.target_bytes]
        failed = [one for one in by_guess if one.peak.highest_bytes > self.target_bytes]
        guess = self._between(fitting[-1], failed) if fitting else self._below(failed, aim, by_share)
        return max(1, guess)

    def _below(self, failed: Sequence[TriedPlan], aim: float, by_share: bool) -> int:
        """A guess below all that failed, rising by their guesses."""
        lowest = failed[0]
        rate = 1.0
        if len(failed) > 1 and failed[1].guess_bytes > lowest.guess_bytes:
            fallen = failed[1].peak.highest_bytes - lowest.peak.highest_bytes
            if fallen < -_SMALLEST_STEP * self.target_bytes and len(failed) == 2:
                # The smaller plan needs clearly more: what fits lies between, if anywhere near. A step with AdamW in
                # bfloat16 at 40 % got +29 % so, where the smallest plan of all, at +66 %, was looked for and taken.
                return (failed[1].guess_bytes + lowest.guess_bytes) // 2
            rate = min(1.0, max(_SMALLEST_RATE, fallen / (failed[1].guess_bytes - lowest.guess_bytes)))
        aim_bytes = int(aim * self.target_bytes)
        excess = max(lowest.peak.highest_bytes - aim_bytes, int(_SMALLEST_STEP * self.target_bytes))
        below = min(lowest.guess_bytes, lowest.plan.peak_bytes)
        least = int(_LARGEST_STEP * below)
        if by_share and len(failed) == 1 and lowest.peak.highest_bytes > _FAR_ABOVE * below:
            least = max(least, below - below * excess // lowest.peak.highest_bytes)
        return max(below - int(excess / rate), least)

    def _between(self, fits: TriedPlan, failed: Sequence[TriedPlan]) -> int:
        """A guess between the largest one that fits and the next one that does not."""
        room = self.target_bytes - fits.peak.highest_bytes
        above = [one for one in failed if one.guess_bytes > fits.guess_bytes]
        if not above:
            return fits.guess_bytes + room
        share = room / (above[0].peak.highest_bytes - fits.peak.highest_bytes)
        share = min(_MOST_OF_THE_WAY, max(1 - _MOST_OF_THE_WAY, share))
        return fits.guess_bytes + int(share * (above[0].guess_bytes - fits.guess_bytes))


def smallest_of(tried: Sequence[TriedPlan]) -> TriedPlan:
    """The one with the smallest real peak."""
    return min(tried, key=lambda one: one.peak.highest_bytes)


def fastest_of(fits: Sequence[TriedPlan], expected_s: Callable[[Plan], float | None] | None) -> TriedPlan:
    """The plan with the least work, unless a run of another one is expected to take much less time.

    Args:
        fits: at least one.
        expected_s: what a run of a plan is expected to take, or None; None for nobody to ask.
    """
    cheapest = min(fits, key=lambda one: one.time_s)
    if expected_s is None or len(fits) == 1:
        return cheapest
    seconds = [(expected_s(one.plan) or math.inf, one) for one in fits]
    fastest_s, fastest = min(seconds, key=lambda pair: pair[0])
    cheapest_s = next(own_s for own_s, one in seconds if one is cheapest)
    return fastest if fastest_s < (1 - _MUCH_FASTER) * cheapest_s else cheapest
