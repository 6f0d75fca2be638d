"""A plan -> the training step: what autograd saves is kept or made again, tensor by tensor, as the plan says."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Any

import torch

from remat.core.errors import PlanMismatch
from remat.core.plan import Plan
from remat.torch.api.plan import StepPlan
from remat.torch.emit.planned_step import ForwardWatcher, PlannedForward, unpack

_log = logging.getLogger("remat")


def apply(plan: Plan) -> Applied:
    """Run a forward pass under a plan.

    ::

        with remat.torch.apply(plan):
            loss = loss_fn(*args)
        loss.backward()

    Everything else of the training loop stays as it is. Each use of the result is one forward pass; it may be used any
    number of times, also several before one backward pass. A step that departs from the plan (another shape, another
    branch) keeps, from there on, what plain PyTorch would keep; the first time this is logged as a warning.

    Args:
        plan: from ``remat.torch.plan``.

    Returns:
        A context manager, whose ``departures`` counts the steps that did not follow the plan.

    Raises:
        PlanMismatch: for a plan without its traced step, as loaded from a file.
    """
    if not isinstance(plan, StepPlan):
        raise PlanMismatch(
            "apply takes a plan that remat.torch.plan made; for one that was loaded from a file, "
            "remat.torch.plan(loss_fn, *args, plan=loaded) traces the step again and checks that it is the same"
        )
    return Applied(plan)


class Applied:
    """What ``apply`` returns: a context manager that may be entered again and again.

    Attributes:
        plan: the plan.
        departures: how many forward passes did not follow it.
    """

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.departures = 0
        self._planned = PlannedForward(plan.step.recording, plan.directions)
        self._open: list[tuple[ForwardWatcher, Any]] = []

    def __enter__(self) -> Applied:
        watcher = ForwardWatcher(self._planned, self._departed)
        hooks = torch.autograd.graph.saved_tensors_hooks(watcher.pack, unpack)
        watcher.__enter__()  # type: ignore[no-untyped-call]
        hooks.__enter__()
        self._open.append((watcher, hooks))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        watcher, hooks = self._open.pop()
        hooks.__exit__(kind, error, trace)
        watcher.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        if kind is None:
            watcher.finish()

    def _departed(self, where: str) -> None:
        self.departures += 1
        if self.departures == 1:
            _log.warning(
                "This step departs from the plan: %s. From there on it keeps what plain PyTorch keeps: its numbers are "
                "right, its memory is not limited. Plan again for other shapes or branches. This is said once.",
                where,
            )
