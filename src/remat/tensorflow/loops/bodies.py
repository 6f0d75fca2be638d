"""Writes the bodies of a pair of loops again: the forward one pushes less, the backward one makes the rest again.

Both loops keep their inputs and outputs. A list whose value is not stored is handed through empty, or stores another
value that the backward body needs to make the first one again, such as a bias.
"""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf

from remat.tensorflow import _private
from remat.tensorflow.loops.pairs import Pair, Slot


@dataclass(frozen=True)
class Choice:
    """What a pair of loops stores; by the names of tensors and operations of the forward body.

    Attributes:
        stored: the tensors on the lists.
        again: the operations that the backward body runs again.
    """

    stored: frozenset[str]
    again: frozenset[str]


@dataclass(frozen=True)
class Bodies:
    """The bodies of a pair, written again, as functions that no loop has been given yet.

    Attributes:
        pair: the loops.
        first, second: the bodies.
        refilled: lists that store another value than before: their numbers in the forward loop, and its type.
    """

    pair: Pair
    first: _private.FuncGraph
    second: _private.FuncGraph
    refilled: tuple[tuple[int, tf.DType], ...]

    @property
    def by_loop(self) -> dict[tf.Operation, _private.FuncGraph]:
        """The body that each loop would get."""
        return {self.pair.forward: self.first, self.pair.backward: self.second}

    def give(self) -> None:
        """Make the loops run these bodies."""
        for number, dtype in self.refilled:
            _private.accept_items_of(self.pair.forward.inputs[number].op, dtype)
        for loop, body in self.by_loop.items():
            _private.set_body(loop, body)


def written(pair: Pair, choice: Choice) -> Bodies:
    """The bodies of a pair for a choice.

    Raises:
        ValueError: where a tensor is to be stored for which there is no list.
    """
    first, first_named = _private.copied_function(pair.first, pair.forward.graph)
    second, second_named = _private.copied_function(pair.second, pair.backward.graph)
    assigned = values_of_lists(pair, choice)
    if assigned is None:
        raise ValueError(f"there is no list for some of {sorted(choice.stored)}")
    for slot in pair.slots:
        # The size that a pop expects waits for the gradients before it, which may need what is made of the item now.
        _private.wait_for_nothing(second_named(slot.popped.name).op.inputs[1].op)
    there: dict[str, tf.Tensor] = {}  # What the backward body has of the forward one, by name.
    refilled: list[tuple[int, tf.DType]] = []
    for slot in pair.slots:
        value = assigned.get(slot)
        if value is None:
            first.outputs[slot.first] = first.inputs[slot.first]
            second.outputs[slot.second] = second.inputs[slot.second]
        elif value.name == slot.item.name:
            there[value.name] = second_named(slot.popped.name)
        else:
            more_axes = 0 if slot.rank is None else slot.rank - value.shape.rank
            pushed = _private.push(first.inputs[slot.first], first_named(value.name), more_axes)
            left, there[value.name] = _private.pop(second.inputs[slot.second], value, more_axes)
            first.outputs[slot.first], second.outputs[slot.second] = pushed, left
            refilled.append((slot.first, value.dtype))
    for op in pair.first.get_operations():
        if op.name in choice.again:
            copied = _private.copied_operation(second, op, [_of(t, there, second) for t in op.inputs])
            there |= {old.name: new for old, new in zip(op.outputs, copied.outputs, strict=True)}
    for slot in pair.slots:
        value = assigned.get(slot)
        if value is None or value.name != slot.item.name:
            _replace(second, second_named(slot.popped.name), _of(slot.item, there, second))
    return Bodies(pair, first, second, tuple(refilled))


def values_of_lists(pair: Pair, choice: Choice) -> dict[Slot, tf.Tensor] | None:
    """What is stored on each list; None where a value that was not stored before finds no list that could hold it."""
    assigned: dict[Slot, tf.Tensor] = {}
    left = set(choice.stored)
    for slot in pair.slots:
        if slot.item.name in left:
            assigned[slot] = slot.item
            left.remove(slot.item.name)
    free = sorted((slot for slot in pair.slots if slot not in assigned), key=lambda slot: slot.rank or 0)
    values = [pair.first.get_tensor_by_name(name) for name in sorted(left)]
    if any(value.shape.rank is None for value in values):
        return None
    for value in sorted(values, key=lambda one: -one.shape.rank):
        fitting = [slot for slot in free if slot.rank is None or slot.rank >= value.shape.rank]
        if not fitting:
            return None
        assigned[fitting[0]] = value
        free.remove(fitting[0])
    return assigned


def _of(tensor: tf.Tensor, there: dict[str, tf.Tensor], body: _private.FuncGraph) -> tf.Tensor:
    """The tensor in the backward body; a constant is copied there."""
    if tensor.name not in there:
        if tensor.op.type != "Const":
            raise ValueError(f"{tensor.name!r} is neither stored nor made again")
        there[tensor.name] = _private.copied_operation(body, tensor.op, []).outputs[0]
    return there[tensor.name]


def _replace(body: _private.FuncGraph, old: tf.Tensor, new: tf.Tensor) -> None:
    for reader in list(old.consumers()):
        for number, source in enumerate(reader.inputs):
            if source.name == old.name:
                _private.update_input(reader, number, new)
    body.outputs[:] = [new if output.name == old.name else output for output in body.outputs]
