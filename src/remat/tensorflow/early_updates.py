"""Updates that run as soon as their gradient is final: a function's operations in that order.

A program order is what a plan keeps to, so this changes the program order: the plain one has all updates behind the
backward pass, and all gradients live until then. An update in TensorFlow assigns to a variable and returns nothing. So
what looks for updates is shown each assignment with the variable's new value as its result.
"""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from remat.core.graph import Graph, Op, Tensor
from remat.core.plan import Update
from remat.core.simulator import simulate
from remat.tensorflow import _private
from remat.tensorflow.trace import op_facts
from remat.tensorflow.trace.func_graph import TracedStep
from remat.transform.early_update import early_updates


class EarlyUpdates:
    """Moves the updates of steps, and says of each what that comes to."""

    def __init__(self) -> None:
        self._found: dict[str, Update] = {}

    def moved(self, step: TracedStep) -> TracedStep:
        """The step with its updates moved; as it is, where that would raise the peak of its plain schedule."""
        found = early_updates(_with_assigned_values(step))
        changed = step.in_order(found.order)
        saved_bytes = _plain_peak(step.graph) - _plain_peak(changed.graph)
        if saved_bytes < 0 or not found.moved:
            changed, saved_bytes = step, 0
        bound_by = "" if found.bound_by is None else step.graph.ops[found.bound_by].name
        moved = len(found.moved) if changed is not step else 0
        self._found[changed.graph.fingerprint] = Update(moved, saved_bytes, bound_by, found.waiting_bytes)
        return changed

    def described(self, graph: Graph) -> Update | None:
        """What moving came to for a step that ``moved`` returned."""
        return self._found.get(graph.fingerprint)


def _plain_peak(graph: Graph) -> int:
    return simulate(graph, graph.plain_schedule).peak_bytes


def _with_assigned_values(step: TracedStep) -> Graph:
    """The step's graph, in which assignments make the new value of their variable, and these are results."""
    graph = step.graph
    tensors: list[Tensor] = list(graph.tensors)
    ops: list[Op] = []
    assigned: list[int] = []
    for op, operation in zip(graph.ops, step.operations, strict=True):
        shape = _assigned_shape(operation)
        if shape is not None:
            assigned.append(len(tensors))
            tensors.append(Tensor(0, f"{op.name}:assigned", shape))
            op = dataclasses.replace(op, outputs=(*op.outputs, assigned[-1]))
        ops.append(op)
    return dataclasses.replace(
        graph, ops=tuple(ops), tensors=tuple(tensors), outputs=(*graph.outputs, *assigned), notes=()
    )


def _assigned_shape(operation: tf.Operation) -> tuple[int, ...] | None:
    """The shape of the variable that an operation assigns to; None for any other operation."""
    if not operation.type.startswith(op_facts.ASSIGNMENTS):
        return None
    shapes = _private.handle_shapes(operation.inputs[0])
    if not shapes or not shapes[0][0].is_fully_defined():
        return None
    return tuple(shapes[0][0])
