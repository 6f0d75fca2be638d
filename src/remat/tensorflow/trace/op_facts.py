"""What remat knows of TensorFlow's operations: which may repeat, which are views, which work in place, what they cost.

Everything unknown is kept: an operation may run twice only if TensorFlow's own registry has it as
stateless and it is not named below.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import tensorflow as tf

# Outputs share the first input's buffer: the kernels hand the buffer on and copy nothing.
VIEWS = frozenset(
    {
        "CheckNumerics",
        "EnsureShape",
        "ExpandDims",
        "Identity",
        "PlaceholderWithDefault",
        "PreventGradient",
        "ReadVariableOp",
        "Reshape",
        "Snapshot",
        "Squeeze",
        "StopGradient",
    }
)

# As many outputs as inputs, each sharing its own input's buffer.
VIEW_LISTS = frozenset({"IdentityN"})

_REDUCTIONS = frozenset({"All", "Any", "Max", "Mean", "Min", "Prod", "Sum"})

# Read only the shape of their input: they run as soon as it exists and hold nothing.
METADATA = frozenset({"Rank", "Shape", "ShapeN", "Size"})

# oneDNN merges a BiasAddGrad with the filter gradient that reads the same tensor, wherever that stands. A control edge
# between the two would close a cycle; so would a way from one to the other through further ops.
MERGED_BY_ONEDNN = {
    "BiasAddGrad": frozenset(
        {
            "Conv2DBackpropFilter",
            "Conv3DBackpropFilterV2",
            "DepthwiseConv2dNativeBackpropFilter",
            "MatMul",
        }
    )
}

# Not operations of the step: their value is resident while the step's function exists.
RESIDENT = frozenset({"Const", "Placeholder", "VarHandleOp"})

ASSIGNMENTS: Final = ("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp", "ResourceApply")
"""How the kinds of operations begin that write the whole of the variable that they read first."""

# Stateless in the registry, yet never repeated: control flow, calls out of the graph, other devices.
_NEVER_REPEATED_PREFIXES = ("Collective", "Nccl", "XlaHost", "_Host", "_Recv", "_Send", "TPU")
_NEVER_REPEATED = frozenset(
    {
        "Case",
        "Enter",
        "Exit",
        "If",
        "LoopCond",
        "Merge",
        "NextIteration",
        "NoOp",
        "PyFuncStateless",
        "Recv",
        "RemoteCall",
        "Send",
        "StatelessCase",
        "StatelessIf",
        "StatelessWhile",
        "Switch",
        "SymbolicGradient",
        "While",
    }
)
_HANDLES = frozenset({tf.resource, tf.variant, tf.string})

# Element-wise kernels that write into an input's buffer when nobody else needs it, by input number.
_UNARY = frozenset(
    [
        "Abs",
        "Acos",
        "Acosh",
        "Asin",
        "Asinh",
        "Atan",
        "Atanh",
        "BiasAdd",
        "Ceil",
        "ClipByValue",
        "Cos",
        "Cosh",
        "Digamma",
        "Elu",
        "Erf",
        "Erfc",
        "Erfinv",
        "Exp",
        "Expm1",
        "Floor",
        "Inv",
        "Invert",
        "LeakyRelu",
        "Lgamma",
        "Log",
        "Log1p",
        "LogSoftmax",
        "LogicalNot",
        "Ndtri",
        "Neg",
        "Reciprocal",
        "Relu",
        "Relu6",
        "Rint",
        "Round",
        "Rsqrt",
        "Selu",
        "Sigmoid",
        "Sign",
        "Sin",
        "Sinh",
        "Softmax",
        "Softplus",
        "Softsign",
        "Sqrt",
        "Square",
        "Tan",
        "Tanh",
    ]
)
_BINARY = frozenset(
    [
        "Add",
        "AddV2",
        "Atan2",
        "BitwiseAnd",
        "BitwiseOr",
        "Div",
        "DivNoNan",
        "EluGrad",
        "FloorDiv",
        "FloorMod",
        "InvGrad",
        "LeakyReluGrad",
        "LogicalAnd",
        "LogicalOr",
        "Maximum",
        "Minimum",
        "Mod",
        "Mul",
        "MulNoNan",
        "Pow",
        "RealDiv",
        "ReciprocalGrad",
        "Relu6Grad",
        "ReluGrad",
        "RsqrtGrad",
        "SeluGrad",
        "SigmoidGrad",
        "SoftplusGrad",
        "SoftsignGrad",
        "SqrtGrad",
        "SquaredDifference",
        "Sub",
        "TanhGrad",
        "TruncateDiv",
        "Xdivy",
        "Xlog1py",
        "Xlogy",
    ]
)
ELEMENTWISE = (_UNARY | _BINARY) - {"BiasAdd", "LogSoftmax", "Softmax"}
"""Kinds of operations each of whose results' elements is made of the operands' elements at the same place."""

_IN_PLACE = {
    **dict.fromkeys(_UNARY, ((0,), 0)),
    **dict.fromkeys(_BINARY, ((0, 1), 0)),
    # Their second result is the gradient of the logits, which are the first input.
    **dict.fromkeys(["SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits"], ((0,), 1)),
    **dict.fromkeys(["Select", "SelectV2"], ((1, 2), 0)),
    **dict.fromkeys(["MatrixBandPart", "MatrixSetDiag", "MatrixSetDiagV2", "MatrixSetDiagV3"], ((0,), 0)),
}
"""Numbers of the inputs whose buffer a result may take over, and of that result. Each kind was measured; one that is
missing is predicted to take its result's bytes more than it does."""


def may_repeat(op: tf.Operation) -> bool:
    """May ``op`` run a second time with the same result and no other effect?"""
    if op.type in _NEVER_REPEATED or op.type.startswith(_NEVER_REPEATED_PREFIXES):
        return False
    if op.op_def.is_stateful or not hasattr(tf.raw_ops, op.type):
        return False
    return not any(t.dtype.base_dtype in _HANDLES or t.dtype._is_ref_dtype for t in [*op.inputs, *op.outputs])


# The graph optimizer makes other operations of these and of their neighbours: c * (a * b) becomes a * (c * b), and
# (a * b) / c becomes a * (1/c * b), sums and products of more than two are regrouped, a power of three is x * (x * x),
# and the largest of f(x) is f of the largest x where f is monotonic. The result is the same to rounding, but it is
# another tensor, at another time, than a schedule says. A control edge does not last: of several operations made of one
# only one keeps it, and it is dropped where an input waits for as much, which the next exchange may take away.
REGROUPED = frozenset(
    {"Add", "AddN", "AddV2", "ArgMax", "ArgMin", "Div", "Max", "MaxPool", "Min", "Mul", "Pow", "RealDiv", "Sub"}
)


# Where one of these has control inputs, and its exponent is 3, TensorFlow (2.21) makes a Square of two inputs of it,
# finds that there is no such thing, and runs the whole function as it was written: a Gelu in tanh's form took 3.9 of
# its plain time, and a GPT-2 1.6.
BROKEN_BY_CONTROL_INPUTS = frozenset({"Pow"})


def in_place(op: tf.Operation) -> tuple[tuple[int, ...], int]:
    """Numbers of the inputs whose buffer an output may take over, in the kernel's order, and of that output.

    A kernel takes its first input's where it may. The graph optimizer sorts the inputs of operations that commute by
    their names before it looks for common subexpressions.
    """
    inputs, output = (tuple(range(len(op.inputs))), 0) if op.type == "AddN" else _IN_PLACE.get(op.type, ((), 0))
    if op.op_def.is_commutative:
        inputs = tuple(sorted(inputs, key=lambda number: op.inputs[number].name.removesuffix(":0")))
    return inputs, output


Shape = tuple[int, ...] | None


def is_view(op: tf.Operation, source: Shape, result: Shape) -> bool:
    """Does the first output share the first input's buffer?

    Reductions that reduce nothing and transpositions that move nothing hand it on, too: the gradient of what was
    broadcast over no axis, say, or of an einsum's permutation that is none.

    Args:
        op: the operation.
        source: shape of its first input, None where unknown.
        result: of its first output.
    """
    if op.type in VIEWS:
        return True
    if source is None or result is None:
        return False
    if op.type in _REDUCTIONS:
        return math.prod(source) == math.prod(result) > 0
    if op.type != "Transpose":
        return False
    permutation = _permutation(op.inputs[1])
    if permutation is None:
        return False
    moved = [axis for axis in permutation if source[axis] != 1]
    return moved == sorted(moved) or _is_read_by_products_as(op, permutation)


def _is_read_by_products_as(op: tf.Operation, permutation: Sequence[int]) -> bool:
    """Do only matrix products read it, with rows and columns exchanged? The graph optimizer has them read its input."""
    last = len(permutation) - 1
    exchanged = [*range(last - 1), last, last - 1]
    readers = op.outputs[0].consumers()
    return permutation == exchanged and bool(readers) and all(reader.type in MATRIX_PRODUCTS for reader in readers)


def _permutation(tensor: tf.Tensor) -> list[int] | None:
    """The axes that a transposition puts first, second and so on, if the trace knows them."""
    inverse = tensor.op.type == "InvertPermutation"
    axes = tf.get_static_value(tensor.op.inputs[0] if inverse else tensor)
    if axes is None:
        return None
    return [int(axis) for axis in (np.argsort(axes) if inverse else axes)]


MATRIX_PRODUCTS = frozenset({"MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"})


def converted_from_half(op: tf.Operation, shapes: Sequence[Shape]) -> list[tuple[int, ...]]:
    """Shapes of the float32 copies that a CPU kernel makes of what it reads and writes in float16.

    Args:
        op: the operation; only matrix products are computed this way.
        shapes: of its inputs and outputs, None where unknown.
    """
    if op.type not in MATRIX_PRODUCTS or op.outputs[0].dtype != tf.float16:
        return []
    return [shape for shape in shapes if shape is not None]


# What a CPU's kernels take for each element of a result, in nanoseconds, where it is more than the traffic: measured on
# one core of an AMD EPYC of 2024 with TensorFlow 2.21 and oneDNN, most of them in the steps of BERT, EfficientNetB0 and
# DenseNet121. A product takes 1/230 ns for each operation there. Too low, plans recompute what is dear: the random
# numbers of a GPT-2's dropouts are 16 % of its step, and a roofline has them as .7 %.
_NANOSECONDS_PER_ELEMENT = {
    **dict.fromkeys(("RandomUniform", "StatelessRandomUniform", "StatelessRandomUniformV2"), 2.7),
    **dict.fromkeys(("StatelessRandomUniformInt", "StatelessRandomUniformIntV2"), 2.7),
    **dict.fromkeys(("RandomStandardNormal", "StatelessRandomNormal", "StatelessRandomNormalV2"), 4.5),
    **dict.fromkeys(("TruncatedNormal", "StatelessTruncatedNormal", "StatelessTruncatedNormalV2"), 4.5),
    **dict.fromkeys(("Exp", "Log", "Log1p", "Sigmoid", "Elu", "Selu", "LogSoftmax", "Erfc"), 0.5),
    **dict.fromkeys(("Tanh", "Erf", "Softmax", "SelectV2", "Select", "SquaredDifference"), 0.25),
    **dict.fromkeys(("Sin", "Cos", "Atan", "Atan2"), 0.8),
    **dict.fromkeys(("Expm1", "Softplus", "FloorMod", "UnsortedSegmentSum"), 2.3),
    **dict.fromkeys(("Erfinv", "Ndtri", "Cumsum", "Cumprod"), 5.0),
    **dict.fromkeys(("Tan", "Sinh", "Cosh", "Lgamma", "Digamma", "Pow"), 8.5),
}
_FLOPS_PER_NANOSECOND: Final = 230.0

# How many times longer than a product of two matrices others take on that core. Convolutions: those of the demo's
# residual network, MobileNetV3Small, EfficientNetB0 and DenseNet121; by channel, 57 to 100 operations in a nanosecond,
# and the gradients of filters 18 times their roofline. ``Einsum``, which copies what it has to transpose, and batches
# of products: attention in BERT and a vision transformer. Gradients of filters are never repeated, so too high a figure
# of them makes recomputation look cheap; too high a figure of the others, dear.
_SLOWER_PRODUCTS = {
    "Einsum": 3.5,
    "BatchMatMulV2": 1.2,
    "Conv2D": 1.3,
    "Conv2DBackpropInput": 1.3,
    "Conv2DBackpropFilter": 1.6,
    "DepthwiseConv2dNative": 3.0,
    "DepthwiseConv2dNativeBackpropInput": 4.0,
    "DepthwiseConv2dNativeBackpropFilter": 16.0,
}

_SIMPLE_POWERS = frozenset({-1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 3.0})
"""Powers that the graph optimizer makes products, roots and quotients of."""


def flops_on_cpu(op: tf.Operation, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> float:
    """As ``flops``; what is dear by itself on a CPU counts as what it takes in such operations.

    Args:
        op: the operation.
        inputs: shapes, None where unknown.
        outputs: likewise.
    """
    counted = flops(op, inputs, outputs) * _SLOWER_PRODUCTS.get(op.type, 1.0)
    each = _NANOSECONDS_PER_ELEMENT.get(op.type)
    if each is None or (op.type == "Pow" and _is_simple_power(op)):
        return counted
    return max(counted, each * _FLOPS_PER_NANOSECOND * math.prod(outputs[0] or ()))


def _is_simple_power(op: tf.Operation) -> bool:
    power = _static_power(op.inputs[1])
    return power is not None and power.size == 1 and float(power.item()) in _SIMPLE_POWERS


def _static_power(tensor: tf.Tensor) -> Any:
    """A constant, or the difference of two, which the gradient of a power has."""
    if tensor.op.type != "Sub":
        return tf.get_static_value(tensor)
    first, second = (tf.get_static_value(operand) for operand in tensor.op.inputs)
    return None if first is None or second is None else first - second


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
    if kind in MATRIX_PRODUCTS:
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
