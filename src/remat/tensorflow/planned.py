"""Plans a function whose trace is about to end, and rewrites it: the way from a budget to a step that keeps it.

``GradientTape``, ``gradients`` and Keras' ``limit_memory`` all end here. The steps, in order: ``trace/func_graph.py``
makes a graph of the function, ``remat.fit`` finds a plan for it by what ``peak/candidates.py`` says that a schedule
really takes, and ``emit/emit.py`` writes the plan into the function.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Collection, Mapping
from functools import cached_property, partial

import tensorflow as tf

from remat.core.collecting import collecting_rarely
from remat.core.errors import UnsupportedStep
from remat.core.plan import Plan
from remat.fit.fit import fit
from remat.fit.levers import proved
from remat.fit.request import AUTO, Request
from remat.fit.variants import Variants
from remat.tensorflow._private import FuncGraph
from remat.tensorflow.api.checkpoints import chosen_plan
from remat.tensorflow.early_updates import EarlyUpdates
from remat.tensorflow.emit.emit import Rewritten, emit
from remat.tensorflow.loops.variants import Variant, variants_of
from remat.tensorflow.peak.candidates import CompiledFunction, ExecutedFunction, FunctionCandidate
from remat.tensorflow.peak.device import (
    appended_bytes,
    current_device,
    planning_for,
    profile_here,
    resident_elsewhere_bytes,
)
from remat.tensorflow.replicas import planned_for_all, plans_of_replicas
from remat.tensorflow.split.choose import SplittableFunction
from remat.tensorflow.trace.device_part import device_part, inputs_of_device
from remat.tensorflow.trace.func_graph import FunctionToPlan, TracedStep, trace_func_graph
from remat.tensorflow.trace.sizes import sizes_with_loops
from remat.transform.frugal_order import frugal_order

_log = logging.getLogger("remat")


@collecting_rarely()
def rewrite(function: FunctionToPlan, request: Request) -> Rewritten:
    """Plan the whole function as requested and rewrite it in place.

    Raises:
        InfeasibleBudget: where no schedule fits; nothing was rewritten.
        PlanMismatch: where ``request.plan`` is for another graph; nothing was rewritten.
        UnsupportedStep: where a shape is unknown, a checkpoint is no tensor of the step, or a function whose trace has
            not ended is to be cut.
    """
    replica = function.replica
    with contextlib.nullcontext() if replica is None else planning_for(replica.memory):
        plan, variant = _planned(function, request)
        step = variant.step
        rewritten = emit(plan, step, in_xla=function.in_xla)
        variant.give_bodies()  # Afterwards: emission makes each operation read what the trace says.
    _log.info("%s\n  copies         %d, control edges %d", plan, len(rewritten.copies), rewritten.control_edges)
    if variant.bodies:
        _log.info("  loops          %d keep less for their backward passes", len(variant.bodies))
    for note in step.graph.notes:
        _log.info("  assumed        %s", note)
    return rewritten


class PlannableFunction:
    """A function as it would run on this device, beside what lies there now; it stays as it is until it is written.

    Args:
        function: its trace is over, or about to end.
        levers: what a plan of it may do.

    Attributes:
        plain: the function in one piece, with its updates early where that is a lever.
        as_written: its trace, the operations in the order in which they were made.

    Raises:
        UnsupportedStep: where a shape is unknown.
    """

    def __init__(self, function: FunctionToPlan, levers: Collection[str] = ("recompute",)) -> None:
        self._updates = EarlyUpdates() if "update" in levers else None
        if self._updates is not None:
            function = dataclasses.replace(function, in_order=self._updates.moved)
        self._function = function
        self.as_written = _traced(function)
        self.plain = _candidate_of(function, _variants(function, self.as_written), _resident_bytes(function))

    def fitted(self, request: Request, *, proves: bool = True) -> Plan:
        """The cheapest plan within the budget of a request, in slices where its levers allow that.

        Args:
            request: with a budget.
            proves: is the plan's bound wanted?

        Raises:
            InfeasibleBudget: where no plan fits.
            UnsupportedStep: where the function is to be cut and cannot be.
        """
        request = with_bytes_for_auto(request)
        if "split" not in request.levers:
            return fit(self.plain, request, proves=proves)
        return self._splittable.fitted(request, proves=proves)

    def candidate_for(self, plan: Plan) -> FunctionCandidate:
        """The function as a plan has it: in slices, where the plan has them and the function can be cut so."""
        return self.plain if plan.split is None else self._splittable.candidate_for(plan)

    def written(self, plan: Plan) -> tuple[Plan, Variant]:
        """Write a plan's slices into the function; the plan with what was done to its updates, and how to write it.

        Raises:
            PlanMismatch: where the plan is for another function.
        """
        variant = self.candidate_for(plan).variant_of(plan)
        if self._updates is not None:
            plan = dataclasses.replace(plan, update=self._updates.described(variant.as_written))
        if plan.split is not None:
            variant = dataclasses.replace(variant, step=self._splittable.write(plan, variant.step))
        return plan, variant

    @cached_property
    def _splittable(self) -> SplittableFunction:
        function, plain = self._function, self.plain
        if not isinstance(function.func_graph, FuncGraph):
            raise UnsupportedStep(
                'a TensorFlow 1 graph cannot be cut into slices: leave "split" out of levers=, or put the step into a '
                "tf.function"
            )
        if function.outputs is not None:
            raise UnsupportedStep(
                "the tape's plan was asked for inside of the function, whose tensors are then in use already, so that "
                'it cannot be cut into slices: ask for it when the function has returned, or leave "split" out of '
                "levers="
            )

        def of_copy(copied: FunctionToPlan) -> FunctionCandidate:
            # What lies beside a copy is what lies beside the function; loops in a copy stay as they are.
            return _candidate_of(copied, _as_it_is(_traced(copied)), plain.resident_bytes)

        return SplittableFunction(function, plain, of_copy)


def with_bytes_for_auto(request: Request) -> Request:
    """The request with a number of bytes where its budget is "auto".

    Raises:
        InvalidBudget: on a CPU.
    """
    if request.budget != AUTO:
        return request
    return dataclasses.replace(request, budget=current_device().auto_budget_bytes())


def _planned(function: FunctionToPlan, request: Request) -> tuple[Plan, Variant]:
    """The plan, and the way to write the function that it is for."""
    given = request.plan if request.plan is not None else request.known
    levers = set(request.levers)
    if given is not None and given.update is not None:
        levers.add("update")
    plannable = PlannableFunction(function, levers)
    if function.device is not None and request.budget is not None and request.known is None:
        known = plans_of_replicas.known_for(function.func_graph, plannable.plain.graph)
        request = dataclasses.replace(request, known=known)
    if request.checkpoints is not None and request.plan is None:
        step = plannable.as_written
        executed = ExecutedFunction(_as_it_is(step), current_device().allocator, _resident_bytes(function))
        return chosen_plan(executed, request, function.forward_ends), Variant(step)
    if request.plan is not None:
        plan = request.plan
    elif request.known is not None and plannable.candidate_for(request.known).recognises(request.known):
        plan = proved(request.known, plannable.candidate_for(request.known), request)
    else:
        graph = plannable.plain.graph
        plan = planned_for_all(function.replica, graph, request, lambda: plannable.fitted(request))
    written = plannable.written(plan)
    if function.device is not None:
        plans_of_replicas.add(function.func_graph, written[0])
    return written


def _traced(function: FunctionToPlan, bodies: Mapping[tf.Operation, FuncGraph] | None = None) -> TracedStep:
    device = current_device()
    allocator = device.allocator
    if function.in_xla:
        allocator = dataclasses.replace(allocator, own_kernels="none", compiles_calls=False)  # XLA has its own kernels.
    step = trace_func_graph(
        function.func_graph,
        profile=profile_here(),
        input_shapes=function.input_shapes,
        allocator=allocator,
        outputs=function.outputs,
        carried=function.carried,
        bodies=bodies,
        moved=function.moved,
        is_final=function.in_order is not None,  # Nobody differentiates what updates its parameters.
    )
    if function.device is not None:
        step = device_part(step, function.device)
    return step if function.in_order is None else function.in_order(step)


def _candidate_of(function: FunctionToPlan, variants: Variants[Variant], resident_bytes: int) -> FunctionCandidate:
    """The function as it would run; XLA finds an order by itself."""
    allocator = current_device().allocator
    if function.in_xla:
        return CompiledFunction(function, variants[0].step, allocator, resident_bytes)
    return ExecutedFunction(_in_frugal_order(variants), allocator, resident_bytes)


def _as_it_is(step: TracedStep) -> Variants[Variant]:
    return Variants([lambda: Variant(step)])


def _in_frugal_order(variants: Variants[Variant]) -> Variants[Variant]:
    """Variants whose plans take less memory; the step as it was written is aside, for plans that have that order."""

    def ordered(place: int) -> Variant:
        variant: Variant = variants[place]
        step = variant.step
        return dataclasses.replace(variant, step=step.in_order(frugal_order(step.graph)), in_made_order=step)

    makers = [partial(ordered, place) for place in range(len(variants))]
    return Variants(makers, variants.suggested, aside=[lambda: variants[0]])


def _variants(function: FunctionToPlan, step: TracedStep) -> Variants[Variant]:
    if function.in_xla or not isinstance(function.func_graph, FuncGraph):
        return _as_it_is(step)
    sizes = sizes_with_loops(function.func_graph, function.input_shapes)
    return variants_of(step, sizes, profile_here(), partial(_traced, function))


def _resident_bytes(function: FunctionToPlan) -> int:
    graph = function.func_graph
    inputs = graph.inputs if function.device is None else inputs_of_device(graph, function.device)
    elsewhere_bytes = resident_elsewhere_bytes(graph, inputs, function.carried)
    if not function.carried:
        return elsewhere_bytes
    return elsewhere_bytes + function.iterations * appended_bytes(function.func_graph, function.input_shapes)
