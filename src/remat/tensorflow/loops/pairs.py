"""The two loops that differentiation makes of one ``tf.while_loop``, and the lists between them.

The forward body pushes a value on a list in each iteration, and the backward body pops it. Both hand the list on. Where
a list has no other use, another value can be pushed on it, or none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf

from remat.tensorflow import _private
from remat.tensorflow.trace.sizes import LOOPS


@dataclass(frozen=True, eq=False)
class Slot:
    """One list that the forward loop fills for the backward loop, and that nobody else reads.

    Attributes:
        first: the number of the list among inputs and outputs of the forward loop.
        second: its number among those of the backward loop.
        item: the tensor of the forward body that is pushed.
        popped: the tensor of the backward body that is popped.
        rank: of the items that the list takes; None for any.
    """

    first: int
    second: int
    item: tf.Tensor
    popped: tf.Tensor
    rank: int | None


@dataclass(frozen=True, eq=False)
class Pair:
    """A forward loop and its backward loop.

    Attributes:
        forward, backward: the operations.
        first, second: their bodies.
        slots: the lists between them.
    """

    forward: tf.Operation
    backward: tf.Operation
    first: _private.FuncGraph
    second: _private.FuncGraph
    slots: tuple[Slot, ...]


def find_pairs(operations: Sequence[tf.Operation]) -> list[Pair]:
    """Each loop with the one that pops its lists; a loop without such a one, or that calls functions, is left out."""
    pairs = []
    taken: set[tf.Operation] = set()
    for backward in (op for op in operations if op.type in LOOPS):
        filled_by = dict.fromkeys(t.op for t in backward.inputs if t.dtype == tf.variant and t.op.type in LOOPS)
        for forward in filled_by:
            bodies = [_private.function_of(loop, "body") for loop in (forward, backward)]
            if any(calls_function(op) for body in bodies for op in body.get_operations()):
                continue  # A copy of such a body would name functions that its graph does not have.
            slots = _slots(forward, backward, *bodies)
            if slots and taken.isdisjoint((forward, backward)):
                pairs.append(Pair(forward, backward, bodies[0], bodies[1], slots))
                taken |= {forward, backward}
    return pairs


def calls_function(op: tf.Operation) -> bool:
    """Does an operation run a function, as branches, loops and calls do?"""
    return any(value.HasField("func") or bool(value.list.func) for value in op.node_def.attr.values())


def _slots(
    forward: tf.Operation, backward: tf.Operation, first: _private.FuncGraph, second: _private.FuncGraph
) -> tuple[Slot, ...]:
    found = []
    for number, given in enumerate(backward.inputs):
        if given.dtype != tf.variant or given.op is not forward:
            continue
        place = given.value_index
        empty = forward.inputs[place]
        used_elsewhere = (
            empty.op.type != "EmptyTensorList"
            or not empty.op.inputs[0].shape.is_fully_defined()
            or len(empty.consumers()) != 1
            or len(given.consumers()) != 1
        )
        if used_elsewhere or any(_has_readers(reader) for reader in backward.outputs[number].consumers()):
            continue
        push = _only_operation(first, place, "TensorListPushBack")
        pop = _only_operation(second, number, "TensorListPopBack")
        if push is not None and pop is not None:
            found.append(Slot(place, number, push.inputs[1], pop.outputs[1], _rank(empty.op.inputs[0])))
    return tuple(found)


def _rank(element_shape: tf.Tensor) -> int | None:
    """The rank of a list's items: the list is made with their shape, or with one number where any will do."""
    return None if element_shape.shape.rank == 0 else int(element_shape.shape[0])


def _has_readers(op: tf.Operation) -> bool:
    return op.type != "Identity" or bool(op.outputs[0].consumers())


def _only_operation(body: _private.FuncGraph, number: int, kind: str) -> tf.Operation | None:
    """What a body does with a list, where that is one operation of this kind and the list is then handed on."""
    readers = body.inputs[number].consumers()
    if len(readers) != 1 or readers[0].type != kind or body.outputs[number].name != readers[0].outputs[0].name:
        return None
    return readers[0]
