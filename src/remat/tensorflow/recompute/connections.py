"""Which gradients exist at all, for a function that is called eagerly and has several outputs.

TensorFlow gives the backward pass of a function zeros for outputs that nobody used, and so zeros come out for inputs
that have no gradient, where plain eager mode says None. An optimizer tells the two apart: momentum moves on zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from remat.tensorflow import _private

_STOPS = frozenset({"PreventGradient", "StopGradient", "ZerosLike", "OnesLike"})


class Connections:
    """Gates around one call of a traced function; they pass values and gradients on, or None.

    Args:
        function: the concrete function, called with ``call``.
        differentiable: which of its outputs can carry a gradient.
    """

    def __init__(self, function: Any, differentiable: Sequence[bool]) -> None:
        self._function = function
        self._differentiable = differentiable
        self._several = sum(differentiable) > 1
        self._arrived: set[int] = set()
        self._arrivals_end = False
        self._reached: dict[int, frozenset[int]] = {}

    def call(self, arguments: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The outputs of the function for ``arguments``."""
        captured = list(self._function.captured_inputs)
        if not self._several:
            return _private.call_function(self._function, list(arguments), captured)
        graph = self._function.graph
        reached_by_name = {t.name: number for number, t in enumerate(graph.inputs)}
        for number, output in enumerate(graph.outputs):
            if number < len(self._differentiable) and self._differentiable[number]:
                self._reached[number] = _reached(output, reached_by_name)
        _private.watch_variables(self._function)
        inputs = [self._input_gate(t, number) for number, t in enumerate([*arguments, *captured])]
        outputs = _private.call_function(self._function, inputs[: len(arguments)], inputs[len(arguments) :])
        return [self._output_gate(t, number) if number in self._reached else t for number, t in enumerate(outputs)]

    def _input_gate(self, tensor: tf.Tensor, number: int) -> tf.Tensor:
        def backward(gradient: Any) -> list[Any]:
            self._arrivals_end = True
            known = any(number in self._reached[output] for output in self._arrived)
            return [gradient if known else None]

        if tensor.dtype != tf.resource and not (tensor.dtype.is_floating or tensor.dtype.is_complex):
            return tensor
        return _private.eager_gate(tensor, backward)

    def _output_gate(self, tensor: tf.Tensor, number: int) -> tf.Tensor:
        def backward(gradient: Any) -> list[Any]:
            if self._arrivals_end:  # A backward pass before this one is over.
                self._arrived, self._arrivals_end = set(), False
            self._arrived.add(number)
            return [gradient]

        return _private.eager_gate(tensor, backward)


def _reached(output: tf.Tensor, inputs: dict[str, int]) -> frozenset[int]:
    """Numbers of the inputs to which a gradient of ``output`` may flow."""
    found = set()
    seen = {output.name}
    stack = [output]
    while stack:
        tensor = stack.pop()
        if tensor.name in inputs:
            found.add(inputs[tensor.name])
        op = tensor.op
        if op.type in _STOPS:
            continue
        # Each output of an IdentityN is its own input.
        read = [op.inputs[tensor.value_index]] if op.type == "IdentityN" else op.inputs
        for source in read:
            carries = source.dtype.is_floating or source.dtype.is_complex or source.dtype in (tf.resource, tf.variant)
            if carries and source.name not in seen:
                seen.add(source.name)
                stack.append(source)
    return frozenset(found)
