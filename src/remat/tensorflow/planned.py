"""Plans a function whose trace is about to end, and rewrites it: the way from a budget to a step that keeps it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from remat.core.budget import parse_budget
from remat.core.errors import InfeasibleBudget, UnsupportedStep
from remat.core.graph import Graph
from remat.core.plan import Plan
from remat.core.plan import plan as make_plan
from remat.core.simulator import simulate
from remat.fit.loop import infeasible, plan_within
from remat.planning.checkpoints import plan_with_checkpoints
from remat.running.cost_model import device_here, get_profile
from remat.tensorflow import _private
from remat.tensorflow.api.checkpoints import with_device_figures
from remat.tensorflow.emit.write import Emitted, emit
from remat.tensorflow.peak.allocator import AllocatorModel, PeakRange
from remat.tensorflow.peak.compiled import Program
from remat.tensorflow.peak.device import current_device
from remat.tensorflow.peak.resident import resident_elsewhere_bytes
from remat.tensorflow.trace.func_graph import TracedStep, trace_func_graph

_log = logging.getLogger("remat")

# What the models of the allocator and the compiler do not see: light ops that float, holes that no simulated heap had.
_UNSEEN_FRACTION = 0.04
# Resident memory is counted in chunks, too, and differs between two traces of the same function.
_RESIDENT_VARIES = 0.02
_ROUNDS = (6, 4)  # At first, and near the smallest peak where none of the first fits.

# For one round of several; the methods that bring most per second come first, and more time brought little.
_SECONDS_PER_OP = 4e-4
_LEAST_S = 1.0
_MOST_S = 4.0
_COMPILED_ROUNDS = (4, 2)  # Likewise; each compiles once.


@dataclass(frozen=True)
class Request:
    """What a user asked for.

    Attributes:
        budget: peak device bytes, as ``remat.plan`` takes it, or "auto" for a GPU's memory less a margin.
        plan: a plan to follow instead of a budget.
        planner: a planner's name.
        time_limit_s: wall seconds that an anytime planner may use.
        options: passed on to the planner.
        checkpoints: tensors to keep instead of a budget.
        known: a plan made for the budget already, used where the function turns out to be the one that it is for.
    """

    budget: int | str | None = None
    plan: Plan | None = None
    planner: str = "auto"
    time_limit_s: float | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    checkpoints: Sequence[tf.Tensor] | None = None
    known: Plan | None = None


@dataclass(frozen=True)
class Rewritten:
    """A function that has been rewritten, its plan and what was written into it."""

    plan: Plan
    step: TracedStep
    emitted: Emitted


def rewrite(
    func_graph: _private.FuncGraph,
    request: Request,
    *,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    resident_bytes: int = 0,
    in_xla: bool = False,
    outputs: Sequence[tf.Tensor] | None = None,
    forward_ends: int | None = None,
    carried: Collection[str] = (),
) -> Rewritten:
    """Plan the whole function within the budget and rewrite it in place.

    Args:
        func_graph: the function, its outputs known.
        request: the budget or the plan.
        input_shapes: real shapes of inputs traced with unknown dimensions, by tensor name.
        resident_bytes: device memory in use that the function does not know of.
        in_xla: is the function compiled with XLA?
        outputs: the function's outputs where its trace has not ended yet; every operation then counts as needed.
        forward_ends: how many operations the function had when its gradients were asked for; for checkpoints.
        carried: for a loop's body, names of the inputs that one iteration hands to the next.

    Raises:
        InfeasibleBudget: where no schedule fits; nothing was rewritten.
        PlanMismatch: where ``request.plan`` is for another graph; nothing was rewritten.
        UnsupportedStep: where a shape is unknown.
    """
    device = current_device()
    step = _traced(func_graph, input_shapes, outputs, carried)
    if request.plan is not None:
        plan = request.plan
        plan.check_graph(step.graph)
    elif request.checkpoints is not None:
        plan = _plan_for_checkpoints(step, request.checkpoints, forward_ends, device.allocator, resident_bytes)
    elif request.known is not None and request.known.fingerprint == step.graph.fingerprint:
        plan = request.known
    else:
        candidate = Candidate(func_graph, step, input_shapes or {}, resident_bytes, in_xla, carried)
        budget = device.auto_budget_bytes() if request.budget == "auto" else request.budget
        assert budget is not None
        plan = candidate.plan(budget, request)
    emitted = emit(plan, step, in_xla=in_xla)
    _log.info("%s\n  copies         %d, control edges %d", plan, len(emitted.copies), emitted.control_edges)
    return Rewritten(plan, step, emitted)


class Candidate:
    """A function as it would run on this device: its plain peak and its plans, before anything is rewritten.

    Args:
        func_graph: the function; it stays as it is.
        step: its trace.
        input_shapes: real shapes of inputs traced with unknown dimensions, by tensor name.
        resident_bytes: device memory in use that the function does not know of.
        in_xla: is the function compiled with XLA?
        carried: for a loop's body, names of the inputs that one iteration hands to the next.
    """

    def __init__(
        self,
        func_graph: _private.FuncGraph,
        step: TracedStep,
        input_shapes: Mapping[str, Sequence[int]],
        resident_bytes: int,
        in_xla: bool,
        carried: Collection[str] = (),
    ) -> None:
        self.step = step
        self._resident_bytes = resident_bytes
        self._allocator = current_device().allocator
        self._program = Program(func_graph, step, input_shapes, self._allocator, carried) if in_xla else None

    @classmethod
    def of(
        cls,
        func_graph: _private.FuncGraph,
        input_shapes: Mapping[str, Sequence[int]],
        in_xla: bool,
        carried: Collection[str] = (),
    ) -> Candidate:
        """The function with what lies on the device now besides."""
        step = _traced(func_graph, input_shapes, None, carried)
        resident_bytes = resident_elsewhere_bytes(func_graph, input_shapes, carried)
        return cls(func_graph, step, input_shapes, resident_bytes, in_xla, carried)

    @property
    def plain_peak(self) -> PeakRange:
        """The peak of the function as it is, what is resident besides counted."""
        graph = self.step.graph
        peak = (
            self._program.peak_range(None)
            if self._program is not None
            else self._allocator.peak_range(graph, graph.plain_schedule)
        )
        return PeakRange(peak.expected_bytes + self._resident_bytes, peak.highest_bytes + self._resident_bytes)

    def fits_plainly(self, budget_bytes: int) -> bool:
        """Does the function keep the budget as it is, as a plan would have to?"""
        return self.plain_peak.highest_bytes - self._resident_bytes <= _target_bytes(budget_bytes, self._resident_bytes)

    def plan(self, budget: int | str, request: Request) -> Plan:
        """The plan within a budget.

        Raises:
            InfeasibleBudget: with the smallest budget for which this succeeds.
        """
        if self._program is not None:
            return plan_for_program(self.step, budget, self._program, request, self._resident_bytes)
        return plan_for_allocator(self.step.graph, budget, self._allocator, request, self._resident_bytes)


def _traced(
    func_graph: _private.FuncGraph,
    input_shapes: Mapping[str, Sequence[int]] | None,
    outputs: Sequence[tf.Tensor] | None,
    carried: Collection[str],
) -> TracedStep:
    device = current_device()
    return trace_func_graph(
        func_graph,
        profile=get_profile(device_here("a100" if device.is_gpu else "cpu")),
        input_shapes=input_shapes,
        allocator=device.allocator,
        outputs=outputs,
        carried=carried,
    )


def _target_bytes(budget_bytes: int, resident_bytes: int) -> int:
    """What a function's own highest peak may be."""
    return int(budget_bytes / (1 + _UNSEEN_FRACTION)) - resident_bytes


def _plan_for_checkpoints(
    step: TracedStep,
    checkpoints: Sequence[tf.Tensor],
    forward_ends: int | None,
    allocator: AllocatorModel,
    resident_bytes: int,
) -> Plan:
    numbers = {t.name: number for number, t in enumerate(step.tensors)}
    unknown = [t.name for t in checkpoints if t.name not in numbers]
    if unknown:
        raise UnsupportedStep(
            f"the checkpoint {unknown[0]!r} is no tensor that the function's outputs need; give tensors that were made "
            "inside the tape, on the way to the loss"
        )
    operations = step.operations[0].graph.get_operations()[:forward_ends]
    forward = set(operations)
    turning_point = max((n for n, op in enumerate(step.operations) if op in forward), default=None)
    plan = plan_with_checkpoints(step.graph, [numbers[t.name] for t in checkpoints], turning_point)
    return with_device_figures(plan, step, allocator, resident_bytes)


def plan_for_allocator(
    graph: Graph, budget: int | str, allocator: AllocatorModel, request: Request, resident_bytes: int = 0
) -> Plan:
    """A plan whose peak stays within the budget as the device's own counter will show it.

    What lies on the device besides (``resident_bytes``) counts against the budget, but is no part of the graph: the
    plan fits the same function on another day.

    Raises:
        InfeasibleBudget: with the smallest budget for which this function succeeds.
    """
    baseline = allocator.peak_range(graph, graph.plain_schedule)
    # The plain step's rounding is a good first guess of the plan's.
    counted_bytes = simulate(graph, graph.plain_schedule).peak_bytes
    return _plan_for_device(
        graph,
        budget,
        baseline,
        min(1.0, counted_bytes / max(1, baseline.highest_bytes)),
        lambda plan: allocator.peak_range(graph, plan.schedule),
        request,
        resident_bytes,
        rounds=_ROUNDS,
    )


def plan_for_program(
    step: TracedStep, budget: int | str, program: Program, request: Request, resident_bytes: int = 0
) -> Plan:
    """A plan whose compiled program stays within the budget; each round compiles once.

    Raises:
        InfeasibleBudget: with the smallest budget for which this function succeeds.
    """
    graph = step.graph
    baseline = program.peak_range(None)
    counted_bytes = simulate(graph, graph.plain_schedule).peak_bytes
    return _plan_for_device(
        graph,
        budget,
        baseline,
        counted_bytes / max(1, baseline.highest_bytes),
        program.peak_range,
        request,
        resident_bytes,
        rounds=_COMPILED_ROUNDS,
    )


def _plan_for_device(
    graph: Graph,
    budget: int | str,
    baseline: PeakRange,
    first_ratio: float,
    real_peak: Callable[[Plan], PeakRange],
    request: Request,
    resident_bytes: int,
    *,
    rounds: tuple[int, int],
) -> Plan:
    # A step of small blocks alone shows nothing on a CPU's counter; it keeps any budget.
    budget_bytes = parse_budget(budget, max(1, baseline.expected_bytes + resident_bytes))
    target_bytes = _target_bytes(budget_bytes, resident_bytes)

    time_limit_s = request.time_limit_s or max(_LEAST_S, min(_MOST_S, _SECONDS_PER_OP * len(graph.ops)))

    def plan_with(planner_budget: int) -> Plan:
        return make_plan(graph, planner_budget, planner=request.planner, time_limit_s=time_limit_s, **request.options)

    if baseline.highest_bytes <= target_bytes or not baseline.highest_bytes:
        found = dataclasses.replace(
            plan_with(max(1, simulate(graph, graph.plain_schedule).peak_bytes)), peak_bytes=baseline.expected_bytes
        )
    else:
        try:
            found = plan_within(
                target_bytes,
                int(target_bytes * first_ratio),
                plan_with,
                real_peak,
                rounds=rounds[0],
                last_rounds=rounds[1],
            )
        except InfeasibleBudget as error:
            minimum = int((error.minimum_bytes + resident_bytes) * (1 + _UNSEEN_FRACTION + _RESIDENT_VARIES)) + 2
            raise infeasible(budget_bytes, minimum, error.binding_op) from None
    return dataclasses.replace(
        found,
        peak_bytes=found.peak_bytes + resident_bytes,
        baseline_peak_bytes=baseline.expected_bytes + resident_bytes,
        budget_bytes=budget_bytes,
    )
