"""What is known of a function's tensors before it runs: shapes and values, and what of them depends on the batch.

Inside of ``fit`` one function runs for batches of several sizes. What is cut must be cut rightly for all of them. So
everything is looked at twice: with the sizes that the function is planned for, and with all unknown sizes doubled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import tensorflow as tf

from remat.tensorflow import _private
from remat.tensorflow.split.separable_ops import parameter_inputs, sliced_parameters, ways_of
from remat.tensorflow.trace.op_facts import may_repeat
from remat.tensorflow.trace.sizes import HANDLES, Sizes, sizes_with_loops
from remat.transform.separable import Way

Shape = tuple[int, ...]

_MOST_PARAMETERS: Final = 64
"""A parameter has no more elements: shapes and axes have one for each axis. With a larger number, tables of whole
numbers that a program reads would be evaluated in vain."""


class Facts:
    """Shapes and values of the tensors of one function.

    Args:
        func_graph: the traced function.
        input_shapes: real shapes of inputs traced with unknown dimensions, by tensor name.
    """

    def __init__(self, func_graph: _private.FuncGraph, input_shapes: Mapping[str, Sequence[int]]) -> None:
        self.sizes: Sizes = sizes_with_loops(func_graph, input_shapes)
        doubled = {
            name: tuple(
                2 * size if known is None else size
                for size, known in zip(shape, func_graph.get_tensor_by_name(name).shape, strict=True)
            )
            for name, shape in input_shapes.items()
        }
        depends = any(doubled[name] != tuple(shape) for name, shape in input_shapes.items())
        self._doubled = sizes_with_loops(func_graph, doubled) if depends else None
        self._values: dict[str, tuple[Any, Any]] = {}

    def shapes(self, tensor: tf.Tensor) -> tuple[Shape, Shape] | None:
        """The tensor's shape, planned for and doubled; None where it is not known or the tensor is a handle."""
        if tensor.dtype in HANDLES:
            return None
        shape = self.sizes.shape(tensor)
        other = shape if self._doubled is None else self._doubled.shape(tensor)
        return None if shape is None or other is None or len(shape) != len(other) else (shape, other)

    def ways(self, op: tf.Operation) -> tuple[Way, ...]:
        """The ways to cut an operation that are right for batches of every size."""
        if not may_repeat(op):
            return ()
        operands = self._all_shapes(operands_of(op))
        results = self._all_shapes(op.outputs)
        if operands is None or results is None or all(math.prod(one) <= 1 for one, _ in (*operands, *results)):
            return ()
        parameters = [self.parameters(op, number) for number in range(2)]
        if None in parameters:
            return ()
        found: list[tuple[Way, ...]] = []
        for number in range(2):
            given = parameters[number]
            assert given is not None
            found.append(ways_of(op, given, [one[number] for one in operands], [one[number] for one in results]))
        return tuple(way for way in found[0] if way in found[1] and self._is_told_the_same(op, way))

    def parameters(self, op: tf.Operation, number: int = 0) -> dict[int, Any] | None:
        """The values of an operation's parameters; None where one is not known."""
        found = {place: self._value(op.inputs[place])[number] for place in parameter_inputs(op)}
        return None if any(value is None for value in found.values()) else found

    def told(self, op: tf.Operation, way: Way, number: int = 0) -> dict[int, Any]:
        """The parameters of a slice of an operation, None for the length of the slice.

        Args:
            op: the whole operation.
            way: how it is cut.
            number: 0 for the sizes that the function is planned for, 1 for the doubled ones.
        """
        parameters = self.parameters(op, number)
        operands = self._all_shapes(operands_of(op))
        results = self._all_shapes(op.outputs)
        assert parameters is not None, "known where there is a way"
        shapes = [[one[number] for one in both or ()] for both in (operands, results)]
        changed = sliced_parameters(op, parameters, way, *shapes)
        return {place: changed.get(place, np.asarray(value).tolist()) for place, value in parameters.items()}

    def _is_told_the_same(self, op: tf.Operation, way: Way) -> bool:
        return self._doubled is None or self.told(op, way, 0) == self.told(op, way, 1)

    def _all_shapes(self, tensors: Sequence[tf.Tensor]) -> list[tuple[Shape, Shape]] | None:
        found = [self.shapes(tensor) for tensor in tensors]
        return None if None in found else found  # type: ignore[return-value]

    def _value(self, tensor: tf.Tensor) -> tuple[Any, Any]:
        """The value of a small tensor of whole numbers that depends on shapes only, for both sizes."""
        if tensor.name not in self._values:
            self._values[tensor.name] = self._evaluated(tensor)
        return self._values[tensor.name]

    def _evaluated(self, tensor: tf.Tensor) -> tuple[Any, Any]:
        shapes = self.shapes(tensor)
        # How many axes a gradient is summed over is unknown while it is traced, and never many.
        is_small = tensor.op.type == "BroadcastGradientArgs"
        if shapes is not None:
            is_small = max(map(math.prod, shapes)) <= _MOST_PARAMETERS
        if not tensor.dtype.is_integer or not is_small:
            return None, None
        value = self.sizes.value(tensor)
        return value, value if self._doubled is None else self._doubled.value(tensor)


def operands_of(op: tf.Operation) -> list[tf.Tensor]:
    """The inputs of an operation that are no parameters, in their order."""
    parameters = parameter_inputs(op)
    return [tensor for place, tensor in enumerate(op.inputs) if place not in parameters]
