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
from remat.fit.tried_plans import TriedPlan, TriedPlans, fastest_of, smallest_of

_log = logging.getLogger("remat")

# Judgements, as those of ``tried_plans``.
# The figures below steer the search. They are judgements, without a measurement of their own. Other values cost a round
# more or leave a little of the budget unused; no plan breaks a budget because of them.
_CLOSE_ENOUGH: Final = 0.05  # Where Rounds does not say otherwise.
# A suggestion is tried where it takes less time by this share at least, and where its tensors need no more than so many
# times the target: a compiler needs less than the tensors say at most by its fusions.
_LITTLE_TIME: Final = 0.005
_FAR_OVER: Final = 1.15
# Where nothing failed, a plan is held one by one where that takes at most one part in so many of its extra time.
_WORTH_HOLDING: Final = 4
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
        between: how many more between budgets that failed, once a plan fits that is much dearer than what failed: an
            allocator adds more to one plan than to its neighbours.
        squeezes: how often a plan that failed by little, and is much cheaper than what fits, is then squeezed.
        one_by_one: how many more budgets for plans whose ops are held one by one, where one of these may be cheaper
            than what fits otherwise.
    """

    first: int
    last: int
    least_gain: float = 0.0
    aim: float = 1.0
    by_share: bool = False
    close_enough: float = _CLOSE_ENOUGH
    between: int = 0
    squeezes: int = 0
    one_by_one: int = 0


def plan_within(
    target_bytes: int,
    first_guess_bytes: int,
    find: Callable[[int], Plan],
    real_peak: Callable[[Plan], PeakRange],
    rounds: Rounds,
    suggestions: Callable[[], Iterable[Plan]] = tuple,
    likely: Callable[[], Iterable[Plan]] = tuple,
    expected_s: Callable[[Plan], float | None] | None = None,
    squeezed: Callable[[Plan], Plan | None] = lambda plan: None,
    order_time_s: Callable[[Plan], float | None] = lambda plan: None,
) -> Plan:
    """The cheapest plan found whose highest real peak is at most ``target_bytes``.

    Where there is none, the plan whose highest real peak is smallest among those that are more likely to fit than not.

    The smallest budget that an error names comes from plans that do not depend on the target, and these are tried
    before any budget is refused. So it can be kept whatever was planned before, where real peaks are what they are now.

    Args:
        target_bytes: what the real peak may be.
        first_guess_bytes: the planner's budget to begin with.
        find: planner's budget -> plan; raises InfeasibleBudget.
        real_peak: plan -> what the device will show.
        rounds: how many plans may be tried.
        suggestions: plans that do not depend on the budget; asked for where nothing fits, or to be had at less time.
        likely: the same, asked for as soon as a round fails: one that fits spares the search below it.
        expected_s: what a run of a plan is expected to take, memory's part included, or None; None for nobody to ask.
        squeezed: a plan that misses the target by little -> one that small changes make of it, or None.
        order_time_s: seconds that a run of a plan takes longer with its ops held one by one, which may lower its peak,
            or None.

    Returns:
        The plan, its ``peak_bytes`` being the real one that is expected.

    Raises:
        NothingFits: no plan is even likely to fit; ``minimum_bytes`` is the smallest target that can be held.
    """
    search = _Search(target_bytes, find, real_peak, rounds, order_time_s)
    tried = search.tried
    search.begin(max(1, first_guess_bytes), likely)
    found_none = not tried.fitting
    search.try_suggestions(suggestions)
    if found_none and tried.fitting:
        search.try_cheaper(rounds.last)
    binding_op = ""
    smallest: list[TriedPlan] = []
    if not tried.fitting:
        try:
            search.find(1)  # No planner keeps one byte: the error says what the planner can reach.
        except InfeasibleBudget as error:
            binding_op = error.binding_op
            smallest = search.try_the_smallest(error.minimum_bytes)
        if not tried.fitting:
            search.undercut(itertools.chain(likely(), suggestions(), _remembered(tried.all)), smallest)
    search.hold_one_by_one(rounds.one_by_one)
    if search.fitting:
        search.look_between()
        search.squeeze_near_misses(squeezed)
        search.hold_one_by_one()
    if fits := search.fitting:
        return fastest_of(fits, expected_s).with_real_peak()
    if likely_to_fit := [one for one in tried.all if one.peak.likely_bytes <= target_bytes]:
        best = smallest_of(likely_to_fit)
        _log.warning(
            "The step is likely to stay within the budget, but the allocator's rounding may take it to %s where %s "
            "were to be held: the budget is close to the smallest possible one.",
            format_bytes(best.peak.highest_bytes),
            format_bytes(target_bytes),
        )
        return best.with_real_peak()
    named = smallest_of(smallest or tried.all)
    _remember(named.plan, {one.plan.fingerprint for one in tried.all})
    raise NothingFits(named.plan, named.peak.highest_bytes, target_bytes, binding_op)


class NothingFits(InfeasibleBudget):
    """No plan is even likely to fit a target.

    Attributes:
        plan: the one behind the smallest target that can be held.
    """

    def __init__(self, plan: Plan, minimum_bytes: int, target_bytes: int, binding_op: str) -> None:
        super().__init__(
            f"the smallest peak found is {minimum_bytes} bytes",
            minimum_bytes=minimum_bytes,
            budget_bytes=target_bytes,
            binding_op=binding_op,
        )
        self.plan = plan


class _Search:
    """The rounds of one search: what was tried, and who makes plans.

    Args:
        target_bytes: what the real peak may be.
        find: planner's budget -> plan.
        real_peak: plan -> what the device will show.
        rounds: how many plans may be tried.
        order_time_s: seconds that holding the ops of a plan one by one takes, or None.
    """

    def __init__(
        self,
        target_bytes: int,
        find: Callable[[int], Plan],
        real_peak: Callable[[Plan], PeakRange],
        rounds: Rounds,
        order_time_s: Callable[[Plan], float | None],
    ) -> None:
        self.tried = TriedPlans(target_bytes, real_peak)
        self._held = TriedPlans(target_bytes, real_peak)  # Those whose ops are held one by one.
        self._order_time_s = order_time_s
        # The smallest plan is asked for several times, and so are budgets that have none.
        self.find = _asked_once(find)
        self._rounds = rounds

    def begin(self, guess_bytes: int, likely: Callable[[], Iterable[Plan]]) -> None:
        """The first rounds: until a plan is close enough to the target, or a further one can win nothing."""
        tried, rounds = self.tried, self._rounds
        are_likely = False
        for _ in range(rounds.first):
            one = self._try(guess_bytes)
            if one is None:
                if are_likely and self._narrow(guess_bytes):
                    guess_bytes = self._next_guess()
                    continue
                self._raise_guess(guess_bytes)
                return
            fits = one.peak.highest_bytes <= tried.target_bytes
            if tried.is_close(one, rounds.close_enough) or (fits and one.plan.overhead == 0):
                return
            if not fits and len(tried.all) == 1:
                self.try_suggestions(likely)
                are_likely = len(tried.all) > 1
            if not tried.may_gain(rounds.least_gain):
                return
            guess_bytes = self._next_guess()

    def try_suggestions(self, suggestions: Callable[[], Iterable[Plan]]) -> None:
        """Try the suggestions that would be the cheapest plan so far and whose tensors alone do not forbid it."""
        for plan in suggestions():
            fitting = [one.plan.time_s for one in self.tried.fitting]
            is_cheaper = plan.time_s < (1 - _LITTLE_TIME) * min(fitting) if fitting else True
            if is_cheaper and plan.peak_bytes <= _FAR_OVER * self.tried.target_bytes:
                self.tried.add(plan.peak_bytes, plan)

    def try_the_smallest(self, minimum_bytes: int) -> list[TriedPlan]:
        """Try the smallest plans until one fits, then cheaper ones between it and what failed.

        Args:
            minimum_bytes: the smallest budget of the planner.

        Returns:
            The smallest plans. Where none fits, they are the same for every target.
        """
        smallest: list[TriedPlan] = []
        for factor in (*_NEAR_THE_SMALLEST, *_FARTHER)[: self._rounds.last]:
            guess_bytes = int(minimum_bytes * factor)
            if factor in _FARTHER and smallest_of(smallest) is not smallest[-1]:
                break
            one = self.tried.add(guess_bytes, self.find(guess_bytes))
            if not any(one.is_of(other.plan) for other in smallest):
                smallest.append(one)
            if one.peak.highest_bytes <= self.tried.target_bytes:
                break
        if self.tried.fitting:
            self.try_cheaper(self._rounds.last - len(smallest))
        return smallest

    def try_cheaper(self, most: int) -> None:
        """Try up to so many plans between the one that fits and what failed, as long as they may gain enough."""
        for _ in range(most):
            if not self.tried.may_gain(self._rounds.least_gain):
                break
            self._try(self._next_guess())

    @property
    def fitting(self) -> list[TriedPlan]:
        """The plans that fit, however they are run."""
        return self.tried.fitting + self._held.fitting

    def hold_one_by_one(self, budgets: int = 0) -> None:
        """Try plans with their ops one by one, which lowers their peaks: those that failed, from the cheapest on.

        Args:
            budgets: how many more budgets of the planner are tried then: the target itself, to which little is added
                one by one, and then between what fits so and what does not.
        """
        for one in self.tried.failed_below(self._best_s()):
            held = self._hold(one.guess_bytes, one.plan)
            if held is None or held in self._held.fitting:
                break
        if budgets and not self._held.fitting:
            self._hold_the_cheapest()
        for number in range(budgets):
            if not self._may_gain_one_by_one():
                break
            guess_bytes = self._held.next_guess(1.0, by_share=False) if number else self.tried.target_bytes
            try:
                self._hold(guess_bytes, self.find(guess_bytes))
            except InfeasibleBudget:
                break

    def _may_gain_one_by_one(self) -> bool:
        held, fitting = self._held, self._held.fitting
        if any(held.is_close(one, self._rounds.close_enough) for one in fitting):
            return False
        return held.may_gain(_LITTLE_TIME) if fitting else bool(held.all)

    def _hold_the_cheapest(self) -> None:
        """The cheapest plan that fits leaves room one by one, which may be worth more than it takes."""
        if not self.tried.fitting:
            return
        cheapest = min(self.tried.fitting, key=lambda one: one.time_s)
        order_time_s, extra_s = self._order_time_s(cheapest.plan), cheapest.time_s - cheapest.plan.baseline_time_s
        if order_time_s is not None and order_time_s * _WORTH_HOLDING <= extra_s:
            self._add_held(cheapest.guess_bytes, cheapest.plan, order_time_s)

    def _hold(self, guess_bytes: int, plan: Plan) -> TriedPlan | None:
        """What a plan comes to with its ops one by one; None where that is not cheaper than what fits."""
        order_time_s = self._order_time_s(plan)
        if order_time_s is None or plan.time_s + order_time_s >= self._best_s():
            return None
        return self._add_held(guess_bytes, plan, order_time_s)

    def _add_held(self, guess_bytes: int, plan: Plan, order_time_s: float) -> TriedPlan:
        return self._held.add(guess_bytes, dataclasses.replace(plan, one_by_one=True), order_time_s)

    def _best_s(self) -> float:
        return min((one.time_s for one in self.fitting), default=math.inf)

    def look_between(self) -> None:
        """Try budgets in the middle of the widest gaps above the cheapest plan that fits, which are run as it is."""
        cheapest = min(self.fitting, key=lambda one: one.time_s)
        tried = self._held if cheapest.plan.one_by_one else self.tried
        asked = [one.guess_bytes for one in tried.all]
        for _ in range(self._rounds.between):
            gap = tried.widest_gap(asked, self._best_s())
            if gap is None:
                break
            asked.append(sum(gap) // 2)
            if tried is self._held:
                self._hold(asked[-1], self.find(asked[-1]))
            else:
                self._try(asked[-1])

    def squeeze_near_misses(self, squeezed: Callable[[Plan], Plan | None]) -> None:
        """Try what small changes make of plans that failed by little, and are much cheaper than what fits."""
        seen: list[TriedPlan] = []
        for _ in range(self._rounds.squeezes):
            near = self._near_miss(seen)
            if near is None:
                break
            seen.append(near)
            plan = squeezed(near.plan)
            if plan is not None and plan.one_by_one:
                self._hold(max(near.guess_bytes, plan.peak_bytes), plan)
            elif plan is not None:
                self.tried.add(max(near.guess_bytes, plan.peak_bytes), plan)

    def _near_miss(self, seen: Sequence[TriedPlan]) -> TriedPlan | None:
        near = [tried.near_miss(seen, self._best_s()) for tried in (self.tried, self._held)]
        return min((one for one in near if one is not None), key=lambda one: one.time_s, default=None)

    def undercut(self, plans: Iterable[Plan], smallest: list[TriedPlan]) -> None:
        """Where nothing fits, try what may need less than the smallest plans do: the error names the smallest budget.

        Suggestions are tried only where their tensors may fit the target. A target that is far too small would leave
        them all out, and the smallest budget that is named would depend on what was asked for.
        """
        for plan in plans:
            known = [one.peak.highest_bytes for one in smallest or self.tried.all]
            if plan.peak_bytes <= _FAR_OVER * min(known):
                smallest.append(self.tried.add(plan.peak_bytes, plan))

    def _next_guess(self) -> int:
        return self.tried.next_guess(self._rounds.aim, self._rounds.by_share)

    def _try(self, guess_bytes: int) -> TriedPlan | None:
        """What a planner's budget comes to; None where it leads to a schedule that has been tried."""
        try:
            plan = self.find(guess_bytes)
        except InfeasibleBudget as error:
            guess_bytes = error.minimum_bytes
            plan = self.find(guess_bytes)
        return None if self.tried.knows(plan) else self.tried.add(guess_bytes, plan)

    def _narrow(self, guess_bytes: int) -> bool:
        try:
            plan = self.find(guess_bytes)
        except InfeasibleBudget:
            return False
        return self.tried.narrow(guess_bytes, plan)

    def _raise_guess(self, guess_bytes: int) -> None:
        try:
            plan = self.find(guess_bytes)
        except InfeasibleBudget:
            return
        self.tried.raise_guess(guess_bytes, plan)


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


def _remembered(tried: Sequence[TriedPlan]) -> list[Plan]:
    """The plan behind a budget that an error has named for this step, if there is one."""
    known = [(_behind_minima.get(one.plan.fingerprint), one.plan.planner) for one in tried]
    # Another planner's plan is not what was asked for.
    return [plan for plan, planner in known if plan is not None and plan.planner == planner][:1]
