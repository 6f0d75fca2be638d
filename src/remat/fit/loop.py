"""Corrects the planner's budget until the real peak is within the target and close to it.

Planners count tensors. An allocator rounds them up, and a compiler fuses them. What they do is known only for a given
schedule, so each round plans with a budget, asks for the real peak of that plan, and corrects the budget.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from remat.core.budget import format_bytes
from remat.core.errors import InfeasibleBudget
from remat.core.plan import Plan
from remat.fit.peaks import PeakRange

_log = logging.getLogger("remat")

# The figures below steer the search. They are judgements, without a measurement of their own. Other values cost a round
# more or leave a little of the budget unused; no plan breaks a budget because of them.
_CLOSE_ENOUGH: Final = 0.05  # Where Rounds does not say otherwise.
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
_MOST_OF_THE_WAY: Final = 0.8  # Between a guess that fits and one that does not, the next is never closer to either.
# A suggestion is tried where it takes less time by this share at least, and where its tensors need no more than so many
# times the target: a compiler needs less than the tensors say at most by its fusions.
_LITTLE_TIME: Final = 0.005
_FAR_OVER: Final = 1.15
# The schedule with the fewest bytes of tensors is not always the one with the smallest real peak. Schedules with a
# little more take less time, so they are tried in this order. Of the 18 models of JAX's zoo, asked for 14 shares from 1
# to 1.8, one of these four has the smallest compiled peak; in a ResNet, a vision transformer and a U-Net that is 1.17,
# by 12, 6 and 2 %.
_NEAR_THE_SMALLEST: Final = (1.0, 1.02, 1.1, 1.17)
# And in this one while each has a smaller peak than all before: of per-example gradients in JAX, whose peak is 4.6 MB
# with the fewest bytes of tensors, it is 3.8 with a tenth more, and 3.3 with a fifth.
_FARTHER: Final = (1.2, 1.3)


@dataclass(frozen=True)
class Rounds:
    """How often a step is planned for one budget.

    Attributes:
        first: budgets of the planner that are tried at first.
        last: how many more where none of the first fits: the smallest plans, and cheaper ones once one fits.
        least_gain: the share of the step's time that a further round must be able to win, once a plan fits. A plan
            between one that fits and a cheaper one that does not saves no more than these two differ by.
        aim: the share of the target that a guess aims at while nothing fits. Below 1 where the real peak grows by
            leaps, so that a guess at the target itself misses it as often as not.
        by_share: where the first plan needs far more than its tensors say, does the next guess fall by the share by
            which the real peak is to fall, and not by the bytes? Right for a compiler that makes copies.
        close_enough: a plan that leaves less than this share of the target unused ends the search.
    """

    first: int
    last: int
    least_gain: float = 0.0
    aim: float = 1.0
    by_share: bool = False
    close_enough: float = _CLOSE_ENOUGH


def plan_within(
    target_bytes: int,
    first_guess_bytes: int,
    find: Callable[[int], Plan],
    real_peak: Callable[[Plan], PeakRange],
    rounds: Rounds,
    suggestions: Callable[[], Iterable[Plan]] = tuple,
    likely: Callable[[], Iterable[Plan]] = tuple,
    expected_s: Callable[[Plan], float | None] | None = None,
    find_quickly: Callable[[int], Plan] | None = None,
) -> Plan:
    """The cheapest plan found whose highest real peak is at most ``target_bytes``.

    Where there is none, the plan whose highest real peak is smallest among those that are more likely to fit than not.

    The smallest budget that an error names comes from plans that do not depend on the target, and these are tried
    before any budget is refused. So it can be kept in every process, whatever was planned there before.

    Args:
        target_bytes: what the real peak may be.
        first_guess_bytes: the planner's budget to begin with.
        find: planner's budget -> plan; raises InfeasibleBudget.
        real_peak: plan -> what the device will show.
        rounds: how many plans may be tried.
        suggestions: plans that do not depend on the budget; asked for where nothing fits, or to be had at less time.
        likely: the same, asked for as soon as a round fails: one that fits spares the search below it.
        expected_s: what a run of a plan is expected to take, memory's part included, or None; None for nobody to ask.
        find_quickly: as ``find``, for budgets near the smallest, whose plans are asked for their peaks at first; where
            one fits, ``find`` looks for a cheaper one. None for ``find`` itself.

    Returns:
        The plan, its ``peak_bytes`` being the real one that is expected.

    Raises:
        InfeasibleBudget: no plan is even likely to fit; ``minimum_bytes`` is the smallest target that can be held.
    """
    find = _asked_once(find)  # The smallest plan is asked for several times, and so are budgets that have none.
    find_quickly = find if find_quickly is None else _asked_once(find_quickly)
    tried: list[_Found] = []
    guess = max(1, first_guess_bytes)
    are_likely = False
    left = rounds.first
    while left:
        left -= 1
        one = _try(guess, target_bytes, find, find_quickly, real_peak, tried)
        if one is None:
            if are_likely and _narrow(target_bytes, guess, find, tried):
                guess = max(1, _next_guess(target_bytes, tried, rounds))
                continue
            _raise_guess(guess, find, tried)
            break
        tried.append(one)
        highest = one.peak.highest_bytes
        if _is_close(target_bytes, one, rounds.close_enough) or (highest <= target_bytes and one.plan.overhead == 0):
            break
        if highest > target_bytes and len(tried) == 1:
            _try_suggestions(target_bytes, likely, real_peak, tried)
            are_likely = len(tried) > 1
        if not _may_gain(rounds.least_gain, target_bytes, tried):
            break
        guess = max(1, _next_guess(target_bytes, tried, rounds))
    found_none = not _fitting(target_bytes, tried)
    _try_suggestions(target_bytes, suggestions, real_peak, tried)
    if found_none and _fitting(target_bytes, tried):
        _try_cheaper(rounds.last, target_bytes, find, find_quickly, real_peak, tried, rounds)
    binding_op = ""
    smallest: list[_Found] = []
    if not _fitting(target_bytes, tried):
        try:
            find(1)  # No planner keeps one byte: the error says what the planner can reach.
        except InfeasibleBudget as error:
            binding_op = error.binding_op
            minimum_bytes = error.minimum_bytes
            smallest = _try_the_smallest(minimum_bytes, target_bytes, find, find_quickly, real_peak, tried, rounds)
        if not _fitting(target_bytes, tried):
            _undercut(itertools.chain(likely(), suggestions(), _remembered(tried)), real_peak, tried, smallest)
    if fits := _fitting(target_bytes, tried):
        return _fastest(fits, expected_s).with_real_peak()
    if likely_to_fit := [one for one in tried if one.peak.likely_bytes <= target_bytes]:
        best = min(likely_to_fit, key=lambda one: one.peak.highest_bytes)
        _log.warning(
            "The step is likely to stay within the budget, but the allocator's rounding may take it to %s where %s "
            "were to be held: the budget is close to the smallest possible one.",
            format_bytes(best.peak.highest_bytes),
            format_bytes(target_bytes),
        )
        return best.with_real_peak()
    named = _smallest(smallest or tried)
    _remember(named.plan, {one.plan.fingerprint for one in tried})
    raise InfeasibleBudget(
        f"the smallest peak found is {named.peak.highest_bytes} bytes",
        minimum_bytes=named.peak.highest_bytes,
        budget_bytes=target_bytes,
        binding_op=binding_op,
    )


def _asked_once(find: Callable[[int], Plan]) -> Callable[[int], Plan]:
    """The same, asked once for each budget, and for none below the smallest that it has named: to find none takes long.

    A thorough search of a Mamba's 1,820 ops for a budget that it cannot keep takes half a minute.
    """
    plans: dict[int, Plan] = {}
    refusal: InfeasibleBudget | None = None

    def answer(budget_bytes: int) -> Plan:
        nonlocal refusal
        if budget_bytes not in plans:
            if refusal is not None and budget_bytes < refusal.minimum_bytes:
                raise refusal
            try:
                plans[budget_bytes] = find(budget_bytes)
            except InfeasibleBudget as error:
                refusal = error
                raise
        return plans[budget_bytes]

    return answer


# An error names the smallest budget that can be kept, and a user then asks for it. The plan behind that figure is
# remembered here, because a planner that is bound by a clock may find another one, whose real peak is larger. It is
# tried last, so that it changes nothing where a planner makes the same plans each time.
_behind_minima: OrderedDict[str, Plan] = OrderedDict()
_MOST_REMEMBERED: Final = 16  # Steps of one process; beyond it the oldest is planned anew.


def _remember(plan: Plan, fingerprints: Iterable[str]) -> None:
    """For each of the graphs that the step was looked at as, since there may be several variants of it."""
    for fingerprint in fingerprints:
        _behind_minima[fingerprint] = plan
        _behind_minima.move_to_end(fingerprint)
    while len(_behind_minima) > _MOST_REMEMBERED:
        _behind_minima.popitem(last=False)


def _try(
    guess_bytes: int,
    target_bytes: int,
    find: Callable[[int], Plan],
    find_quickly: Callable[[int], Plan],
    real_peak: Callable[[Plan], PeakRange],
    tried: Sequence[_Found],
) -> _Found | None:
    """What a planner's budget comes to; None where it leads to a schedule that has been tried."""
    try:
        plan = find(guess_bytes)
    except InfeasibleBudget as error:
        guess_bytes = error.minimum_bytes
        plan = _near_the_smallest(guess_bytes, target_bytes, find, find_quickly, real_peak)
    if any(one.is_of(plan) for one in tried):
        return None
    return _Found(guess_bytes, plan, real_peak(plan))


def _near_the_smallest(
    guess_bytes: int,
    target_bytes: int,
    find: Callable[[int], Plan],
    find_quickly: Callable[[int], Plan],
    real_peak: Callable[[Plan], PeakRange],
) -> Plan:
    """A plan of which hardly more than the real peak matters: a cheaper one is looked for only where it fits."""
    plan = find_quickly(guess_bytes)
    if find_quickly is find or real_peak(plan).highest_bytes > target_bytes:
        return plan
    cheaper = find(guess_bytes)
    return cheaper if real_peak(cheaper).highest_bytes <= target_bytes else plan


def _narrow(target_bytes: int, guess_bytes: int, find: Callable[[int], Plan], tried: list[_Found]) -> bool:
    """Where a guess leads to a plan that was too large, the next guess lies below it; is that so?

    A step of few variants has few plans, so that a guess far above a suggestion that fits often leads to a known one.
    """
    try:
        plan = find(guess_bytes)
    except InfeasibleBudget:
        return False
    fits = bool(_fitting(target_bytes, tried))
    for number, one in enumerate(tried):
        if fits and one.is_of(plan) and one.peak.highest_bytes > target_bytes and guess_bytes < one.guess_bytes:
            tried[number] = dataclasses.replace(one, guess_bytes=guess_bytes)
            return True
    return False


def _raise_guess(guess_bytes: int, find: Callable[[int], Plan], tried: list[_Found]) -> None:
    """Where a larger guess leads to a plan that was tried, this is the budget that the planner had for it."""
    try:
        plan = find(guess_bytes)
    except InfeasibleBudget:
        return
    for number, one in enumerate(tried):
        if one.is_of(plan) and one.guess_bytes < guess_bytes:
            tried[number] = dataclasses.replace(one, guess_bytes=guess_bytes)


def _try_suggestions(
    target_bytes: int,
    suggestions: Callable[[], Iterable[Plan]],
    real_peak: Callable[[Plan], PeakRange],
    tried: list[_Found],
) -> None:
    """Try the suggestions that would be the cheapest plan so far and whose tensors alone do not forbid it."""
    for plan in suggestions():
        fitting = [one.plan.time_s for one in _fitting(target_bytes, tried)]
        is_cheaper = plan.time_s < (1 - _LITTLE_TIME) * min(fitting) if fitting else True
        may_fit = plan.peak_bytes <= _FAR_OVER * target_bytes
        if is_cheaper and may_fit and not any(one.is_of(plan) for one in tried):
            tried.append(_Found(plan.peak_bytes, plan, real_peak(plan)))


def _try_the_smallest(
    minimum_bytes: int,
    target_bytes: int,
    find: Callable[[int], Plan],
    find_quickly: Callable[[int], Plan],
    real_peak: Callable[[Plan], PeakRange],
    tried: list[_Found],
    rounds: Rounds,
) -> list[_Found]:
    """Try the smallest plans until one fits, then cheaper ones between it and what failed.

    Returns:
        The smallest plans. Where none fits, they are the same for every target.
    """
    smallest: list[_Found] = []
    for factor in (*_NEAR_THE_SMALLEST, *_FARTHER)[: rounds.last]:
        guess = int(minimum_bytes * factor)
        if factor in _FARTHER and _smallest(smallest) is not smallest[-1]:
            break
        plan = _near_the_smallest(guess, target_bytes, find, find_quickly, real_peak)
        one = _known_or_tried(guess, plan, real_peak, tried)
        if not any(one.is_of(other.plan) for other in smallest):
            smallest.append(one)
        if one.peak.highest_bytes <= target_bytes:
            break
    if _fitting(target_bytes, tried):
        more = rounds.last - len(smallest)
        _try_cheaper(more, target_bytes, find, find_quickly, real_peak, tried, rounds)
    return smallest


def _try_cheaper(
    most: int,
    target_bytes: int,
    find: Callable[[int], Plan],
    find_quickly: Callable[[int], Plan],
    real_peak: Callable[[Plan], PeakRange],
    tried: list[_Found],
    rounds: Rounds,
) -> None:
    """Try up to so many plans between the one that fits and what failed, as long as they may gain enough."""
    for _ in range(most):
        if not _may_gain(rounds.least_gain, target_bytes, tried):
            break
        cheaper = _try(_next_guess(target_bytes, tried, rounds), target_bytes, find, find_quickly, real_peak, tried)
        if cheaper is not None:
            tried.append(cheaper)


def _known_or_tried(
    guess_bytes: int, plan: Plan, real_peak: Callable[[Plan], PeakRange], tried: list[_Found]
) -> _Found:
    for one in tried:
        if one.is_of(plan):
            return one
    tried.append(_Found(guess_bytes, plan, real_peak(plan)))
    return tried[-1]


def _smallest(tried: Sequence[_Found]) -> _Found:
    return min(tried, key=lambda one: one.peak.highest_bytes)


def _remembered(tried: Sequence[_Found]) -> list[Plan]:
    """The plan behind a budget that an error has named for this step, if there is one."""
    known = [(_behind_minima.get(one.plan.fingerprint), one.plan.planner) for one in tried]
    # Another planner's plan is not what was asked for.
    return [plan for plan, planner in known if plan is not None and plan.planner == planner][:1]


def _undercut(
    plans: Iterable[Plan], real_peak: Callable[[Plan], PeakRange], tried: list[_Found], smallest: list[_Found]
) -> None:
    """Where nothing fits, try what may have a smaller real peak than the smallest plans: the error names the smallest.

    Suggestions are tried only where their tensors may fit the target. A target that is far too small would leave them
    all out, and the smallest budget that is named would depend on what was asked for.
    """
    for plan in plans:
        known = [one.peak.highest_bytes for one in smallest or tried]
        if plan.peak_bytes <= _FAR_OVER * min(known):
            smallest.append(_known_or_tried(plan.peak_bytes, plan, real_peak, tried))


def _fastest(fits: Sequence[_Found], expected_s: Callable[[Plan], float | None] | None) -> _Found:
    """The plan with the least work, unless a run of another one is expected to take much less time."""
    cheapest = min(fits, key=lambda one: one.plan.time_s)
    if expected_s is None or len(fits) == 1:
        return cheapest
    seconds = [(expected_s(one.plan) or math.inf, one) for one in fits]
    fastest_s, fastest = min(seconds, key=lambda pair: pair[0])
    cheapest_s = next(own_s for own_s, one in seconds if one is cheapest)
    return fastest if fastest_s < (1 - _MUCH_FASTER) * cheapest_s else cheapest


def _is_close(target_bytes: int, one: _Found, close_enough: float = _CLOSE_ENOUGH) -> bool:
    """Does a plan fit, and use the target well?"""
    return target_bytes * (1 - close_enough) <= one.peak.highest_bytes <= target_bytes


def _fitting(target_bytes: int, tried: Sequence[_Found]) -> list[_Found]:
    return [one for one in tried if one.peak.highest_bytes <= target_bytes]


def _may_gain(least_gain: float, target_bytes: int, tried: Sequence[_Found]) -> bool:
    """Could a plan between the largest guess that fits and the next one that does not be cheaper by so much?

    Where every guess fits, the step as it is lies above: a plan that costs next to nothing leaves nothing to win.
    """
    fitting = _fitting(target_bytes, tried)
    if not fitting:
        return True
    guess = max(one.guess_bytes for one in fitting)
    best = min((one.plan for one in fitting), key=lambda plan: plan.time_s)
    best_s = best.time_s
    above = [one for one in tried if one.guess_bytes > guess]
    if not above:
        return best.overhead > least_gain
    return best_s - min(above, key=lambda one: one.guess_bytes).plan.time_s > least_gain * best_s


def _next_guess(target_bytes: int, tried: Sequence[_Found], rounds: Rounds) -> int:
    """The planner's budget to try next. The real peak grows with it, by leaps and not at the same rate."""
    by_guess = sorted(tried, key=lambda one: one.guess_bytes)
    fitting = _fitting(target_bytes, by_guess)
    failed = [one for one in by_guess if one.peak.highest_bytes > target_bytes]
    if not fitting:
        lowest = failed[0]
        rate = 1.0
        if len(failed) > 1 and failed[1].guess_bytes > lowest.guess_bytes:
            fallen = failed[1].peak.highest_bytes - lowest.peak.highest_bytes
            if fallen < -_SMALLEST_STEP * target_bytes and len(failed) == 2:
                # The smaller plan needs clearly more: what fits lies between, if anywhere near. A step with AdamW in
                # bfloat16 at 40 % got +29 % so, where the smallest plan of all, at +66 %, was looked for and taken.
                return (failed[1].guess_bytes + lowest.guess_bytes) // 2
            rate = min(1.0, max(_SMALLEST_RATE, fallen / (failed[1].guess_bytes - lowest.guess_bytes)))
        aim_bytes = int(rounds.aim * target_bytes)
        excess = max(lowest.peak.highest_bytes - aim_bytes, int(_SMALLEST_STEP * target_bytes))
        below = min(lowest.guess_bytes, lowest.plan.peak_bytes)
        least = int(_LARGEST_STEP * below)
        if rounds.by_share and len(failed) == 1 and lowest.peak.highest_bytes > _FAR_ABOVE * below:
            least = max(least, below - below * excess // lowest.peak.highest_bytes)
        return max(below - int(excess / rate), least)
    fits = fitting[-1]
    room = target_bytes - fits.peak.highest_bytes
    above = [one for one in failed if one.guess_bytes > fits.guess_bytes]
    if not above:
        return fits.guess_bytes + room
    share = room / (above[0].peak.highest_bytes - fits.peak.highest_bytes)
    share = min(_MOST_OF_THE_WAY, max(1 - _MOST_OF_THE_WAY, share))
    return fits.guess_bytes + int(share * (above[0].guess_bytes - fits.guess_bytes))


@dataclass(frozen=True)
class _Found:
    guess_bytes: int
    plan: Plan
    peak: PeakRange

    def is_of(self, plan: Plan) -> bool:
        """Is it what ``plan`` comes to? Variants of a step may share a schedule."""
        return (self.plan.fingerprint, self.plan.schedule) == (plan.fingerprint, plan.schedule)

    def with_real_peak(self) -> Plan:
        budget_bytes = max(self.guess_bytes, self.plan.budget_bytes)
        return dataclasses.replace(self.plan, peak_bytes=self.peak.expected_bytes, budget_bytes=budget_bytes)
