"""Ways to choose what is kept: the user's tensors, a rule, or the planner at the knee of its frontier."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from remat.core.errors import UnsupportedStep
from remat.core.plan import Plan
from remat.planning.checkpoints import knee_plan, plan_with_checkpoints, plan_with_cuts
from remat.tensorflow.peak.allocator import AllocatorModel
from remat.tensorflow.trace.func_graph import TracedStep

RULES = ("memory", "speed", "collection")
COLLECTION = "checkpoints"

Checkpoints = Sequence[tf.Tensor] | str | None

# What a pass over the activations cannot make again cheaply.
_SLOW = ("BatchMatMul", "Conv", "DepthwiseConv", "Einsum", "FusedConv", "MatMul", "SparseTensorDenseMatMul")
_SECONDS_PER_POINT = 1.0


def chosen_plan(
    step: TracedStep,
    checkpoints: Checkpoints,
    forward: frozenset[tf.Operation],
    *,
    planner: str = "auto",
    time_limit_s: float | None = None,
    options: Mapping[str, Any] | None = None,
) -> Plan:
    """The plan for a choice of checkpoints; its figures count tensors only.

    Args:
        step: the traced step.
        checkpoints: tensors to keep, a rule's name, or None for the knee of the frontier.
        forward: the operations of the forward part.
        planner: for None, a planner's name.
        time_limit_s: for None, wall seconds of each point of the frontier.
        options: for None, passed on to the planner.

    Raises:
        UnsupportedStep: where a checkpoint is no tensor of the step.
        ValueError: for an empty collection.
    """
    if checkpoints is None:
        return knee_plan(step.graph, planner, time_limit_s or _SECONDS_PER_POINT, **(options or {}))
    if isinstance(checkpoints, str) and checkpoints == "memory":
        return plan_with_cuts(step.graph)
    turning_point = max((n for n, op in enumerate(step.operations) if op in forward), default=None)
    return plan_with_checkpoints(step.graph, _kept(step, checkpoints, forward), turning_point)


def with_device_figures(plan: Plan, step: TracedStep, allocator: AllocatorModel, resident_bytes: int) -> Plan:
    """The plan with its peaks as the device's own counter will show them."""
    peak = allocator.peak_range(step.graph, plan.schedule)
    baseline = allocator.peak_range(step.graph, step.graph.plain_schedule)
    return dataclasses.replace(
        plan,
        peak_bytes=peak.expected_bytes + resident_bytes,
        budget_bytes=peak.highest_bytes + resident_bytes,
        baseline_peak_bytes=baseline.expected_bytes + resident_bytes,
    )


def _kept(step: TracedStep, checkpoints: Sequence[tf.Tensor] | str, forward: frozenset[tf.Operation]) -> list[int]:
    tensors: Sequence[tf.Tensor] = () if isinstance(checkpoints, str) else checkpoints
    numbers = {t.name: number for number, t in enumerate(step.tensors) if t is not None}
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
