"""What a user asks of a planned step; the same in every front end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from remat.core.budget import check_budget
from remat.core.plan import Plan
from remat.planners.registry import get_planner

AUTO: Final = "auto"
"""As a budget: a GPU's memory less a margin. See ``remat.fit.auto_budget``."""

LEVERS: Final = ("recompute", "split")
"""What a plan may do to save memory: run ops again, and run a region of the step in slices. A split sums in another
order, so that numbers differ by rounding; it is used only where it is asked for."""

WHOLE_STEP_LEVERS: Final = (*LEVERS, "update")
"""Where the update of the parameters is a part of the step, it may also run as soon as its gradient is final."""

FIT_LEVERS: Final = ("recompute", "micro_batches", "split", "update")
"""Where remat also cuts the batch, as under Keras' ``fit``, it may choose the number of micro-batches."""


@dataclass(frozen=True)
class Request:
    """What a user asked for: a budget, a plan to follow, or checkpoints to keep; nothing at all plans nothing.

    Where a front end takes checkpoints beside a budget, they are hints: kept if the budget allows it.

    Attributes:
        budget: peak device bytes, as ``remat.plan`` takes it, or "auto" where a front end can tell a GPU's memory.
        plan: a plan to follow.
        checkpoints: what to keep, in the front end's own words (tensors, names, layers); all else is recomputed.
        planner: a planner's name.
        time_limit_s: wall seconds for each round of planning; None leaves it to the front end.
        options: passed on to the planner.
        known: a plan that was made for the same request before, followed where the step turns out to be the one that
            it is for.
        levers: what the plan may do, of ``FIT_LEVERS``.
        is_cautious: has a step broken the budget, so that a plan relies on nothing that was seen around it?
    """

    budget: int | str | None = None
    plan: Plan | None = None
    checkpoints: Any = None
    planner: str = "auto"
    time_limit_s: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    known: Plan | None = None
    levers: tuple[str, ...] = ("recompute",)
    is_cautious: bool = False

    @property
    def plans(self) -> bool:
        """Is anything to be planned?"""
        return self.budget is not None or self.plan is not None or self.checkpoints is not None

    @property
    def hints(self) -> Any:
        """Checkpoints that are kept only if the budget allows it; None where there are none."""
        return self.checkpoints if self.budget is not None else None

    def check(
        self,
        caller: str,
        *,
        takes_auto: bool = True,
        takes_hints: bool = False,
        takes_levers: tuple[str, ...] = LEVERS,
    ) -> Request:
        """Refuse at once what can only fail later; returns the request.

        Args:
            caller: the function that the user called, for the error.
            takes_auto: does it take the budget "auto"?
            takes_hints: does it take checkpoints beside a budget?
            takes_levers: the levers that it knows.

        Raises:
            ValueError: for more than one of budget, plan and checkpoints, for an unknown planner, or for levers that
                are none or unknown.
            TypeError: for a plan that is none.
            InvalidBudget: for a budget that cannot be read.
        """
        given = [name for name in ("budget", "plan", "checkpoints") if getattr(self, name) is not None]
        if len(given) > 1 and not (takes_hints and given == ["budget", "checkpoints"]):
            raise ValueError(f"{caller} takes {given[0]}= or {given[1]}=, not both; leave one out")
        if self.budget is not None and not (takes_auto and self.budget == AUTO):
            check_budget(self.budget)
        if self.plan is not None and not isinstance(self.plan, Plan):
            raise TypeError(f"plan= of {caller} is a remat.Plan, not {type(self.plan).__name__}")
        get_planner(self.planner)
        if not self.levers or set(self.levers) - set(takes_levers):
            raise ValueError(f"levers={self.levers!r} of {caller} is not a tuple of some of {', '.join(takes_levers)}")
        return self
