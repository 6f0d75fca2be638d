"""Finds the budget to plan with, so that what the device really shows stays within the budget that was asked for.

Planners count tensors. An allocator rounds them up, a compiler fuses them. Both are known only for a given
schedule, so the planner's budget is corrected until the real figure is within the target and close to it.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from remat.budget import format_bytes
from remat.errors import InfeasibleBudget
from remat.plan import Plan

_log = logging.getLogger("remat")

_CLOSE_ENOUGH = 0.05
_SMALLEST_STEP = 0.02
# The schedule of least tensors is not always the one of least chunks. Later ones cost less time.
_NEAR_THE_SMALLEST = (1.0, 1.02, 1.05, 1.1)


class PeakRange(Protocol):
    """What a device or a compiler says of one plan.

    Attributes:
        expected_bytes: the peak that is expected.
        highest_bytes: what a budget should hold; the same where the figure is exact.
    """

    @property
    def expected_bytes(self) -> int:  # noqa: D102
        ...

    @property
    def highest_bytes(self) -> int:  # noqa: D102
        ...


def plan_within(
    target_bytes: int,
    first_guess_bytes: int,
    make_plan: Callable[[int], Plan],
    real_peak: Callable[[Plan], PeakRange],
    *,
    rounds: int,
    last_rounds: int,
) -> Plan:
    """The cheapest plan found whose highest real peak is at most ``target_bytes``.

    Where there is none, the plan whose highest real peak is smallest among those that are more likely to fit than not.

    Args:
        target_bytes: what the real peak may be.
        first_guess_bytes: the planner's budget to begin with.
        make_plan: planner's budget -> plan; raises InfeasibleBudget.
        real_peak: plan -> what the device will show.
        rounds: how many budgets to try at first.
        last_rounds: how many of the smallest plans to try where none of the first fits, at most four.

    Returns:
        The plan, its ``peak_bytes`` being the real one that is expected.

    Raises:
        InfeasibleBudget: no plan is even likely to fit; ``minimum_bytes`` is the smallest target that can be held.
    """
    found: list[_Found] = []
    fails_at: int | None = None
    guess = max(1, first_guess_bytes)
    tried: set[tuple[int, ...]] = set()
    for _ in range(rounds):
        try:
            plan = make_plan(guess)
        except InfeasibleBudget as error:
            guess = error.minimum_bytes
            plan = make_plan(guess)
        if plan.schedule in tried:
            break
        tried.add(plan.schedule)
        peak = real_peak(plan)
        found.append(_Found(plan, peak))
        if peak.highest_bytes <= target_bytes:
            if peak.highest_bytes >= target_bytes * (1 - _CLOSE_ENOUGH) or plan.overhead == 0:
                break
            # Rounding jumps, so a higher guess may fail: go half of the way that is left.
            room = target_bytes - peak.highest_bytes
            guess = guess + room if fails_at is None else (guess + fails_at) // 2
        else:
            fails_at = guess if fails_at is None else min(fails_at, guess)
            excess = peak.highest_bytes - target_bytes
            guess = min(guess, plan.peak_bytes) - max(excess, int(_SMALLEST_STEP * target_bytes))
        if guess < 1:
            break
    if fits := [one for one in found if one.peak.highest_bytes <= target_bytes]:
        return min(fits, key=lambda one: one.plan.time_s).with_real_peak()
    binding_op = ""
    try:
        make_plan(1)  # No planner keeps one byte: the error says what the planner can reach.
    except InfeasibleBudget as error:
        binding_op = error.binding_op
        for factor in _NEAR_THE_SMALLEST[:last_rounds]:
            plan = make_plan(int(error.minimum_bytes * factor))
            found.append(_Found(plan, real_peak(plan)))
            if found[-1].peak.highest_bytes <= target_bytes:
                return found[-1].with_real_peak()
    if likely_to_fit := [one for one in found if one.likely_bytes <= target_bytes]:
        best = min(likely_to_fit, key=lambda one: one.peak.highest_bytes)
        _log.warning(
            "The step is likely to stay within the budget, but the allocator's rounding may take it to %s where %s "
            "were to be held: the budget is close to the smallest possible one.",
            format_bytes(best.peak.highest_bytes),
            format_bytes(target_bytes),
        )
        return best.with_real_peak()
    minimum_bytes = min(one.peak.highest_bytes for one in found)
    raise InfeasibleBudget(
        f"the smallest peak found is {minimum_bytes} bytes",
        minimum_bytes=minimum_bytes,
        budget_bytes=target_bytes,
        binding_op=binding_op,
    )


@dataclass(frozen=True)
class _Found:
    plan: Plan
    peak: PeakRange

    @property
    def likely_bytes(self) -> int:
        """What most runs stay below."""
        return (self.peak.expected_bytes + self.peak.highest_bytes) // 2

    def with_real_peak(self) -> Plan:
        return dataclasses.replace(self.plan, peak_bytes=self.peak.expected_bytes)


def infeasible(budget_bytes: int, minimum_bytes: int, binding_op: str) -> InfeasibleBudget:
    """The error for a budget that cannot be kept, restating both figures."""
    return InfeasibleBudget(
        f"no schedule within {budget_bytes} bytes ({format_bytes(budget_bytes)}) was found: the smallest budget that "
        f"can be kept is {minimum_bytes} bytes ({format_bytes(minimum_bytes)}). What binds there is {binding_op}. Ask "
        "for at least that, make the batch smaller, or try another planner",
        minimum_bytes=minimum_bytes,
        budget_bytes=budget_bytes,
        binding_op=binding_op,
    )
