"""A plan -> the training step: what autograd saves is kept or made again, tensor by tensor, as the plan says."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from types import TracebackType

import torch

from remat.core.errors import PlanMismatch
from remat.core.plan import Plan
from remat.fit.first_step import TOLERANCE, broken_budget, exceeds, tell
from remat.torch import _private
from remat.torch.api.plan import StepPlan
from remat.torch.api.ranks import plan_of_all
from remat.torch.early_updates import updater_of
from remat.torch.emit.first_step import StepMeter
from remat.torch.emit.planned_forward import PlannedForward
from remat.torch.emit.planned_step import ForwardWatcher, unpack

_log = logging.getLogger("remat")


def apply(plan: Plan, *, strict: bool = False) -> Applied:
    """Run a forward pass under a plan.

    ::

        with remat.torch.apply(plan):
            loss = loss_fn(*args)
        loss.backward()

    Everything else of the training loop stays as it is. Each use of the result is one forward pass; it may be used any
    number of times, also several before one backward pass. A step that departs from the plan (another shape, another
    branch) keeps, from there on, what plain PyTorch would keep; the first time this is logged as a warning.

    The first step is measured, forward and backward pass: ``plan.measured_peak_bytes`` says what it took. Where the
    plan moves updates into the backward pass, the first step that finds the optimizer's state is measured, which is the
    second as a rule. So is one later step after another branch was taken. More than 1 % over the budget is logged as a
    warning, once.

    Args:
        plan: from ``remat.torch.plan``.
        strict: raise an error, from the backward pass, instead of that warning.

    Returns:
        A context manager, whose ``departures`` counts the steps that did not follow the plan.

    Raises:
        PlanMismatch: for a plan without its traced step, as loaded from a file; with ``strict``, from the backward pass
            of a first step that takes more than the budget; in every process, from the first step, where processes of
            a step under ``fully_shard`` do not plan the same step.
    """
    if not isinstance(plan, StepPlan):
        raise PlanMismatch(
            "apply takes a plan that remat.torch.plan made; for one that was loaded from a file, "
            "remat.torch.plan(loss_fn, *args, plan=loaded) traces the step again and checks that it is the same"
        )
    return Applied(plan, strict=strict)


class Applied:
    """What ``apply`` returns: a context manager that may be entered again and again.

    Args:
        plan: the plan.
        strict: is a step over its budget an error?
        uncounted_bytes: what the plan counts as there before the step, though nothing is.
        plans_again: will whoever made the plan make another if the first step is over its budget? Then nothing is said.

    Attributes:
        plan: the plan.
        departures: how many forward passes did not follow it.
        excess_bytes: what a measured step took more than predicted, where it was over its budget; else 0.
        first_difference: the first operator of a measured step that the plan does not have; None where there is none.
        answers: what Python heard in the newest step that was another one, where it asked for truth values.
    """

    def __init__(
        self, plan: StepPlan, *, strict: bool = False, uncounted_bytes: int = 0, plans_again: bool = False
    ) -> None:
        self.plan = plan
        self.departures = 0
        self.excess_bytes = 0
        self._strict = strict
        self._uncounted_bytes = uncounted_bytes
        self._plans_again = plans_again
        self._meter: StepMeter | None = None
        self.first_difference: str | None = None
        self.answers: list[bool] = []
        self._measures_next = False
        self._has_measured_a_branch = False
        self._planned = PlannedForward(plan.step.recording, plan.directions)
        self._is_agreed = False
        self._came_without = 0
        self._open: list[tuple[ForwardWatcher, ExitStack, StepMeter | None]] = []

    def __enter__(self) -> Applied:
        if not self._is_agreed:
            self._agree()
        self._check_reduction()
        watcher = ForwardWatcher(self._planned, self._departed)
        if self._meter is not None:
            self._meter.stop()  # Its step had no backward pass, or has it together with this one.
        meter = None
        if (
            (self.plan.measured_peak_bytes is None and self._has_state()) or self._measures_next
        ) and self._has_gradients:
            meter = self._meter = StepMeter(self._measured)
            meter.count_from_the_start(self._whole_gradients)
            meter.__enter__()  # type: ignore[no-untyped-call]
        inside = ExitStack()
        if self.plan.step.recording.is_distributed:
            inside.enter_context(_private.distribution_unseen(sends=True))
        if (sharded := _private.sharding()) is not None:
            sharded.observe(watcher)
            inside.callback(sharded.ignore, watcher)
        inside.enter_context(watcher)
        unpacks = unpack if meter is None else meter.unpacking()
        inside.enter_context(torch.autograd.graph.saved_tensors_hooks(watcher.pack, unpacks))
        self._open.append((watcher, inside, meter))
        return self

    def _agree(self) -> None:
        """Follow the plan that all processes follow."""
        self._is_agreed = True
        plan = plan_of_all(self.plan, self.plan.step.recording)
        if plan is not self.plan:
            self.plan = plan
            self._planned = PlannedForward(plan.step.recording, plan.directions)

    @property
    def _whole_gradients(self) -> list[torch.Tensor]:
        """Those that ``fully_shard`` has not reduced yet; the plan counts them as long as they live."""
        accumulation = self.plan.step.recording.accumulation
        return [] if accumulation is None else accumulation.whole_gradients()

    def _check_reduction(self) -> None:
        """Does ``fully_shard`` do with gradients what it did when the step was traced?"""
        accumulation = self.plan.step.recording.accumulation
        if accumulation is None or not (difference := accumulation.difference()):
            return
        self.departures += 1
        if self.departures == 1:
            _log.warning(
                "This step is not the planned one: %s. Its numbers are right, its memory may exceed the budget. "
                "limit_memory plans each kind of step by itself; with plan and apply, make a plan where "
                "set_requires_gradient_sync is as in the step. This is said once.",
                difference,
            )

    @property
    def _has_gradients(self) -> bool:
        """Are the gradients there that the plan counts from the start? They are not in the first of several steps."""
        recording = self.plan.step.recording
        if recording.accumulation is not None and recording.accumulation.finds_whole and not self._whole_gradients:
            # Where two steps make one update, this plan is for the first of them only, and never finds any.
            self._came_without += 1
            return self._came_without > 1
        leaves = [leaf for weak in recording.accumulates_into if (leaf := weak()) is not None]
        return not leaves or any(leaf.grad is not None for leaf in leaves)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        watcher, inside, meter = self._open.pop()
        inside.__exit__(kind, error, trace)
        if meter is not None:
            meter.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        if kind is None:
            if self.plan.optimizer is not None and self.plan.early:
                updater_of(self.plan.optimizer).arm(self.plan.early)
            watcher.finish(TOLERANCE * self.plan.budget_bytes)
            if watcher.first_difference is not None:
                self.answers = watcher.answers
            if meter is not None:
                self.first_difference = watcher.first_difference
            elif watcher.first_difference is not None and not self._has_measured_a_branch:
                # A step through another branch is over its budget or not: the next such step tells.
                self._measures_next = True
        elif meter is not None:
            meter.stop()
            self._meter = None

    def _has_state(self) -> bool:
        """Is there what the optimizer makes at its first step, where that is inside of the backward pass?"""
        return self.plan.optimizer is None or not self.plan.early or bool(self.plan.optimizer.state)

    def _measured(self, meter: StepMeter) -> None:
        plan = self.plan
        self._meter = None
        measured = plan.graph.pinned_bytes - self._uncounted_bytes + meter.peak_bytes
        if plan.measured_peak_bytes is None:
            plan.set_measured_peak(measured)
        self._has_measured_a_branch = self._has_measured_a_branch or self.first_difference is not None
        self._measures_next = False
        if not exceeds(plan, measured):
            return
        self.excess_bytes = measured - (plan.peak_bytes - self._uncounted_bytes)
        message = broken_budget(plan, measured, self.first_difference or meter.unpredicted)
        if self._plans_again:
            _log.info("%s. The next step is planned again.", message)
        else:
            tell(message, strict=self._strict)

    def _departed(self, where: str) -> None:
        self.departures += 1
        if self.departures == 1:
            _log.warning(
                "This step departs from the plan: %s. From there on it keeps what plain PyTorch keeps: its numbers are "
                "right, its memory is not limited. Plan again for other shapes or branches. This is said once.",
                where,
            )
