"""What TensorFlow's kernels cost: floating-point operations for the roofline cost model, and tensors of their own."""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf

Shape = tuple[int, ...] | None


_MATRIX_PRODUCTS = frozenset({"MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"})


def converted_from_half(op: tf.Operation, shapes: Sequence[Shape]) -> list[tuple[int, ...]]:
    """Shapes of the float32 copies that a CPU kernel makes of what it reads and writes in float16.

    Args:
        op: the operation; only matrix products are computed this way.
        shapes: of its inputs and outputs, None where unknown.
    """
    if op.type not in _MATRIX_PRODUCTS or op.outputs[0].dtype != tf.float16:
        return []
    return [shape for shape in shapes if shape is not None]


def flops(op: tf.Operation, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> float:
    """Floating-point operations of one run; a multiplication and an addition count as two.

    Args:
        op: the operation, for its type and attributes.
        inputs: shapes, None where unknown (then only the known parts count).
        outputs: likewise.
    """
    kind = op.type
    known_in = [shape or () for shape in inputs]
    known_out = [shape or () for shape in outputs]
    if kind in _MATRIX_PRODUCTS:
        transposed = op.get_attr("transpose_a" if kind == "MatMul" else "adj_x")
        left = known_in[0]
        inner = left[-2 if transposed else -1] if len(left) >= 2 else 1
        return 2.0 * math.prod(known_out[0]) * inner
    if kind in ("Conv2D", "Conv3D", "DepthwiseConv2dNative"):
        return _convolution(kind, filters=known_in[1], result=known_out[0])
    if kind in ("Conv2DBackpropInput", "Conv3DBackpropInputV2", "DepthwiseConv2dNativeBackpropInput"):
        return _convolution(kind, filters=known_in[1], result=known_in[2])
    if kind in ("Conv2DBackpropFilter", "Conv3DBackpropFilterV2", "DepthwiseConv2dNativeBackpropFilter"):
        return _convolution(kind, filters=known_out[0], result=known_in[2])
    if kind == "Einsum":
        return 2.0 * _einsum_points(op, known_in)
    return float(sum(math.prod(shape) for shape in known_out))


def _convolution(kind: str, filters: tuple[int, ...], result: tuple[int, ...]) -> float:
    """Each element of the result sums over a window of the filter (all input channels unless depthwise)."""
    if not filters:
        return 0.0
    window = filters[:-2] if kind.startswith("Depthwise") else filters[:-1]
    return 2.0 * math.prod(result) * math.prod(window)


def _einsum_points(op: tf.Operation, shapes: Sequence[tuple[int, ...]]) -> float:
    """Size of the full index space of an einsum; axes under an ellipsis count once."""
    equation = op.get_attr("equation").decode()
    sizes: dict[str, int] = {}
    extra = 1
    for term, shape in zip(equation.split("->")[0].split(","), shapes, strict=False):
        head, ellipsis, tail = term.partition("...")
        for label, size in zip(head, shape, strict=False):
            sizes[label] = max(size, sizes.get(label, 1))
        if tail:
            for label, size in zip(reversed(tail), reversed(shape), strict=False):
                sizes[label] = max(size, sizes.get(label, 1))
        if ellipsis:
            hidden = shape[len(head) : len(shape) - len(tail)]
            extra = max(extra, math.prod(hidden))
    return float(math.prod(sizes.values()) * extra)
