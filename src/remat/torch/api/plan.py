"""``plan``: a loss function and its arguments -> a plan that ``apply`` carries out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from remat.core.graph import Graph
from remat.core.plan import Plan, plan_for_schedule
from remat.core.simulator import simulate
from remat.fit.candidate import Candidate
from remat.fit.fit import fit
from remat.fit.peaks import PeakRange
from remat.fit.request import Request
from remat.planning.checkpoints import plan_with_checkpoints
from remat.running.cost_model import get_profile
from remat.torch.emit.eager_order import Directions, Units, directions_of, in_eager_order
from remat.torch.trace.fake_step import record_step
from remat.torch.trace.recording import Recording
from remat.torch.trace.trace import TracedStep, default_profile, gpu_of, traced_step

_RESERVE: Final = 0.02
"""The share of a peak that is left for scratch memory of kernels that ``trace.cpu_scratch`` does not know.

Measured: in the table of docs/torch.md a step needs up to 1.9 % more than was predicted (ResNet-50 at its smallest).
Too small, a step breaks its budget; too large, it recomputes more than it has to.
"""


@dataclass(frozen=True)
class StepPlan(Plan):
    """A plan for a step of PyTorch, with what ``apply`` needs to carry it out.

    Saved and loaded it is a plain ``Plan``; ``plan(loss_fn, *args, plan=loaded)`` makes this of it again.

    Attributes:
        step: the traced step.
        directions: what happens to each saved tensor.
    """

    step: TracedStep = field(kw_only=True, repr=False, compare=False)
    directions: Directions = field(kw_only=True, repr=False, compare=False)

    @property
    def graph(self) -> Graph:
        """The step that the plan is for: ``remat.simulate(plan.graph, plan.schedule)`` shows its memory over time."""
        return self.step.graph

    __str__ = Plan.__str__


def plan(
    loss_fn: Callable[..., Any],
    *args: Any,
    budget: int | str | None = None,
    plan: Plan | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    accumulates: bool = False,
    resident: Sequence[torch.Tensor] = (),
    resident_bytes: int = 0,
    planner: str = "auto",
    time_limit_s: float | None = None,
    device: str | None = None,
    **options: Any,
) -> StepPlan:
    """Plan a training step within a byte budget, without running it and without allocating anything.

    Args:
        loss_fn: called as ``loss_fn(*args)``, it returns the loss, a tensor of one element.
        *args: what the step is called with: tensors (their values do not matter, and they may be on the meta device, as
            the model may), anything else as it is.
        budget: peak device bytes of the step, everything that it touches counted (parameters, batch, gradients, what
            lies between, and the optimizer if given): an int, "4GiB", or "60%" of the plain step's own peak. "60%" is
            also the default.
        plan: a plan made earlier for the same step, loaded from a file say, instead of a budget.
        optimizer: its state counts as resident, and its update is part of the step. It is not changed.
        accumulates: do gradients exist already when the step starts, as they do for every micro-batch but the first?
        resident: tensors that count although neither the loss nor the optimizer touches them.
        resident_bytes: memory that counts likewise: what ``fully_shard`` keeps for its collectives, say.
        planner: a planner's name.
        time_limit_s: wall seconds for each round of planning; there are up to ten.
        device: profile for the predicted times: "cpu", "a100", "h100", "h200" or "measured"; None means that of the
            device of the tensors. If it is a GPU and the step is on the meta device, the plan is for that GPU's
            kernels, as in ``trace``.
        **options: passed on to the planner.

    Returns:
        The plan, for ``apply``. ``peak_bytes`` is what eager PyTorch will need under it.

    Raises:
        InvalidBudget: if the budget cannot be read.
        InfeasibleBudget: if no schedule fits; it names the smallest budget that this function can keep.
        UnsupportedStep: where the trace would need a tensor's values, or the loss cannot be differentiated.
        PlanMismatch: where ``plan`` is for another step.
        ValueError: for both a budget and a plan.
    """
    if not callable(loss_fn):
        raise TypeError(f"remat.torch.plan takes a loss function and its arguments, not {type(loss_fn).__name__}")
    request = Request(budget, plan, planner=planner, time_limit_s=time_limit_s, options=options)
    request = request.check("remat.torch.plan", takes_auto=False)
    if not request.plans:
        request = dataclasses.replace(request, budget="60%")
    named = None if device is None else get_profile(device)
    recording = record_step(
        loss_fn,
        args,
        optimizer,
        accumulates=accumulates,
        resident=resident,
        resident_bytes=resident_bytes,
        gpu=gpu_of(named, args, ("meta",)),
    )
    candidate = EagerCandidate(recording, device)
    return candidate.fitted(request) if plan is None else candidate.following(plan)


class EagerCandidate(Candidate):
    """A step as eager PyTorch runs it, forward and backward pass in its own order.

    Args:
        recording: what was seen of the step.
        device: profile for the predicted times, as ``plan`` takes it.

    Attributes:
        step: the trace.
    """

    def __init__(self, recording: Recording, device: str | None = None) -> None:
        self.step = traced_step(recording, get_profile(device or default_profile(recording.device)))
        self._units = Units(self.step)
        self._plain_peak = PeakRange.exactly(simulate(self.graph, self.graph.plain_schedule).peak_bytes)

    @property
    def graph(self) -> Graph:
        """The traced step."""
        return self.step.graph

    @property
    def plain_peak(self) -> PeakRange:
        """The trace knows it exactly."""
        return self._plain_peak

    def real_peak(self, plan: Plan) -> PeakRange:
        """The peak of the schedule in the order in which eager PyTorch runs it."""
        order = in_eager_order(self.step, plan.schedule, self._units)
        return PeakRange.with_reserve(simulate(self.graph, order.schedule).peak_bytes, _RESERVE)

    def first_guess(self, target_bytes: int) -> int:
        """The planner counts what eager PyTorch does, but for the reserve."""
        return int(target_bytes / (1 + _RESERVE))

    def fitted(self, request: Request) -> StepPlan:
        """The cheapest plan found whose peak stays within the budget of a request as eager PyTorch runs it.

        Raises:
            InvalidBudget: if the budget cannot be read.
            InfeasibleBudget: if no schedule fits; it names the smallest budget that can be kept.
        """
        return self.following(fit(self, request))

    def keeping(self, storages: Collection[int]) -> StepPlan:
        """The plan that keeps what these recorded storages hold, and recomputes all else where that is exact."""
        kept = [self.step.graph_tensors[number] for number in storages if number in self.step.graph_tensors]
        return self.following(plan_with_checkpoints(self.graph, kept, self.step.forward_ops - 1))

    def following(self, plan: Plan) -> StepPlan:
        """A plan of this step, in the order that eager PyTorch runs it in, with the figures of that order.

        Raises:
            PlanMismatch: where the plan is for another step.
        """
        plan.check_graph(self.graph)
        order = in_eager_order(self.step, plan.schedule, self._units)
        run = plan_for_schedule(self.graph, order.schedule, planner=plan.planner)
        figures = dataclasses.replace(
            run,
            baseline_peak_bytes=plan.baseline_peak_bytes,
            budget_bytes=plan.budget_bytes,
            traced_budget_bytes=plan.traced_budget_bytes,
            # Leaving out what nobody reads may make it cheaper than the planner's schedule, whose bound this is.
            overhead_lower_bound=min(plan.overhead_lower_bound, run.overhead),
            lower_bound_meaning=plan.lower_bound_meaning,
            plan_seconds=plan.plan_seconds,
            mode="eager",
        )
        values = {one.name: getattr(figures, one.name) for one in dataclasses.fields(Plan)}
        return StepPlan(**values, step=self.step, directions=directions_of(self.step, order, self._units))
