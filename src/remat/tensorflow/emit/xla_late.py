"""Keeps the tensors that XLA adds to an operation from living all through the program.

XLA expands some gradients into tensors that depend on no other: the gradient of max pooling compares index tensors as
large as its input, that of a convolution reads its filter reversed. The compiler may make them at the program's start
and hold them until they are needed.
"""

from __future__ import annotations

import tensorflow as tf

from remat.tensorflow import _private
from remat.tensorflow.emit.xla_ties import can_be_tied_to, can_tie, late_zero, tie

# By kind: the attributes that its function takes.
_GRADIENTS_OF_POOLING = {
    "MaxPool3DGrad": ("ksize", "strides", "padding", "data_format"),
    "MaxPoolGrad": ("ksize", "strides", "padding", "explicit_paddings", "data_format"),
}
# Each reads its input's sizes, the filter and the incoming gradient.
_GRADIENTS_OF_CONVOLUTIONS = frozenset(
    {"Conv2DBackpropInput", "Conv3DBackpropInputV2", "DepthwiseConv2dNativeBackpropInput"}
)


def in_slices(operation: tf.Operation) -> tf.Tensor | None:
    """What to read in place of a gradient of pooling: the same numbers, made sample by sample in a loop.

    The index tensors are then those of one sample, and none is made before the incoming gradient exists.

    Returns:
        The loop's result; None where ``operation`` is no gradient of pooling, or samples have no known shape.
    """
    names = _GRADIENTS_OF_POOLING.get(operation.type)
    if names is None:
        return None
    pooled = operation.inputs[0]
    attributes = {name: operation.get_attr(name) for name in names}
    if any(t.shape.rank is None or not t.shape[1:].is_fully_defined() for t in operation.inputs):
        return None
    if not can_be_tied_to(operation.inputs[2]):
        return None

    def sample(tensor: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
        return tf.slice(tensor, [number, *[0] * (tensor.shape.rank - 1)], [1, *tensor.shape[1:]])

    def body(number: tf.Tensor, made: tf.TensorArray) -> tuple[tf.Tensor, tf.TensorArray]:
        before, after, incoming = (sample(t, number) for t in operation.inputs)
        gradient_of = getattr(tf.raw_ops, operation.type)
        part = gradient_of(orig_input=before, orig_output=after, grad=incoming, **attributes)
        return number + 1, made.write(number, part[0])

    with _private.building_freely(operation.graph):
        samples = tf.shape(pooled)[0]
        # The loop's own result waits, too.
        zeros = tie(tf.zeros_like(pooled), late_zero(operation.inputs[2]))
        made = tf.TensorArray(pooled.dtype, samples, element_shape=pooled.shape[1:]).unstack(zeros)
        output: tf.Tensor = tf.while_loop(lambda number, _: number < samples, body, [0, made])[1].stack()
        output.set_shape(pooled.shape)
    return output


def hold_filter(operation: tf.Operation) -> None:
    """Let a gradient of a convolution read its filter no sooner than the incoming gradient exists."""
    if operation.type not in _GRADIENTS_OF_CONVOLUTIONS:
        return
    _, weights, gradient = operation.inputs
    if can_be_tied_to(gradient) and can_tie(weights):
        with _private.building_freely(operation.graph):
            tied = tie(weights, late_zero(gradient))
        _private.update_input(operation, 1, tied)
