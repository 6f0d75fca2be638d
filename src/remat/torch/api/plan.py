"""``plan``: a loss function and its arguments -> a plan that ``apply`` carries out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from remat.core.budget import parse_budget
from remat.core.errors import InfeasibleBudget
from remat.core.graph import Graph
from remat.core.plan import Plan, plan_for_schedule
from remat.core.plan import plan as plan_graph
from remat.core.schedule import Schedule
from remat.core.simulator import simulate
from remat.fit.loop import PeakWithReserve, infeasible, plan_within
from remat.planning.checkpoints import plan_with_checkpoints
from remat.running.cost_model import get_profile
from remat.torch.emit.eager_order import Directions, Units, directions_of, in_eager_order
from remat.torch.trace.record import Update, record_step
from remat.torch.trace.step import TracedStep, default_profile, traced_step

_ROUNDS = 6
_RESERVE = 0.02
_LAST_ROUNDS = 4


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
        time_limit_s: wall seconds for each round of planning; there are up to six.
        device: profile for the predicted times: "cpu", "a100", "h100", "h200" or "measured"; None means that of the
            device of the tensors.
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
    if budget is not None and plan is not None:
        raise ValueError(f"plan takes a budget or a plan, not both (budget={budget!r}); leave one out")
    if budget is None and plan is None:
        budget = "60%"
    if budget is not None:
        parse_budget(budget, baseline_peak_bytes=1 << 60)
    candidate = Candidate(
        loss_fn,
        args,
        optimizer=optimizer,
        accumulates=accumulates,
        resident=resident,
        resident_bytes=resident_bytes,
        device=device,
    )
    if plan is not None:
        return candidate.following(plan)
    assert budget is not None
    return candidate.plan(budget, planner=planner, time_limit_s=time_limit_s, **options)


class Candidate:
    """A step as it would run: its trace, its plain peak, and its plans.

    The arguments are those of ``plan``, and instead of an optimizer an ``update``, see ``record_step``.

    Attributes:
        step: the trace.
        plain_peak_bytes: of the step with nothing recomputed.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        args: Sequence[Any],
        *,
        optimizer: torch.optim.Optimizer | None = None,
        update: Update | None = None,
        accumulates: bool = False,
        resident: Sequence[torch.Tensor] = (),
        resident_bytes: int = 0,
        device: str | None = None,
    ) -> None:
        recording = record_step(
            loss_fn,
            args,
            optimizer,
            update=update,
            accumulates=accumulates,
            resident=resident,
            resident_bytes=resident_bytes,
        )
        self.step = traced_step(recording, get_profile(device or default_profile(recording.device)))
        graph = self.step.graph
        self.plain_peak_bytes = simulate(graph, graph.plain_schedule).peak_bytes
        self._units = Units(self.step)

    def plan(
        self, budget: int | str, *, planner: str = "auto", time_limit_s: float | None = None, **options: Any
    ) -> StepPlan:
        """The cheapest plan found whose peak stays within the budget as eager PyTorch runs it.

        Raises:
            InvalidBudget: if the budget cannot be read.
            InfeasibleBudget: if no schedule fits; it names the smallest budget that this function can keep.
        """
        graph = self.step.graph
        budget_bytes = parse_budget(budget, self.plain_peak_bytes)

        def make_plan(planner_budget: int) -> Plan:
            return plan_graph(graph, planner_budget, planner=planner, time_limit_s=time_limit_s, **options)

        def real_peak(found: Plan) -> PeakWithReserve:
            order = in_eager_order(self.step, found.schedule, self._units)
            return PeakWithReserve(simulate(graph, order.schedule).peak_bytes, _RESERVE)

        if self.plain_peak_bytes <= budget_bytes:
            return self.following(make_plan(budget_bytes))
        first_guess = int(budget_bytes / (1 + _RESERVE))
        try:
            found = plan_within(
                budget_bytes, first_guess, make_plan, real_peak, rounds=_ROUNDS, last_rounds=_LAST_ROUNDS
            )
        except InfeasibleBudget as error:
            raise infeasible(budget_bytes, error.minimum_bytes, error.binding_op) from None
        return self.following(dataclasses.replace(found, budget_bytes=budget_bytes))

    def keeping(self, storages: Collection[int]) -> StepPlan:
        """The plan that keeps what these recorded storages hold, and recomputes all else where that is exact."""
        kept = [self.step.tensor[number] for number in storages if number in self.step.tensor]
        return self.following(plan_with_checkpoints(self.step.graph, kept, self.step.forward_ops - 1))

    def following(self, found: Plan) -> StepPlan:
        """A plan of this step, in the order that eager PyTorch runs it in.

        Raises:
            PlanMismatch: where the plan is for another step.
        """
        found.check_graph(self.step.graph)
        order = in_eager_order(self.step, found.schedule, self._units)
        eager = _figures_of(found, self.step.graph, order.schedule)
        values = {one.name: getattr(eager, one.name) for one in dataclasses.fields(Plan)}
        return StepPlan(**values, step=self.step, directions=directions_of(self.step, order, self._units))


def _figures_of(found: Plan, graph: Graph, schedule: Schedule) -> Plan:
    """The plan with the schedule that is run, and the figures that follow from it."""
    run = plan_for_schedule(graph, schedule, planner=found.planner)
    bound = min(found.overhead_lower_bound, run.overhead)
    return dataclasses.replace(
        run,
        budget_bytes=found.budget_bytes,
        overhead_lower_bound=bound,
        lower_bound_meaning=found.lower_bound_meaning,
        plan_seconds=found.plan_seconds,
    )
