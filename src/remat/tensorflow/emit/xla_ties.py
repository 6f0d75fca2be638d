"""Holds computations back under XLA, where control edges vanish.

XLA merges equal computations and moves what is ready, so a copy needs an input that exists only late. ``tie`` adds a
zero to a tensor's bits, computed from a value of the backward pass in a way that the compiler does not see through:
the tensor stays the same bit for bit, and what reads it must wait. No compiler flag is needed on any platform.

XLA also expands some gradients into tensors that depend on no other: the gradient of max pooling compares index tensors
as large as its input, that of a convolution reads its filter reversed. The compiler may make them at the program's
start and hold them until they are needed, so these wait, too.
"""

from __future__ import annotations

from typing import Final

import tensorflow as tf

from remat.tensorflow import _private

_BITS = {1: tf.int8, 2: tf.int16, 4: tf.int32, 8: tf.int64}
_TIEABLE = frozenset(
    {tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8, tf.uint32}
)

_MOST_AXES: Final = 64
"""Tensors of integers with at most so many elements may be shapes or axes, which XLA has to know when it compiles.

TensorFlow allows 254 dimensions and models have fewer than ten, so this is a generous judgement. Too small, a tied
shape does not compile; too large, a small tensor of integers is not tied, and its recomputation may run early.
"""


def can_tie(tensor: tf.Tensor) -> bool:
    """Can ``tensor`` be tied?"""
    return tensor.dtype in _TIEABLE


def may_tie(tensor: tf.Tensor, elements: float) -> bool:
    """May a tie hide the value of ``tensor``, of so many elements, from the compiler?"""
    # XLA wants shapes and axes, which are small integers, at compile time.
    return can_tie(tensor) and (bool(tensor.dtype.is_floating) or elements > _MOST_AXES)


def can_be_tied_to(tensor: tf.Tensor) -> bool:
    """Can others be tied to ``tensor``, if it is not empty?"""
    return can_tie(tensor) and tensor.shape.rank is not None


def late_zero(trigger: tf.Tensor) -> tf.Tensor:
    """An int32 scalar that is 0 and cannot be known before ``trigger`` exists.

    The sign of a value, -1 or 0 as an integer s, gives s * s + s = 0.
    """
    first = tf.reshape(tf.slice(trigger, [0] * trigger.shape.rank, [1] * trigger.shape.rank), [])
    bits = tf.bitcast(first, _BITS[trigger.dtype.size])
    sign = tf.bitwise.right_shift(bits, tf.constant(8 * trigger.dtype.size - 1, bits.dtype))
    return tf.cast(sign * sign + sign, tf.int32)


def tie(tensor: tf.Tensor, zero: tf.Tensor) -> tf.Tensor:
    """``tensor`` bit for bit, available no sooner than ``zero``."""
    bits_type = _BITS[tensor.dtype.size]
    bits = tf.bitcast(tensor, bits_type) + tf.cast(zero, bits_type)
    tied = tf.bitcast(bits, tensor.dtype)
    tied.set_shape(tensor.shape)
    return tied


def written_once(tensor: tf.Tensor) -> tf.Tensor:
    """``tensor`` bit for bit, in a buffer of its own.

    XLA computes a sum again in each of its readers rather than keep it, and so keeps what the sum is made of. Along a
    residual network that is every term of every block. It does not repeat an operation that reads two tensors as large
    as its result when a product of matrices or a convolution needs the result as well.
    """
    return tf.where(tf.equal(late_zero(tensor), 0), tensor, -tensor)


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
