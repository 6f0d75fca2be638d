"""Finds the budget to plan with, so that what the device really shows stays within the budget that was asked for.

Planners count tensors. An allocator rounds them up, a compiler fuses them. Both are known only for a given
schedule, so the planner's budget is corrected until the real figure is within the target and close to it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from remat.budget import format_bytes
from remat.errors import InfeasibleBudget
from remat.plan import Plan
from remat.tensorflow.allocator import PeakRange

_CLOSE_ENOUGH = 0.05
_SMALLEST_STEP = 0.02
# The schedule of least tensors is not always the one of least chunks. Later ones cost less time.
_NEAR_THE_SMALLEST = (1.0, 1.02, 1.05, 1.1)


def plan_within(
    target_bytes: int,
    first_guess_bytes: int,
    make_plan: Callable[[int], Plan],
    real_peak: Callable[[Plan], PeakRange],
    *,
    rounds: int,
) -> Plan:
    """The cheapest plan found whose highest real peak is at most ``target_bytes``.

    Args:
        target_bytes: what the real peak may be.
        first_guess_bytes: the planner's budget to begin with.
        make_plan: planner's budget -> plan; raises InfeasibleBudget.
        real_peak: plan -> what the device will show.
        rounds: how many budgets to try before the smallest plan is taken.

    Returns:
        The plan, its ``peak_bytes`` being the real one that is expected.

    Raises:
        InfeasibleBudget: ``minimum_bytes`` is the smallest target that this function reaches.
    """
    fits: Plan | None = None
    fails_at: int | None = None
    smallest_bytes: int | None = None
    binding = ""
    guess = max(1, first_guess_bytes)
    tried: set[tuple[int, ...]] = set()
    for _ in range(rounds):
        try:
            found = make_plan(guess)
        except InfeasibleBudget as error:
            binding = error.binding_op
            guess = error.minimum_bytes
            found = make_plan(guess)
        if found.schedule in tried:
            break
        tried.add(found.schedule)
        counted = found.peak_bytes
        peak = real_peak(found)
        found = dataclasses.replace(found, peak_bytes=peak.expected_bytes)
        if smallest_bytes is None or peak.highest_bytes < smallest_bytes:
            smallest_bytes = peak.highest_bytes
        if peak.highest_bytes <= target_bytes:
            if fits is None or found.time_s < fits.time_s:
                fits = found
            if peak.highest_bytes >= target_bytes * (1 - _CLOSE_ENOUGH) or found.overhead == 0:
                break
            # Rounding jumps, so a higher guess may fail: go half of the way that is left.
            room = target_bytes - peak.highest_bytes
            guess = guess + room if fails_at is None else (guess + fails_at) // 2
        else:
            fails_at = guess if fails_at is None else min(fails_at, guess)
            excess = peak.highest_bytes - target_bytes
            guess = min(guess, counted) - max(excess, int(_SMALLEST_STEP * target_bytes))
        if guess < 1:
            break
    if fits is not None:
        return fits
    try:
        make_plan(1)  # No planner keeps one byte: the error says what the planner can reach.
    except InfeasibleBudget as error:
        binding = error.binding_op
        for factor in _NEAR_THE_SMALLEST:
            found = make_plan(int(error.minimum_bytes * factor))
            peak = real_peak(found)
            if peak.highest_bytes <= target_bytes:
                return dataclasses.replace(found, peak_bytes=peak.expected_bytes)
            smallest_bytes = min(smallest_bytes or peak.highest_bytes, peak.highest_bytes)
    assert smallest_bytes is not None
    raise InfeasibleBudget(
        f"the smallest peak found is {smallest_bytes} bytes",
        minimum_bytes=smallest_bytes,
        budget_bytes=target_bytes,
        binding_op=binding,
    )


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
