"""What is said of the first step under a plan: did it keep the budget, and if not, by how much and why."""

from __future__ import annotations

import logging
from typing import Final, Literal

from remat.core.budget import format_bytes
from remat.core.errors import PlanMismatch
from remat.core.plan import Plan

_log = logging.getLogger("remat")

OnChange = Literal["replan", "keep"]
"""What a front end does about a step that its plan does not fit: plan again, or keep the plan."""

TOLERANCE: Final = 0.01
"""The share of a budget by which a step may exceed it without a word. A judgement: a user would not act on less.
Smaller, rounding of allocations is reported; larger, broken budgets are not."""


def replans(on_change: str) -> bool:
    """Is a step that its plan does not fit planned again?

    Raises:
        ValueError: for a word that is unknown.
    """
    if on_change not in ("replan", "keep"):
        raise ValueError(f'on_change={on_change!r} is unknown; it is "replan" or "keep"')
    return on_change == "replan"


def exceeds(plan: Plan, measured_bytes: int) -> bool:
    """Did a step take more than the budget of its plan, by more than the tolerance?"""
    return measured_bytes > plan.budget_bytes * (1 + TOLERANCE)


def broken_budget(plan: Plan, measured_bytes: int, first_difference: str | None, *, compared: bool = True) -> str:
    """What to say of a step that took more than its budget.

    Args:
        plan: that it followed.
        measured_bytes: what it took.
        first_difference: the first operator that is not the plan's; None where there is none.
        compared: were operators compared with the plan's at all?
    """
    if not compared:
        why = "Something that ran takes memory that the plan does not know of"
    elif first_difference:
        why = f"The first operator that differs from the plan: {first_difference}"
    else:
        why = "Its operators are those of the plan, and their memory is not"
    return (
        f"A step under this plan took {format_bytes(measured_bytes)}, more than the budget of "
        f"{format_bytes(plan.budget_bytes)}; {format_bytes(plan.peak_bytes)} were predicted. {why}. Plan with a batch "
        "as this one, or for a smaller budget"
    )


def tell(message: str, *, strict: bool) -> None:
    """Log that a budget was broken.

    Raises:
        PlanMismatch: in place of the log, where the user wants an error.
    """
    if strict:
        raise PlanMismatch(message)
    _log.warning("%s. This is said once.", message)


def no_room_for_excess(excess_bytes: int, minimum_bytes: int) -> str:
    """What to say where a step that took more than its budget cannot be planned again within it.

    Args:
        excess_bytes: what it took more than was predicted.
        minimum_bytes: the smallest budget that would do.
    """
    return (
        f"The first step took {format_bytes(excess_bytes)} more than was predicted, and no plan leaves so much room; "
        f"the smallest budget that would do is {minimum_bytes} bytes ({format_bytes(minimum_bytes)}). The step runs on "
        "under the plan that it has, over its budget."
    )
