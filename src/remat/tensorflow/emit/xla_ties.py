"""Holds a recomputation back under XLA, where control edges vanish.

XLA merges equal computations and moves what is ready, so a copy needs an input that exists only late. ``tie`` adds a
zero to a tensor's bits, computed from a value of the backward pass in a way that the compiler does not see through:
the tensor stays the same bit for bit, and what reads it must wait. No compiler flag is needed on any platform.
"""

from __future__ import annotations

import tensorflow as tf

_BITS = {1: tf.int8, 2: tf.int16, 4: tf.int32, 8: tf.int64}
_TIEABLE = frozenset(
    {tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8, tf.uint32}
)
_MOST_AXES = 64


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
