"""Which operations of a function run, and in which order."""

from __future__ import annotations

import heapq

import tensorflow as tf

from remat.core.errors import UnsupportedStep
from remat.tensorflow import _private


def operations_that_run(func_graph: _private.FuncGraph) -> list[tf.Operation]:
    """The operations that the function's outputs or effects need, in program order."""
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
    return in_topological_order([op for op in func_graph.get_operations() if op in needed])


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
