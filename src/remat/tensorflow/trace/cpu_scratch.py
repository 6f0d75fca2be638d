"""Scratch memory of TensorFlow's own CPU kernels, which run where oneDNN is off: beside what they read and write.

Gradients of convolutions unfold images for a matrix product: so many at once as fill what the kernel takes for the size
of a cache. All products pack blocks of their operands. ``Einsum`` copies what it has to transpose. Sums over segments,
the gradients of gathers among them, count the rows of each. A reduction over axes that do not lie together copies what
it reads. Found in ``conv_grad_filter_ops.cc``, ``conv_grad_input_ops.cc``, ``maxpooling_op.cc``, ``einsum_op_impl.h``
and ``segment_reduction_ops_impl.h``, and compared with a counter of the heap around single operations
(docs/tensorflow_peaks.md).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np
import tensorflow as tf

from remat.tensorflow.trace.op_facts import MATRIX_PRODUCTS
from remat.tensorflow.trace.threads import kernel_threads

Shape: TypeAlias = tuple[int, ...]

_SEGMENTS: Final = frozenset({"UnsortedSegmentSum", "UnsortedSegmentMax", "UnsortedSegmentMin", "UnsortedSegmentProd"})

_REDUCTIONS: Final = frozenset({"Sum", "Mean", "Max", "Min", "Prod", "All", "Any", "EuclideanNorm"})
_MOST_RUNS: Final = 3
"""A reduction goes over its input as it lies where axes that are reduced and axes that are kept are so many runs at
most; else it copies it, the reduced axes last (``reduction_ops_common.h``). A normalisation over groups has four."""

_COPY_WHAT_THEY_READ: Final = frozenset({"Cumsum", "Cumprod", "SoftmaxCrossEntropyWithLogits"})
"""Beside their results they take as much as their first input, past TensorFlow's counter: the heap shows it."""

NOT_IN_ONEDNN: Final = _SEGMENTS | _REDUCTIONS | _COPY_WHAT_THEY_READ | {"Einsum"}
"""Operations that oneDNN has no kernels for: TensorFlow's own run on every CPU."""

_UNFOLDED_BYTES: Final = 30 << 20
"""What one round of a convolution's gradient works on: the size of a cache, a constant of those kernels."""

_THREAD_BYTES: Final = 256 << 10
"""From so many bytes of one image for each thread on, the gradient of the input takes one image after the other."""

_PACKED_DEPTH: Final = 512
_PACKED_WIDTH: Final = 2048
_PACKED_HEIGHT: Final = 1024
"""Rows and columns of the blocks that a product packs, at most. Measured on one CPU, whose caches decide them: packed
were 1.4 to 5.1 MiB where these say 2.0 to 6.0. Too small, a step takes more than predicted by what is missing; too
large, so much of the budget stays unused."""


def scratch_bytes(op: tf.Operation, inputs: Sequence[Shape | None], outputs: Sequence[Shape | None]) -> int:
    """Bytes of scratch memory of one run; 0 where nothing is known of any, or where a shape is unknown.

    Args:
        op: the operation.
        inputs: shapes of its inputs, None where unknown.
        outputs: likewise.
    """
    kind = op.type
    size = op.outputs[0].dtype.size if op.outputs else 0
    if kind == "MaxPoolGrad" and inputs[1] is not None:
        return math.prod(inputs[1]) * (size + 8)  # The result once more, and where each of its values came from.
    if kind in _SEGMENTS and outputs[0] is not None:
        return int(outputs[0][0] * op.inputs[1].dtype.size)  # For each segment, how many rows it has.
    if kind in _COPY_WHAT_THEY_READ and inputs[0] is not None:
        return math.prod(inputs[0]) * size
    if kind in _REDUCTIONS and inputs[0] is not None:
        return math.prod(inputs[0]) * size if _runs(inputs[0], op.inputs[1]) > _MOST_RUNS else 0
    known = [shape for shape in (*inputs, *outputs) if shape is not None]
    if len(known) < len(inputs) + len(outputs):
        return 0
    if kind == "Conv2D" and _is_channels_last(op):
        images, filters = known[0], known[1]
        return _converted(op, math.prod(images)) + _packed(math.prod(known[2][:3]), math.prod(filters[:3]), filters[3])
    if kind in ("Conv2DBackpropFilter", "Conv2DBackpropInput") and _is_channels_last(op):
        filters = known[3] if kind == "Conv2DBackpropFilter" else known[1]
        return _of_gradient(op, known[2], filters, size)
    if kind == "Einsum":
        return sum(math.prod(known[place]) for place in _transposed(op.get_attr("equation").decode())) * size
    if kind in MATRIX_PRODUCTS:
        inner = known[0][-2 if op.get_attr("transpose_a" if kind == "MatMul" else "adj_x") else -1]
        copies = _converted(op, sum(math.prod(shape) for shape in known))
        return copies + _packed(known[2][-2], inner, known[2][-1])
    return 0


def _runs(shape: Shape, axes: tf.Tensor) -> int:
    """How many runs of axes that are reduced, or kept, side by side a reduction sees; 0 where its axes are unknown."""
    reduced = tf.get_static_value(axes)
    if reduced is None:
        return 0
    places = {int(axis) % len(shape) for axis in np.ravel(reduced)} if shape else set()
    return len(list(itertools.groupby(place in places for place, length in enumerate(shape) if length != 1)))


def _transposed(equation: str) -> list[int]:
    """Which of the operands, and behind them the result, an ``Einsum`` copies to transpose them.

    It works on operands whose axes stand as: in both operands and the result, in one operand and the result, in both
    operands only, in one operand only; the axes of one kind as they appear first in the equation. Operands whose middle
    two kinds are exchanged are taken as they are.
    """
    read, made = equation.split("->")
    operands = [_axes(operand) for operand in read.split(",")]
    result = _axes(made)
    seen = list(dict.fromkeys(axis for operand in operands for axis in operand))

    def kind(axis: str) -> int:
        in_both = sum(axis in operand for operand in operands) > 1
        return (0 if in_both else 1) if axis in result else (2 if in_both else 3)

    def place(axis: str) -> tuple[int, int]:
        return kind(axis), seen.index(axis)

    def exchanged(axis: str) -> tuple[int, int]:
        return (0, 2, 1, 3)[kind(axis)], seen.index(axis)

    copied = [
        number
        for number, operand in enumerate(operands)
        if operand not in (sorted(operand, key=place), sorted(operand, key=exchanged))
    ]
    together = sorted((axis for axis in seen if kind(axis) == 0), key=place)
    alone = [axis for operand in operands for axis in sorted(operand, key=place) if kind(axis) == 1]
    return copied if result == [*together, *alone] else [*copied, len(operands)]


def _axes(subscripts: str) -> list[str]:
    """The labels of an operand's axes; an ellipsis counts as one."""
    return list(subscripts.replace(" ", "").replace("...", "."))


def _of_gradient(op: tf.Operation, result: Shape, filters: Shape, size: int) -> int:
    """Of a convolution's gradient: the images that are unfolded together, and the product."""
    pixels, window, channels = math.prod(result[1:3]), math.prod(filters[:3]), result[3]
    of_one = pixels * window + pixels * channels + window * channels
    if not of_one:
        return 0
    together = -(-(_UNFOLDED_BYTES // size) // of_one)
    if op.type == "Conv2DBackpropFilter":
        product = size * window * channels + _packed(window, pixels * together, channels)
    else:
        if result[0] == 1 or of_one // kernel_threads() >= _THREAD_BYTES // size:
            together = 1
        product = _packed(window, channels, pixels)
    return size * together * pixels * window + product


def _packed(rows: int, inner: int, columns: int) -> int:
    """Bytes of the blocks that a product packs, in float32."""
    short, long = sorted((rows, columns))
    return 4 * min(inner, _PACKED_DEPTH) * (min(short, _PACKED_WIDTH) + min(long, _PACKED_HEIGHT))


def _converted(op: tf.Operation, elements: int) -> int:
    """Bytes of copies in float32 that a kernel makes of so many elements of half precision."""
    return 4 * elements if op.outputs[0].dtype in (tf.float16, tf.bfloat16) else 0


def _is_channels_last(op: tf.Operation) -> bool:
    return bool(op.get_attr("data_format") == b"NHWC")
