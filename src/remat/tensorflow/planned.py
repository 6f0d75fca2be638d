"""Plans a function whose trace is about to end, and rewrites it: the way from a budget to a step that keeps it.

``GradientTape``, ``gradients`` and Keras' ``limit_memory`` all end here. The steps, in order: ``trace/func_graph.py``
makes a graph of the function, ``remat.fit`` finds a plan for it by what ``peak/candidates.py`` says that a schedule
really takes, and ``emit/emit.py`` writes the plan into the function.
"""

from __future__ import annotations

import dataclasses
import logging

from remat.core.plan import Plan
from remat.fit.fit import fit
from remat.fit.request import AUTO, Request
from remat.running.cost_model import device_here, get_profile
from remat.tensorflow.api.checkpoints import chosen_plan
from remat.tensorflow.emit.emit import Rewritten, emit
from remat.tensorflow.peak.candidates import CompiledFunction, ExecutedFunction, FunctionCandidate
from remat.tensorflow.peak.device import appended_bytes, current_device, resident_elsewhere_bytes
from remat.tensorflow.trace.func_graph import FunctionToPlan, TracedStep, trace_func_graph

_log = logging.getLogger("remat")


def rewrite(function: FunctionToPlan, request: Request) -> Rewritten:
    """Plan the whole function as requested and rewrite it in place.

    Raises:
        InfeasibleBudget: where no schedule fits; nothing was rewritten.
        PlanMismatch: where ``request.plan`` is for another graph; nothing was rewritten.
        UnsupportedStep: where a shape is unknown, or a checkpoint is no tensor of the step.
    """
    step = _traced(function)
    plan = _plan_of(function, step, request)
    rewritten = emit(plan, step, in_xla=function.in_xla)
    _log.info("%s\n  copies         %d, control edges %d", plan, len(rewritten.copies), rewritten.control_edges)
    return rewritten


def candidate_of(function: FunctionToPlan) -> FunctionCandidate:
    """The function as it would run on this device, beside what lies there now; it stays as it is."""
    return _candidate(function, _traced(function))


def with_bytes_for_auto(request: Request) -> Request:
    """The request with a number of bytes where its budget is "auto".

    Raises:
        InvalidBudget: on a CPU.
    """
    if request.budget != AUTO:
        return request
    return dataclasses.replace(request, budget=current_device().auto_budget_bytes())


def _plan_of(function: FunctionToPlan, step: TracedStep, request: Request) -> Plan:
    if request.plan is not None:
        request.plan.check_graph(step.graph)
        return request.plan
    if request.checkpoints is not None:
        return chosen_plan(_executed(function, step), request, function.forward_ends)
    candidate = _candidate(function, step)
    if request.known is not None and request.known.fingerprint == step.graph.fingerprint:
        return candidate.prove(request.known, request)
    return fit(candidate, with_bytes_for_auto(request))


def _traced(function: FunctionToPlan) -> TracedStep:
    device = current_device()
    allocator = device.allocator
    if function.in_xla:
        allocator = dataclasses.replace(allocator, own_kernels="none")  # XLA brings kernels of its own.
    return trace_func_graph(
        function.func_graph,
        profile=get_profile(device_here("a100" if device.is_gpu else "cpu")),
        input_shapes=function.input_shapes,
        allocator=allocator,
        outputs=function.outputs,
        carried=function.carried,
    )


def _candidate(function: FunctionToPlan, step: TracedStep) -> FunctionCandidate:
    if function.in_xla:
        return CompiledFunction(function, step, current_device().allocator, _resident_bytes(function))
    return _executed(function, step)


def _executed(function: FunctionToPlan, step: TracedStep) -> ExecutedFunction:
    return ExecutedFunction(step, current_device().allocator, _resident_bytes(function))


def _resident_bytes(function: FunctionToPlan) -> int:
    elsewhere_bytes = resident_elsewhere_bytes(function.func_graph, function.input_shapes, function.carried)
    if not function.carried:
        return elsewhere_bytes
    return elsewhere_bytes + function.iterations * appended_bytes(function.func_graph, function.input_shapes)
