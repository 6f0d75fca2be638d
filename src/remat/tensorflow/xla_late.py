"""Keeps the tensors that XLA adds to an operation from living all through the program.

XLA expands some gradients into tensors that depend on no other: the gradient of max pooling compares index tensors as
large as its input, that of a convolution reads its filter reversed. The compiler may make them at the program's start
and hold them until they are needed.
"""

from __future__ import annotations

import tensorflow as tf

from remat.tensorflow import _private
from remat.tensorflow.xla_ties import can_be_tied_to, can_tie, late_zero, tie

# By kind: the number of the input that is the incoming gradient.
_GRADIENT_OF_POOLING = {"MaxPool3DGrad": 2, "MaxPoolGrad": 2, "MaxPoolGradV2": 2}
# By kind: the numbers of the incoming gradient and of the filter.
_GRADIENT_OF_CONVOLUTION = {
    "Conv2DBackpropInput": (2, 1),
    "Conv3DBackpropInputV2": (2, 1),
    "DepthwiseConv2dNativeBackpropInput": (2, 1),
}


def made_late(operation: tf.Operation) -> tf.Tensor | None:
    """What to read in place of the operation's output, where XLA's own tensors have to wait; None where none do.

    A gradient of pooling becomes a branch, whose tensors live no longer than it runs; the condition, which the
    compiler cannot foresee, always holds.
    """
    number = _GRADIENT_OF_POOLING.get(operation.type)
    if number is None or not can_be_tied_to(operation.inputs[number]):
        return None
    with _private.building_freely(operation.graph):
        holds = tf.equal(late_zero(operation.inputs[number]), 0)
        inputs = list(operation.inputs)
        output: tf.Tensor = tf.cond(
            holds,
            lambda: _private.copy_into(tf.compat.v1.get_default_graph(), operation, inputs, []).outputs[0],
            lambda: tf.zeros_like(inputs[0]),
        )
    return output


def hold_filter(operation: tf.Operation) -> None:
    """Let a gradient of a convolution read its filter no sooner than the incoming gradient exists."""
    numbers = _GRADIENT_OF_CONVOLUTION.get(operation.type)
    if numbers is None:
        return
    gradient, weights = (operation.inputs[n] for n in numbers)
    if can_be_tied_to(gradient) and can_tie(weights):
        with _private.building_freely(operation.graph):
            tied = tie(weights, late_zero(gradient))
        _private.update_input(operation, numbers[1], tied)
