"""A region of a graph: operations whose results are dropped after the forward pass, and what they read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import tensorflow as tf

from remat.tensorflow.trace import op_facts

# A copy of one of these would need the gradient of a function that TensorFlow attached to the original.
_CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})


@dataclass(frozen=True, eq=False)
class Region:
    """What the backward pass of one call needs.

    Attributes:
        graph: where the forward pass runs.
        operations: the repeatable operations that the outputs need, in program order.
        outputs: the tensors that the gate takes in, differentiable.
        boundary: what the operations read from outside of them, differentiable or not.
        differentiable: the tensors of ``boundary`` that the gate takes in after the outputs.
        ties: for tensors that ``operations`` read tied, by name, what was tied; such operations are copies themselves.
        segmented: recompute it in pieces (``segments.py``) rather than as one.
    """

    graph: tf.Graph
    operations: tuple[tf.Operation, ...]
    outputs: tuple[tf.Tensor, ...]
    boundary: tuple[tf.Tensor, ...]
    differentiable: tuple[tf.Tensor, ...]
    ties: Mapping[str, tf.Tensor] = field(default_factory=dict)
    segmented: bool = False

    def read_by(self, op: tf.Operation) -> list[tf.Tensor]:
        """The inputs of one of the operations, those that were tied in their first form."""
        return [self.ties.get(t.name, t) for t in op.inputs]

    def in_graph(self, graph: tf.Graph) -> Region:
        """The same region in another copy of its graph, as TensorFlow makes one of a loop's body."""

        def same(tensors: Sequence[tf.Tensor]) -> tuple[tf.Tensor, ...]:
            return tuple(graph.get_tensor_by_name(t.name) for t in tensors)

        operations = tuple(graph.get_operation_by_name(op.name) for op in self.operations)
        ties = {name: graph.get_tensor_by_name(t.name) for name, t in self.ties.items()}
        outputs, boundary, differentiable = same(self.outputs), same(self.boundary), same(self.differentiable)
        return Region(graph, operations, outputs, boundary, differentiable, ties, self.segmented)


def is_differentiable(tensor: tf.Tensor) -> bool:
    """Can ``tensor`` carry a gradient?"""
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)


def may_repeat(op: tf.Operation) -> bool:
    """May ``op`` run again in a backward pass, perhaps in another graph?"""
    return op.type == "Const" or (op_facts.may_repeat(op) and op.type not in _CALLS)


def needed_for(
    outputs: Iterable[tf.Tensor],
    members: Collection[tf.Operation],
    read_by: Callable[[tf.Operation], Iterable[tf.Tensor]],
) -> set[tf.Operation]:
    """The members that lead to ``outputs`` through members alone."""
    needed: set[tf.Operation] = set()
    stack = [t.op for t in outputs]
    while stack:
        op = stack.pop()
        if op in members and op not in needed:
            needed.add(op)
            stack += [t.op for t in read_by(op)]
    return needed


def region_of(
    graph: tf.Graph, made: Sequence[tf.Operation], outputs: Sequence[tf.Tensor], segmented: bool = False
) -> Region:
    """The region behind ``outputs`` among the operations that a call made."""
    # Small tensors from outside come in as constants; they are inputs all the same, and gradients leave through them.
    inputs = {t.op for t in getattr(graph, "inputs", ()) if tf.is_symbolic_tensor(t)}
    members = {op for op in made if may_repeat(op) and op not in inputs}
    needed = needed_for(outputs, members, lambda op: op.inputs)
    operations = tuple(op for op in made if op in needed)
    read = {t.name: t for op in operations for t in op.inputs if t.op not in needed}
    read |= {t.name: t for t in outputs if t.op not in needed}
    boundary = tuple(read.values())
    differentiable = tuple(t for t in boundary if is_differentiable(t))
    return Region(graph, operations, tuple(outputs), boundary, differentiable, segmented=segmented)
