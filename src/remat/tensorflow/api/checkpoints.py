"""Ways to choose what is kept: the user's tensors, a rule, or the planner at the knee of its frontier."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

import tensorflow as tf

from remat.core.errors import UnsupportedStep
from remat.core.plan import Plan
from remat.fit.request import Request
from remat.planning.checkpoints import knee_plan, plan_with_checkpoints, plan_with_cuts
from remat.tensorflow.peak.candidates import ExecutedFunction
from remat.tensorflow.trace.func_graph import TracedStep

RULES: Final = ("memory", "speed", "collection")
COLLECTION: Final = "checkpoints"
KNEE: Final = "knee"
"""As checkpoints of a request: the planner chooses, at the knee between memory and time."""

Checkpoints = Sequence[tf.Tensor] | str | None

# The rule "speed" keeps what these make: products of matrices and convolutions, which take most of a step's time.
_SLOW: Final = ("BatchMatMul", "Conv", "DepthwiseConv", "Einsum", "FusedConv", "MatMul", "SparseTensorDenseMatMul")

_SECONDS_PER_POINT: Final = 1.0
"""For each of about seven points of the frontier. A judgement: less makes plans dearer, more lets the user wait."""


def checked_levers(levers: Sequence[str], checkpoints: Checkpoints) -> tuple[str, ...]:
    """The levers as a tuple, or as they are where they are none, for ``Request.check`` to refuse.

    Raises:
        ValueError: for slices beside checkpoints.
    """
    if "split" in levers and checkpoints is not None:
        raise ValueError('checkpoints= says what is kept, and slices keep nothing: leave it out, or "split" in levers=')
    return levers if isinstance(levers, str) else tuple(levers)  # type: ignore[return-value]


def check_rule(checkpoints: Checkpoints) -> None:
    """Make sure that checkpoints which are a string name a rule.

    Raises:
        ValueError: for an unknown rule.
    """
    if isinstance(checkpoints, str) and checkpoints not in RULES:
        raise ValueError(
            f"checkpoints={checkpoints!r} is no rule; give one of {', '.join(RULES)}, a list of tensors, or a budget"
        )


def chosen_plan(candidate: ExecutedFunction, request: Request, forward_ends: int | None) -> Plan:
    """The plan for a choice of checkpoints, with its peaks as the device's own counter will show them.

    Under XLA these are still the peaks of the operations run one by one: no budget depends on them, and to know those
    of the program would take two compilations.

    Args:
        candidate: the step.
        request: its checkpoints are tensors to keep, a rule's name, or ``KNEE``.
        forward_ends: how many operations the function had when its gradients were asked for.

    Raises:
        UnsupportedStep: where a checkpoint is no tensor of the step.
        ValueError: for an empty collection.
    """
    plan = _plan_of_tensors(candidate.step, request, forward_ends)
    peak, plain, resident_bytes = candidate.real_peak(plan), candidate.plain_peak, candidate.resident_bytes
    return dataclasses.replace(
        plan,
        peak_bytes=peak.expected_bytes + resident_bytes,
        budget_bytes=peak.highest_bytes + resident_bytes,
        baseline_peak_bytes=plain.expected_bytes + resident_bytes,
    )


def _plan_of_tensors(step: TracedStep, request: Request, forward_ends: int | None) -> Plan:
    """The plan with figures that count the tensors only."""
    checkpoints = request.checkpoints
    if isinstance(checkpoints, str) and checkpoints == KNEE:
        time_limit_s = _SECONDS_PER_POINT if request.time_limit_s is None else request.time_limit_s
        return knee_plan(step.graph, request.planner, time_limit_s, **request.options)
    if isinstance(checkpoints, str) and checkpoints == "memory":
        return plan_with_cuts(step.graph)
    forward = frozenset(step.operations[0].graph.get_operations()[:forward_ends])
    turning_point = max((n for n, op in enumerate(step.operations) if op in forward), default=None)
    return plan_with_checkpoints(step.graph, _kept(step, checkpoints, forward), turning_point)


def _kept(step: TracedStep, checkpoints: Sequence[tf.Tensor] | str, forward: frozenset[tf.Operation]) -> list[int]:
    tensors: Sequence[tf.Tensor] = () if isinstance(checkpoints, str) else checkpoints
    numbers = {t.name: number for number, t in enumerate(step.tensors)}
    if checkpoints == "speed":
        slow = [op for op in step.operations if op in forward and op.type.startswith(_SLOW)]
        return [numbers[t.name] for op in slow for t in op.outputs]
    if checkpoints == "collection":
        tensors = step.operations[0].graph.get_collection(COLLECTION)
        if not tensors:
            raise ValueError(
                f"the graph's collection {COLLECTION!r} is empty; add tensors with "
                f"tf.compat.v1.add_to_collection({COLLECTION!r}, tensor), or give checkpoints as a list"
            )
    unknown = [t.name for t in tensors if t.name not in numbers]
    if unknown:
        raise UnsupportedStep(
            f"the checkpoint {unknown[0]!r} is no tensor that the gradients need; give tensors on the way from the "
            "sources to the loss"
        )
    return [numbers[t.name] for t in tensors]
