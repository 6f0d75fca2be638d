"""The part of a TensorFlow 1 graph that leads to some tensors, seen as a function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


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
