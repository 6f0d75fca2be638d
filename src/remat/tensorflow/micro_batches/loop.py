"""Cuts a batch into micro-batches and runs one loop over them.

The sizes are those of :func:`remat.micro_batches.cut.cut`. Static sizes stay static (two loops, one per size): XLA
compiles them, and a planner knows their bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from remat.core.errors import UnsupportedStep
from remat.micro_batches.cut import count_samples
from remat.tensorflow import _private

Size: TypeAlias = Any  # An int where the trace knows it, else a scalar tensor.
Carried = list[tf.Tensor]
# The micro-batch's tensors, how many samples it has, what the loop carries -> what the loop carries on.
Body = Callable[[list[tf.Tensor], Size, Carried], Sequence[tf.Tensor]]


def batch_size_of(leaves: Sequence[tf.Tensor], names: Sequence[str]) -> Size:
    """How many samples a batch has: an int where the trace knows it.

    Args:
        leaves: the tensors of the batch.
        names: what each is called in an error.

    Raises:
        UnsupportedStep: for a tensor that is not dense or has no first dimension, or where first dimensions differ.
    """
    for leaf, name in zip(leaves, names, strict=True):
        if not isinstance(leaf, tf.Tensor):
            raise UnsupportedStep(
                f"{name} is a {type(leaf).__name__}, which cannot be split into micro-batches; give a dense tensor"
            )
    shapes = [None if leaf.shape.rank is None else tuple(leaf.shape) for leaf in leaves]
    known = count_samples(shapes, names)
    if known is not None:
        return known
    size = tf.shape(leaves[0])[0]
    if _private.in_xla_context(tf.compat.v1.get_default_graph()):
        return size  # Known, but only to the compiler; assertions do not exist there.
    checks = [
        tf.debugging.assert_equal(
            tf.shape(leaf)[0], size, message=f"{name} has another number of samples than {names[0]}"
        )
        for leaf, name in zip(leaves[1:], names[1:], strict=True)
    ]
    with tf.control_dependencies([check for check in checks if check is not None]):
        return tf.identity(size)


def for_each_micro_batch(
    leaves: Sequence[tf.Tensor],
    batch_size: Size,
    count: int,
    body: Body,
    initial: Sequence[tf.Tensor],
    joined: Sequence[tf.TensorSpec] = (),
) -> Carried:
    """Run ``body`` once per micro-batch, one after the other, and return what it carried at the end.

    A batch of fewer samples than ``count`` is cut into single samples.

    Args:
        leaves: tensors of the shape (batch_size, ...).
        batch_size: as ``batch_size_of`` gives it.
        count: the number of micro-batches.
        body: traced once, or twice where the pieces have two sizes.
        initial: what the first call of ``body`` gets; shapes and types must stay the same.
        joined: what each call returns behind what it carries on. It is no part of what the next call gets: the result
            has it of all the micro-batches, one after the other along the first dimension.
    """
    carried = list(initial)
    if isinstance(batch_size, int):
        small, larger = divmod(batch_size, min(count, batch_size))
        rest = min(count, batch_size) - larger
        of_larger: list[tf.Tensor] = []
        if larger:
            carried, of_larger = _loop(leaves, body, carried, joined, larger, lambda n: (n * (small + 1), small + 1))
        carried, of_small = _loop(
            leaves, body, carried, joined, rest, lambda n: (larger * (small + 1) + n * small, small)
        )
        return [*carried, *_concatenated(of_larger, of_small)]
    pieces = tf.maximum(1, tf.minimum(count, batch_size))
    if not _private.in_xla_context(tf.compat.v1.get_default_graph()):
        small, larger = batch_size // pieces, batch_size % pieces
        carried, rows = _loop(
            leaves,
            body,
            carried,
            joined,
            pieces,
            lambda n: (n * small + tf.minimum(n, larger), small + tf.cast(n < larger, tf.int32)),
        )
        return [*carried, *rows]

    def sizes() -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        # XLA knows a size at compile time only if it is computed from a shape in the loop's own body.
        size = tf.shape(leaves[0])[0]
        parts = tf.maximum(1, tf.minimum(count, size))
        return size // parts, size % parts, tf.minimum(size // parts + 1, size)

    def larger_piece(number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        _, _, more = sizes()
        return number * more, more

    def small_piece(number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        size, some, _ = sizes()
        return some * (size + 1) + number * size, size

    carried, of_larger = _loop(leaves, body, carried, joined, batch_size % pieces, larger_piece)
    carried, of_small = _loop(leaves, body, carried, joined, pieces - batch_size % pieces, small_piece)
    return [*carried, *_concatenated(of_larger, of_small)]


def _loop(
    leaves: Sequence[tf.Tensor],
    body: Body,
    carried: Carried,
    joined: Sequence[tf.TensorSpec],
    times: Size,
    piece: Callable[[tf.Tensor], tuple[Size, Size]],
) -> tuple[Carried, list[tf.Tensor]]:
    def one(number: tf.Tensor, arrays: list[Any], *values: tf.Tensor) -> tuple[Any, ...]:
        start, size = piece(number)
        found = list(body([_slice(leaf, start, size) for leaf in leaves], size, list(values)))
        rows = found[len(values) :]
        return (
            number + 1,
            [array.write(number, row) for array, row in zip(arrays, rows, strict=True)],
            *found[: len(values)],
        )

    # Only one micro-batch's activations may live at a time: no iteration beside another, no loop beside the one before.
    with tf.control_dependencies(carried):
        first = tf.identity(tf.constant(0))
    # XLA also compiles a loop that never runs, and cannot write into an array of no elements: it gets one too many.
    may_be_none = not isinstance(times, int) and _private.in_xla_context(tf.compat.v1.get_default_graph())
    length = tf.maximum(1, times) if may_be_none else times
    arrays = [
        tf.TensorArray(spec.dtype, size=length, element_shape=spec.shape, infer_shape=False, clear_after_read=False)
        for spec in joined
    ]
    _, arrays, *last = tf.while_loop(
        lambda number, *_: number < times, one, [first, arrays, *carried], parallel_iterations=1, name="micro_batches"
    )
    rows = [array.concat() for array in arrays]
    if may_be_none:
        rows = [row[: tf.shape(row)[0] * tf.minimum(1, times)] for row in rows]
    return list(last), rows


def _concatenated(first: Sequence[tf.Tensor], second: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    return [tf.concat(pair, 0) for pair in zip(first, second, strict=True)] if first else list(second)


def _slice(leaf: tf.Tensor, start: Size, size: Size) -> tf.Tensor:
    rank = leaf.shape.rank
    shape = tf.shape(leaf)
    rest = [shape[n] if leaf.shape[n] is None else leaf.shape[n] for n in range(1, rank)]
    piece = tf.slice(leaf, tf.stack([start] + [0] * (rank - 1)), tf.stack([size, *rest]), name="micro_batch")
    return tf.ensure_shape(piece, [size if isinstance(size, int) else None, *leaf.shape[1:]])


def accumulator_dtype(dtype: Any) -> tf.DType:
    """The type that gradients of ``dtype`` are summed in: float32, or wider where they are."""
    dtype = tf.as_dtype(dtype)
    return dtype if dtype in (tf.float64, tf.complex64, tf.complex128) else tf.float32


def empty_accumulators(variables: Sequence[Any]) -> Carried:
    """One zero per variable, of its shape.

    Raises:
        UnsupportedStep: for a variable of an unknown shape.
    """
    for variable in variables:
        if not tf.TensorShape(variable.shape).is_fully_defined():
            raise UnsupportedStep(
                f"the variable {variable.name!r} has the shape {variable.shape}; a gradient can only be "
                "accumulated for a known one"
            )
    return [tf.zeros(tuple(v.shape), accumulator_dtype(v.dtype)) for v in variables]


def added(total: tf.Tensor, gradient: Any) -> tf.Tensor:
    """``total + gradient``; nothing where there is no gradient, at its rows only where it is sparse."""
    if gradient is None:
        return total
    if isinstance(gradient, tf.IndexedSlices):
        values = tf.cast(gradient.values, total.dtype)
        return tf.tensor_scatter_nd_add(total, gradient.indices[:, tf.newaxis], values)
    return total + tf.cast(gradient, total.dtype)
