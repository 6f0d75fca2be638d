"""``plan``: a loss function and its arguments -> a plan that ``apply`` carries out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn

from remat.core.budget import format_bytes
from remat.core.collecting import collecting_rarely
from remat.core.errors import InfeasibleBudget
from remat.core.graph import Graph
from remat.core.plan import Plan, Update, plan_for_schedule
from remat.core.simulator import simulate
from remat.fit.candidate import Candidate
from remat.fit.fit import fit
from remat.fit.peaks import PeakRange
from remat.fit.request import Request
from remat.planners.methods.peak_greedy import greedy_schedule
from remat.planning.checkpoints import plan_with_checkpoints
from remat.running.cost_model import get_profile
from remat.torch.early_updates import check_optimizer, hook_before_step, worth_moving
from remat.torch.emit.eager_order import Directions, EagerOrder, Units, directions_of, gathered_early, in_eager_order
from remat.torch.kept_results import KeptModules
from remat.torch.trace.fake_step import record_step
from remat.torch.trace.recording import Recording
from remat.torch.trace.trace import TracedStep, default_profile, gpu_of, traced_step

EAGER_LEVERS: Final = ("recompute", "update")
"""What an eager step can do. A region runs in slices in graph mode only, where its operators are written down."""

_RESERVE: Final = 0.02
"""The share of a peak that is left for scratch memory of kernels that ``trace.cpu_scratch`` does not know.

Measured: in the table of docs/torch_measured.md a step needs up to 1.9 % more than was predicted (ResNet-50 at its
smallest). Too small, a step breaks its budget; too large, it recomputes more than it has to.
"""

_CALL_BYTES: Final = 900
_RESULT_BYTES: Final = 350
_RERUN_BYTES: Final = 300
"""What autograd's node of a call of the forward pass takes, the header of a result that autograd saves, and what a plan
notes to run an op again.

Measured by the process' own heap, on chains of 400 to 3,200 calls on tensors of eight numbers: 1,240 bytes a call for
products and sines, 1,020 for products of matrices with views, 1,450 for normalisations with views, and 136 to 324 for
each op that runs again. A result that nobody saves takes its header with it: of an LSTM over 512 steps, 7,175 calls and
9,222 results, the heap holds 7.7 MB more than the tensors say. It is worth counting in steps of many small tensors. Too
small, these break their budgets by a few percent.
"""

_MANY_NOTES: Final = 0.02
_CAUTION: Final = 0.998
"""The share of a target from which on notes of all ops together, if each ran again, count in the first guess of a
budget, and how much less than a greedy plan says is guessed then. Judgements. An LSTM over 512 steps missed its target
by 2.5 % in its first round and was planned twice, in 25 s each; a greedy plan takes 1.5 s, and its notes are 5 % more
than those of the plan that is found."""

_IN_REACH: Final = 0.95
"""Of the smallest peak that a quick search names: what a thorough one may reach. A judgement; right above its smallest
peak a U-Net has a plan by the thorough one alone."""

_CALL_S: Final = 20e-6
_WATCHED_CALL_S: Final = 13e-6
_RERUN_S: Final = 27e-6
"""What Python and autograd take on a CPU: for each call of the forward pass, forward and backward together, beyond the
launches that a profile counts; what `apply` adds to each call; and what it adds to each operator that runs again.

Measured by ``benchmarks.torch_host`` on an AMD EPYC: 31, 13 and 32 us, of which launches are 5 for each operator.
On 18 plans of eight models of 55 to 290 ms a step, the sign and most of what predictions were off by is this: -15.2
points in the mean without it, -4.4 with it. On a GPU the host runs ahead of the kernels. Too small, steps of many small
operators are predicted too fast.
"""


@dataclass(frozen=True)
class StepPlan(Plan):
    """A plan for a step of PyTorch, with what ``apply`` needs to carry it out.

    Saved and loaded it is a plain ``Plan``; ``plan(loss_fn, *args, plan=loaded)`` makes this of it again.

    Attributes:
        step: the traced step.
        directions: what happens to each saved tensor.
        optimizer: the one whose updates the plan moves; None where it moves none.
        early: the parameters whose updates run inside of the backward pass.
    """

    step: TracedStep = field(kw_only=True, repr=False, compare=False)
    directions: Directions = field(kw_only=True, repr=False, compare=False)
    optimizer: torch.optim.Optimizer | None = field(default=None, kw_only=True, repr=False, compare=False)
    early: tuple[torch.Tensor, ...] = field(default=(), kw_only=True, repr=False, compare=False)

    @property
    def graph(self) -> Graph:
        """The step that the plan is for: ``remat.simulate(plan.graph, plan.schedule)`` shows its memory over time."""
        return self.step.graph

    __str__ = Plan.__str__

    def with_schedule(self, schedule: Sequence[int]) -> StepPlan:
        """The plan of the same step with another schedule, that of another process say."""
        other = plan_for_schedule(self.graph, tuple(schedule), planner=self.planner)
        other = dataclasses.replace(other, baseline_peak_bytes=self.baseline_peak_bytes, budget_bytes=self.budget_bytes)
        waits_for_host = self.baseline_expected_time_s is not None
        return EagerCandidate.of(self.step, waits_for_host=waits_for_host).following(other)


@collecting_rarely()
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
    levers: Sequence[str] = ("recompute",),
    checkpoints: Sequence[nn.Module] | None = None,
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
            Under ``fully_shard`` with ``set_requires_gradient_sync(False)`` whole ones do, whether this says so or not.
        resident: tensors that count although neither the loss nor the optimizer touches them.
        resident_bytes: memory that counts likewise.
        planner: a planner's name.
        time_limit_s: wall seconds for each round of planning; there are up to ten.
        device: profile for the predicted times: "cpu", "a100", "h100", "h200" or "measured"; None means that of the
            device of the tensors. If it is a GPU and the step is on the meta device, the plan is for that GPU's
            kernels, as in ``trace``.
        levers: what the plan may do. "recompute" runs operators again. "update", with ``optimizer=``, runs the update
            of each parameter inside of the backward pass, as soon as its gradient is there, and lets go of the
            gradient: the same numbers to the bit. ``optimizer.step()`` stays in the loop, and does what is left to do.
            The plan says what forbids it: a hook of the optimizer that sees all gradients, or ``accumulates``.
        checkpoints: in place of a budget, modules: what they return is kept, and all else is recomputed where that is
            exact.
        **options: passed on to the planner.

    Returns:
        The plan, for ``apply``. ``peak_bytes`` is what eager PyTorch will need under it.

    Raises:
        InvalidBudget: if the budget cannot be read.
        InfeasibleBudget: if no schedule fits; it names the smallest budget that this function can keep.
        UnsupportedStep: where the trace would need a tensor's values, or the loss cannot be differentiated; with the
            lever "update", for an optimizer that does not update each parameter by itself, and in several processes.
        PlanMismatch: where ``plan`` is for another step.
        ValueError: for more than one of budget, plan and checkpoints, for levers that are none or unknown here, and for
            "update" without an optimizer.
    """
    if not callable(loss_fn):
        raise TypeError(f"remat.torch.plan takes a loss function and its arguments, not {type(loss_fn).__name__}")
    kept = None if checkpoints is None else KeptModules(checkpoints)
    request = Request(budget, plan, kept, planner, time_limit_s, options, levers=tuple(levers))
    if "split" in request.levers:
        raise ValueError(
            "an eager step cannot run in slices: leave 'split' out of levers=, or use remat.torch.compile with "
            'backend="aten"'
        )
    request = request.check("remat.torch.plan", takes_auto=False, takes_levers=EAGER_LEVERS)
    if "update" in request.levers and optimizer is None:
        raise ValueError("the lever 'update' of remat.torch.plan runs updates of an optimizer: give optimizer=")
    if not request.plans:
        request = dataclasses.replace(request, budget="60%")
    named = None if device is None else get_profile(device)

    def candidate(early: Collection[torch.Tensor] = ()) -> EagerCandidate:
        recording = record_step(
            loss_fn if kept is None else kept.marking(loss_fn),
            args,
            optimizer,
            accumulates=accumulates,
            resident=resident,
            resident_bytes=resident_bytes,
            gpu=gpu_of(named, args, ("meta",)),
            early=early,
        )
        return EagerCandidate(recording, device)

    if kept is not None:
        if request.levers != ("recompute",):
            raise ValueError("checkpoints= names what is kept, so that no other lever than 'recompute' is chosen")
        plain = candidate()
        return plain.keeping(kept.storages_in(plain.step.recording))
    moves_updates = "update" in request.levers or (plan is not None and plan.update is not None)
    if optimizer is None or not moves_updates:
        plain = candidate()
        return plain.fitted(request) if plan is None else plain.following(plan)
    return WithEarlyUpdates(candidate, optimizer, accumulates=accumulates).planned(request)


def _quick(request: Request) -> Request | None:
    """The request for a search with little work; None where the user limits it, or names another planner.

    On 13 steps of 61 to 1,820 ops the smallest real peak of its plans was that of thorough ones nine times, up to 1.3 %
    smaller three times, and .13 % larger once, for what notes of 25 more reruns take. It takes .1 to .3 s of processor
    time for up to 400 ops, a thorough one 4 to 20.
    """
    if request.planner != "auto" or request.time_limit_s is not None or "thorough" in request.options:
        return None
    return dataclasses.replace(request, options={**request.options, "thorough": False})


class EagerCandidate(Candidate):
    """A step as eager PyTorch runs it, forward and backward pass in its own order.

    Args:
        recording: what was seen of the step.
        device: profile for the predicted times, as ``plan`` takes it.

    Attributes:
        step: the trace.
    """

    polishes = 2

    def __init__(self, recording: Recording, device: str | None = None) -> None:
        profile = get_profile(device or default_profile(recording.device))
        self._take(traced_step(recording, profile), waits_for_host=profile.is_cpu and recording.device == "cpu")

    @classmethod
    def of(cls, step: TracedStep, *, waits_for_host: bool) -> EagerCandidate:
        """The candidate of a step that is traced already; ``waits_for_host`` where its kernels are those of a CPU."""
        made = cls.__new__(cls)
        made._take(step, waits_for_host=waits_for_host)
        return made

    def _take(self, step: TracedStep, *, waits_for_host: bool) -> None:
        self.step = step
        self._waits_for_host = waits_for_host
        self._units = Units(step)
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
        peak_bytes = self._peak_bytes(order)
        reruns = len(order.schedule) - len(self.graph.ops)
        return PeakRange(peak_bytes, int(peak_bytes * (1 + _RESERVE)) + self._bookkeeping_bytes(reruns))

    def expected_time_s(self, plan: Plan | None) -> float | None:
        """On a CPU, seconds of the ops and of what calls them.

        Args:
            plan: whose run; None for the plain step's.
        """
        if not self._waits_for_host:
            return None
        calls = self.step.recording.forward_calls
        if plan is None:
            return self.graph.time_s + calls * _CALL_S
        return plan.time_s + calls * (_CALL_S + _WATCHED_CALL_S) + plan.recomputed * _RERUN_S

    def _peak_bytes(self, order: EagerOrder) -> int:
        """The peak of a schedule, parameters counted that a recomputation gathers before their time."""
        timeline = simulate(self.graph, order.schedule)
        early = gathered_early(self.step, order, self._units)
        if not early:
            return timeline.peak_bytes
        first = {op: place for place, op in reversed(list(enumerate(order.schedule)))}
        bytes_ = list(timeline.bytes)
        for needed, due, size_bytes in early:
            runs = sum(len(self._units.members[unit]) for unit in order.at[needed])
            for place in range(first[needed] - runs, first[due]):
                bytes_[place] += size_bytes
        return max(bytes_)

    def find(self, budget_bytes: int, request: Request) -> Plan:
        """The planner's plan, found with little work where that finds one: each round of the loop asks for it."""
        quick = _quick(request)
        if quick is None:
            return super().find(budget_bytes, request)
        try:
            return super().find(budget_bytes, quick)
        except InfeasibleBudget as error:
            if budget_bytes < _IN_REACH * error.minimum_bytes:
                raise
        return super().find(budget_bytes, request)

    def polished(self, plan: Plan, budget_bytes: int, request: Request) -> Plan | None:
        """A plan within a budget, found with all the work that there is."""
        if _quick(request) is None:
            return None
        try:
            return super().find(budget_bytes, request)
        except InfeasibleBudget:  # A budget below that of the plan, to make up for what its order takes.
            return None

    def first_guess(self, target_bytes: int) -> int:
        """The planner counts what eager PyTorch does, but for the reserve and the bookkeeping.

        Where notes of what runs again may take much of the target, a greedy plan, made in a second, tells how far the
        first guess of all is off.
        """
        guess_bytes = int((target_bytes - self._bookkeeping_bytes(0)) / (1 + _RESERVE))
        notes_bytes = self._bookkeeping_bytes(len(self.graph.ops)) - self._bookkeeping_bytes(0)
        if notes_bytes <= _MANY_NOTES * target_bytes or guess_bytes <= self.graph.pinned_bytes:
            return guess_bytes
        schedule = greedy_schedule(self.graph, guess_bytes)
        if schedule is None or schedule == self.graph.plain_schedule:
            return guess_bytes
        found = plan_for_schedule(self.graph, schedule, planner="peak_greedy", budget_bytes=guess_bytes)
        return int(_CAUTION * (guess_bytes + target_bytes - self.real_peak(found).highest_bytes))

    def _bookkeeping_bytes(self, reruns: int) -> int:
        """What autograd and recipes take beside the tensors, where that is on the device of the budget."""
        recording = self.step.recording
        if recording.device != "cpu":
            return 0
        saved = sum(one.storage is not None for one in recording.saved)
        results = min(recording.forward_results, saved)
        return _CALL_BYTES * recording.forward_calls + _RESULT_BYTES * results + _RERUN_BYTES * reruns

    def fitted(self, request: Request, share_of_bytes: int | None = None) -> StepPlan:
        """The cheapest plan found whose peak stays within the budget of a request as eager PyTorch runs it.

        Args:
            request: with a budget.
            share_of_bytes: as in ``remat.fit.fit.fit``.

        Raises:
            InvalidBudget: if the budget cannot be read.
            InfeasibleBudget: if no schedule fits; it names the smallest budget that can be kept.
        """
        try:
            return self.following(fit(self, request, share_of_bytes=share_of_bytes))
        except InfeasibleBudget as error:
            raise self._with_cause(error) from error

    def _with_cause(self, error: InfeasibleBudget) -> InfeasibleBudget:
        """The error, with what whole gradients have to do with it."""
        recording = self.step.recording
        if recording.accumulation is None or not recording.accumulation.finds_whole:
            return error
        whole_bytes = sum(recording.storages[number].size_bytes for number in recording.ops[0].makes)
        return error.saying(
            f"{error}. {format_bytes(whole_bytes)} are gradients that earlier micro-batches leave whole on each rank; "
            "reduced in each step (set_requires_gradient_sync(True), or sync_each_batch=True of Accelerate's "
            "GradientAccumulationPlugin) they take as little as the shards"
        )

    def keeping(self, storages: Collection[int]) -> StepPlan:
        """The plan that keeps what these recorded storages hold, and recomputes all else where that is exact."""
        kept = [self.step.graph_tensors[number] for number in storages if number in self.step.graph_tensors]
        return self.following(plan_with_checkpoints(self.graph, kept, self.step.forward_ops - 1))

    def following(self, plan: Plan) -> StepPlan:
        """A plan of this step, in the order that eager PyTorch runs it in, with the figures of that order.

        Raises:
            PlanMismatch: where the plan is for another step.
        """
        plan.check_graph(self.graph, "eager")
        order = in_eager_order(self.step, plan.schedule, self._units)
        run = plan_for_schedule(self.graph, order.schedule, planner=plan.planner)
        figures = dataclasses.replace(
            run,
            peak_bytes=self._peak_bytes(order),
            baseline_peak_bytes=plan.baseline_peak_bytes,
            budget_bytes=plan.budget_bytes,
            traced_budget_bytes=plan.traced_budget_bytes,
            # Leaving out what nobody reads may make it cheaper than the planner's schedule, whose bound this is.
            overhead_lower_bound=min(plan.overhead_lower_bound, run.overhead),
            lower_bound_meaning=plan.lower_bound_meaning,
            plan_seconds=plan.plan_seconds,
            mode="eager",
            expected_time_s=self.expected_time_s(run),
            baseline_expected_time_s=self.expected_time_s(None),
        )
        values = {one.name: getattr(figures, one.name) for one in dataclasses.fields(Plan)}
        return StepPlan(**values, step=self.step, directions=directions_of(self.step, order, self._units))


class WithEarlyUpdates:
    """A step whose optimizer updates parameters inside of the backward pass, where that is of use.

    Args:
        candidate: the step, given the parameters that are updated early.
        optimizer: its optimizer.
        accumulates: do gradients of earlier micro-batches exist?

    Raises:
        UnsupportedStep: for an optimizer that does not update each parameter by itself, and in several processes.
    """

    def __init__(
        self,
        candidate: Callable[[Collection[torch.Tensor]], EagerCandidate],
        optimizer: torch.optim.Optimizer,
        *,
        accumulates: bool,
    ) -> None:
        check_optimizer(optimizer)
        self._candidate = candidate
        self._optimizer = optimizer
        self._bound_by = "the gradients of earlier micro-batches" if accumulates else hook_before_step(optimizer)

    def planned(self, request: Request) -> StepPlan:
        """The plan that a request asks for, with updates moved where that lowers the peak of the plain step.

        Raises:
            InfeasibleBudget: if no plan fits.
            PlanMismatch: where the request's plan is for another step.
        """
        plain = self._candidate(())
        given = request.plan
        if given is not None and (given.update is None or not given.update.moved):
            return dataclasses.replace(plain.following(given), update=given.update)
        plain_bytes = plain.plain_peak.expected_bytes
        early, moved = ((), None) if self._bound_by else self._moved()
        if given is not None:
            found, update = (moved or plain).following(given), given.update
        elif moved is None or (saved_bytes := plain_bytes - moved.plain_peak.expected_bytes) < 0:
            waiting_bytes = _gradient_bytes(self._optimizer) if self._bound_by else 0
            early, found, update = (), plain.fitted(request), Update(0, 0, self._bound_by, waiting_bytes)
        else:
            ops = sum(len(ops) for _, ops in moved.step.recording.updated.values())
            found, update = moved.fitted(request, plain_bytes), Update(ops, saved_bytes, "", 0)
        return dataclasses.replace(found, update=update, optimizer=self._optimizer, early=early)

    def _moved(self) -> tuple[tuple[torch.Tensor, ...], EagerCandidate | None]:
        """The parameters that can be updated early, and the step in which they are."""
        early = tuple(worth_moving(one for group in self._optimizer.param_groups for one in group["params"]))
        while early:
            moved = self._candidate(early)
            late = moved.step.recording.read_after_update()
            if not late:
                updated = moved.step.recording.updated
                return tuple(parameter for parameter in early if id(parameter) in updated), moved
            early = tuple(parameter for parameter in early if id(parameter) not in late)
        return (), None


def _gradient_bytes(optimizer: torch.optim.Optimizer) -> int:
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return sum(one.numel() * one.element_size() for one in parameters if one.requires_grad)
