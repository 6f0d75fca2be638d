"""What a user asks of a planned function."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from remat.core.budget import parse_budget
from remat.core.plan import Plan


@dataclass(frozen=True)
class Request:
    """What a user asked for.

    Attributes:
        budget: peak device bytes, as ``remat.plan`` takes it.
        plan: a plan to follow instead of a budget.
        planner: a planner's name.
        time_limit_s: wall seconds for each round of planning.
        options: passed on to the planner.
        checkpoints: names of what to keep, instead of a budget; everything else is recomputed.
    """

    budget: int | str | None = None
    plan: Plan | None = None
    planner: str = "auto"
    time_limit_s: float | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    checkpoints: tuple[str, ...] | None = None

    @property
    def plans(self) -> bool:
        """Is anything to be planned?"""
        return self.budget is not None or self.plan is not None or self.checkpoints is not None

    def check(self, caller: str) -> None:
        """Refuse at once what can only fail later.

        Raises:
            ValueError: for two of budget, plan and checkpoints, or for an unknown planner.
            InvalidBudget: for a budget that cannot be read.
        """
        from remat.planners import get_planner

        given = [name for name in ("budget", "plan", "checkpoints") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{caller} takes {given[0]}= or {given[1]}=, not both")
        if self.budget is not None:
            parse_budget(self.budget, baseline_peak_bytes=1 << 60)
        if self.plan is not None and not isinstance(self.plan, Plan):
            raise TypeError(f"plan= of {caller} is a remat.Plan, not {type(self.plan).__name__}")
        get_planner(self.planner)
