"""Which operations of a function run, and in which order; likewise of what a session runs of a TensorFlow 1 graph."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from remat.core.errors import UnsupportedStep
from remat.tensorflow import _private


def operations_that_run(func_graph: _private.FuncGraph, moved: Mapping[str, int] | None = None) -> list[tf.Operation]:
    """The operations that the function's outputs or effects need, in program order.

    Args:
        func_graph: the function.
        moved: as for ``in_places``.
    """
    needed: set[tf.Operation] = set()
    stack = [t.op for t in func_graph.outputs]
    stack += [op for op in func_graph.get_operations() if op.op_def is not None and _has_effect(op)]
    while stack:
        op = stack.pop()
        if op in needed:
            continue
        needed.add(op)
        stack += [t.op for t in op.inputs]
        stack += op.control_inputs
    return in_topological_order([op for op in in_places(func_graph.get_operations(), moved) if op in needed])


def in_places(operations: Sequence[tf.Operation], moved: Mapping[str, int] | None) -> list[tf.Operation]:
    """All operations of a function, some of which stand further in front than where they were made.

    Args:
        operations: in the order in which they were made.
        moved: by name, the number of the operation in front of which they stand.
    """
    if not moved:
        return list(operations)
    places = {op.name: (moved.get(op.name, number), op.name not in moved) for number, op in enumerate(operations)}
    return sorted(operations, key=lambda op: places[op.name])


def in_topological_order(operations: list[tf.Operation]) -> list[tf.Operation]:
    """Program order, corrected where TensorFlow gave an earlier op a later input (as loops' gradients do)."""
    place = {op: number for number, op in enumerate(operations)}
    waiting = [0] * len(operations)
    followers: list[list[int]] = [[] for _ in operations]
    for number, op in enumerate(operations):
        for before in {t.op for t in op.inputs} | set(op.control_inputs):
            followers[place[before]].append(number)
            waiting[number] += 1
    ready = [number for number, count in enumerate(waiting) if count == 0]
    ordered = []
    while ready:
        number = heapq.heappop(ready)
        ordered.append(operations[number])
        for follower in followers[number]:
            waiting[follower] -= 1
            if waiting[follower] == 0:
                heapq.heappush(ready, follower)
    if len(ordered) < len(operations):
        raise UnsupportedStep(
            "the function holds a TensorFlow 1 while loop (a cycle in its graph), which remat cannot plan; call "
            "tf.compat.v1.enable_control_flow_v2(), or keep the loop in a function of its own"
        )
    return ordered


def _has_effect(op: tf.Operation) -> bool:
    return bool(op.op_def.is_stateful) and op.type not in (
        "Placeholder",
        "ReadVariableOp",
        "ResourceGather",
        "VarHandleOp",
    )


class SessionGraph:
    """What a session runs for some fetches, with the attributes that a traced function has.

    The rest of the graph (an evaluation branch, savers, summaries) is not seen, so that nothing is tied to it.

    Args:
        graph: a ``tf.compat.v1`` graph.
        outputs: tensors of it; others are left out.
    """

    def __init__(self, graph: tf.Graph, outputs: Sequence[Any]) -> None:
        self.graph = graph
        self.outputs = [t for t in outputs if isinstance(t, tf.Tensor)]
        needed: set[tf.Operation] = set()
        stack = [t.op for t in self.outputs]
        while stack:
            op = stack.pop()
            if op not in needed:
                needed.add(op)
                stack += [t.op for t in op.inputs]
                stack += op.control_inputs
        self._operations = [op for op in graph.get_operations() if op in needed]
        self.inputs = [t for op in self._operations if op.type in ("Placeholder", "VarHandleOp") for t in op.outputs]
        self.captures: list[Any] = []

    def get_operations(self) -> list[tf.Operation]:
        """The operations that are needed, in program order."""
        return list(self._operations)

    def as_graph_def(self) -> Any:
        """The needed operations in TensorFlow's format, with the functions that they call."""
        definition = self.graph.as_graph_def()
        names = {op.name for op in self._operations}
        kept = [node for node in definition.node if node.name in names]
        del definition.node[:]
        definition.node.extend(kept)
        return definition

    def get_tensor_by_name(self, name: str) -> tf.Tensor:
        """The tensor of that name."""
        return self.graph.get_tensor_by_name(name)
