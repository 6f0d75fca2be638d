"""Plans in the log of a training: a run of Weights & Biases, or whatever has its ``log``."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from remat.core.plan import Plan


class PlanLog:
    """Logs plans to a run of Weights & Biases, each when it is made and once more when its first step was measured.

    ::

        log = remat.torch.trainers.PlanLog(wandb.init())
        for batch in loader:
            loss_fn(batch).backward()           # loss_fn = remat.torch.limit_memory(...)
            ...
            log(loss_fn.plans)

    The plan is a text, ``remat/plan``. The numbers are ``remat/predicted_peak_bytes``, ``remat/measured_peak_bytes``
    (of the first planned step), ``remat/budget_bytes`` and ``remat/overhead``, a fraction of the plain step's time.
    They join what the run logs next, so that no step of the run is theirs.

    Args:
        run: with a method ``log(data, commit=False)``: a run, or the module ``wandb`` itself, if its run begins later.

    Raises:
        TypeError: for what has no such method.
    """

    def __init__(self, run: Any) -> None:
        if not callable(getattr(run, "log", None)):
            raise TypeError(
                f"a plan is logged to a run of Weights & Biases, such as wandb.init() returns, not to a "
                f"{type(run).__name__}"
            )
        self._run = run
        # By address, at which another may lie later, and measured peak.
        self._logged: dict[tuple[int, int | None], weakref.ref[Plan]] = {}

    def __call__(self, plans: Iterable[Plan]) -> None:
        """Log those that are new, or measured since.

        Args:
            plans: all those made so far.
        """
        for plan in plans:
            state = id(plan), plan.measured_peak_bytes
            if state in self._logged and self._logged[state]() is plan:
                continue
            self._logged[state] = weakref.ref(plan)
            figures = {
                "remat/plan": str(plan),
                "remat/predicted_peak_bytes": plan.peak_bytes,
                "remat/measured_peak_bytes": plan.measured_peak_bytes,
                "remat/budget_bytes": plan.budget_bytes,
                "remat/overhead": plan.overhead,
                "remat/expected_overhead": plan.expected_overhead,
            }
            self._run.log({name: value for name, value in figures.items() if value is not None}, commit=False)
