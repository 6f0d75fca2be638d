"""How TensorFlow's operations can be cut along an axis, and which of their inputs are parameters.

A *parameter* is an input whose value must be known to tell how an operation can be cut: a shape, axes, a permutation. A
slice of the operation reads a constant in its place. All other inputs are operands.

The first axes of a tensor, taken together, count as one more axis, see ``remat.transform.merged_axes``.

An operation that is missing here ends a region that runs in slices; random ones are missing on purpose. Each entry is
tested against the operation itself, in ``tests/tensorflow/test_tf_separable_ops.py``: what the slices make is compared
with what the whole makes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import tensorflow as tf

from remat.tensorflow.trace import op_facts
from remat.transform.merged_axes import Shape, count_merged, merged, merged_shape, reshaped_ways, with_merged
from remat.transform.separable import SUMMED, Part, Way

Parameters: TypeAlias = Mapping[int, Any]
"""The values of an operation's parameters, as arrays, by the numbers of its inputs."""

_Rule: TypeAlias = Callable[[tf.Operation, Parameters, list[Shape], list[Shape]], list[Way]]

_TO_THE_END: Final = 2**31 - 1
"""As the end of a slice: TensorFlow takes the end of the axis instead, since no axis is as long."""


def parameter_inputs(op: tf.Operation) -> tuple[int, ...]:
    """The numbers of the inputs that are parameters."""
    if op.type == "ConcatV2":
        return (len(op.inputs) - 1,)
    return _PARAMETERS.get(op.type, ())


def ways_of(
    op: tf.Operation, parameters: Parameters, operands: Sequence[Shape], results: Sequence[Shape]
) -> tuple[Way, ...]:
    """The ways to cut an operation; none where its kind is not known.

    Args:
        op: the operation, for its type and attributes.
        parameters: values of those inputs that ``parameter_inputs`` names.
        operands: the shapes of its other inputs, in their order.
        results: the shapes of its outputs.
    """
    rule = _RULES.get(op.type) or (_pointwise if op.type in op_facts.ELEMENTWISE else None)
    if rule is None:
        return ()
    found: dict[tuple[tuple[int | None, ...], tuple[Part, ...]], None] = {}
    # Merged axes come first: between the same two values they leave more units than axes of their own.
    ways = [*_merged_ways(op, parameters, operands, results), *rule(op, parameters, list(operands), list(results))]
    for way in ways:
        cut = [(operands, way.inputs), (results, way.outputs)]
        sizes = [
            with_merged(shapes[n])[axis]
            for shapes, parts in cut
            for n, axis in enumerate(parts)
            if isinstance(axis, int)
        ]
        if min(sizes, default=0) > 1:
            found[way.inputs, way.outputs] = None
    return tuple(Way(*one) for one in found)


def sliced_parameters(
    op: tf.Operation, parameters: Parameters, way: Way, operands: Sequence[Shape], results: Sequence[Shape]
) -> dict[int, Any]:
    """The parameters of a slice that differ from those of the whole operation.

    Args:
        op: the whole operation.
        parameters: its parameters.
        way: how it is cut.
        operands: the shapes of its other inputs, in their order.
        results: the shapes of its outputs.

    Returns:
        By the numbers of the inputs the values, None for the length of the slice.
    """
    axis, made = way.inputs[0], way.outputs[0]
    shape: list[int | None] = list(results[0])
    if isinstance(made, int):
        count = count_merged(results[0], made)
        shape = list(merged_shape(results[0], count))
        shape[made if count == 1 else 0] = None
    if op.type in _STATED_SHAPE:
        return {_STATED_SHAPE[op.type]: shape}
    gone = count_merged(operands[0], axis) - 1 if axis is not None and operands else 0
    if gone and op.type == "Transpose":
        return {1: [0, *(int(axis) - gone for axis in parameters[1][gone + 1 :])]}
    if gone:
        return {1: _with_fewer_axes(op, parameters[1], gone, len(operands[0]))} if op.type in _TOLD_AXES else {}
    if op.type == "Slice" and axis is not None:
        return {2: _with(parameters[2], axis, -1)}
    if op.type == "StridedSlice" and axis is not None:
        return {2: _with(parameters[2], axis, _TO_THE_END)} if axis < len(parameters[2]) else {}
    if op.type == "StridedSliceGrad" and isinstance(way.outputs[0], int):
        place = way.outputs[0]
        ends = {2: _with(parameters[2], place, _TO_THE_END)} if place < len(parameters[2]) else {}
        return {0: shape, **ends}
    return {}


def _with_fewer_axes(op: tf.Operation, told: Any, gone: int, rank: int) -> Any:
    """The axes that an operation is told, once the first ``gone + 1`` axes of its operand are one."""
    more = 1 if op.type == "ExpandDims" else 0
    axes = [max(0, int(axis) % (rank + more) - gone) for axis in np.ravel(told)]
    return list(dict.fromkeys(axes)) if np.ndim(told) else axes[0]


def _with(values: Any, place: int, value: int) -> list[int | None]:
    changed: list[int | None] = [int(one) for one in np.ravel(values)]
    changed[place] = value
    return changed


def _of(shape: Shape) -> range:
    return range(len(shape))


def _pointwise(op: tf.Operation, parameters: Parameters, operands: list[Shape], results: list[Shape]) -> list[Way]:
    """Each element of a result is made of the elements at the same place; what is broadcast is read whole."""
    made = results[0]
    ways = []
    for axis in _of(made):
        own = [axis - (len(made) - len(shape)) for shape in operands]
        inputs = tuple(
            place if place >= 0 and shape[place] == made[axis] else None
            for place, shape in zip(own, operands, strict=True)
        )
        ways.append(Way(inputs, (axis,)))
    return ways


def _select(op: tf.Operation, parameters: Parameters, operands: list[Shape], results: list[Shape]) -> list[Way]:
    """The first version of ``Select`` takes a vector that chooses between rows."""
    if operands[0] != operands[1]:
        return [Way((0 if operands[0] else None, 0, 0), (0,))] if len(operands[0]) <= 1 and results[0] else []
    return _pointwise(op, parameters, operands, results)


def _product(op: tf.Operation, parameters: Parameters, operands: list[Shape], results: list[Shape]) -> list[Way]:
    """Two matrices, or batches of them, any of which may be transposed; a batch of one is broadcast."""
    names = ("transpose_a", "transpose_b") if op.type == "MatMul" else ("adj_x", "adj_y")
    turned = [bool(op.get_attr(name)) for name in names]
    left, right = operands
    made = len(results[0])
    rows, inner = (len(left) - 1, len(left) - 2) if turned[0] else (len(left) - 2, len(left) - 1)
    other_inner, columns = (len(right) - 1, len(right) - 2) if turned[1] else (len(right) - 2, len(right) - 1)
    ways = [
        Way((rows, None), (made - 2,)),
        Way((None, columns), (made - 1,)),
        Way((inner, other_inner), (SUMMED,)),
    ]
    for axis in range(made - 2):
        own = [axis - (made - len(shape)) for shape in operands]
        inputs = [
            place if place >= 0 and shape[place] == results[0][axis] else None
            for place, shape in zip(own, operands, strict=True)
        ]
        ways.append(Way(tuple(inputs), (axis,)))
    return ways


def _einsum(op: tf.Operation, parameters: Parameters, operands: list[Shape], results: list[Shape]) -> list[Way]:
    """Letters of the result stay, and over the others the slices are summed."""
    equation = op.get_attr("equation").decode().replace(" ", "")
    read, _, made = equation.partition("->")
    terms = read.split(",")
    if "." in equation or any(len(set(term)) < len(term) for term in (*terms, made)):
        return []
    ways = []
    for letter in dict.fromkeys(read.replace(",", "")):
        inputs = tuple(term.index(letter) if letter in term else None for term in terms)
        ways.append(Way(inputs, (made.index(letter) if letter in made else SUMMED,)))
    return ways


def _channel(op: tf.Operation, shape: Shape) -> int:
    return 1 if op.get_attr("data_format") == b"NCHW" else len(shape) - 1


def _bias(op: tf.Operation, parameters: Parameters, operands: list[Shape], results: list[Shape]) -> list[Way]:
    channel = _channel(op, operands[0])
    return [Way((axis, 0 if axis == channel else None), (axis,)) for axis in _of(operands[0])]


def _bias_gradient(op: tf.Operation, parameters: Parameters, operands: list[Shape], results: list[Shape]) -> list[Way]:
    channel = _channel(op, operands[0])
    return [Way((axis,), (0 if axis == channel else SUMMED,)) for axis in _of(operands[0])]


def _all_but_last(op: tf.Operation, parameters: Parameters, operands: list[Shape], results: list[Shape]) -> list[Way]:
    rest = (None,) * (len(operands) - 1)
    return [Way((axis, *rest), (axis,) * len(results)) for axis in range(len(operands[0]) - 1)]


def _by_rows(op: tf.Operation, parameters: Parameters, operands: list[Shape], results: list[Shape]) -> list[Way]:
    """Rows of all operands make rows of all results; one row for all is read whole."""
    rows = results[0][0]
    inputs = tuple(0 if shape and shape[0] == rows else None for shape in operands)
    return [Way(inputs, (0,) * len(results))]


def _reshaped(op: tf.Operation, parameters: Parameters, operands: list[Shape], results: list[Shape]) -> list[Way]:
    """An axis stays where as much lies in front of it before and after."""
    before, after = operands[0], results[0]
    return [
        Way((axis,), (place,))
        for axis in _of(before)
        for place in _of(after)
        if math.prod(before[:axis]) == math.prod(after[:place]) and before[axis] > 1 and after[place] > 1
    ]


def _without(shape: Shape, gone: set[int]) -> list[Way]:
    kept = [axis for axis in _of(shape) if axis not in gone]
    return [Way((axis,), (place,)) for place, axis in enumerate(kept)]


def _transposed(op: tf.Operation, parameters: Parameters, operands: list[Shape], results: list[Shape]) -> list[Way]:
    return [Way((int(axis),), (place,)) for place, axis in enumerate(parameters[1])]


def _expanded(op: tf.Operation, parameters: Parameters, operands: list[Shape], results: list[Shape]) -> list[Way]:
    new = int(np.ravel(parameters[1])[0]) % len(results[0])
    return [Way((axis,), (axis + (axis >= new),)) for axis in _of(operands[0])]


def _squeezed(op: tf.Operation, parameters: Parameters, operands: list[Shape], results: list[Shape]) -> list[Way]:
    shape = operands[0]
    gone = {axis % len(shape) for axis in op.get_attr("squeeze_dims")} if shape else set()
    # Without them every axis of length 1 goes, and a slice may have one more.
    return _without(shape, gone) if gone else []


def _reduced(is_sum: bool) -> _Rule:
    """A reduction: what is not reduced stays, and a sum is the sum of the slices' sums."""

    def rule(op: tf.Operation, parameters: Parameters, operands: list[Shape], results: list[Shape]) -> list[Way]:
        shape = operands[0]
        over = {int(axis) % len(shape) for axis in np.ravel(parameters[1])} if shape else set()
        gone: set[int] = set() if op.get_attr("keep_dims") else over
        ways = [way for way in _without(shape, gone) if way.inputs[0] not in over]
        return ways + [Way((axis,), (SUMMED,)) for axis in sorted(over) if is_sum]

    return rule


def _half_square(op: tf.Operation, parameters: Parameters, operands: list[Shape], results: list[Shape]) -> list[Way]:
    return [Way((axis,), (SUMMED,)) for axis in _of(operands[0])]


def _found(op: tf.Operation, parameters: Parameters, operands: list[Shape], results: list[Shape]) -> list[Way]:
    return _without(operands[0], {int(parameters[1]) % len(operands[0])})


def _one_hot(op: tf.Operation, parameters: Parameters, operands: list[Shape], results: list[Shape]) -> list[Way]:
    new = op.get_attr("axis") % len(results[0])
    return [Way((axis, None, None), (axis + (axis >= new),)) for axis in _of(operands[0])]


def _gathered(op: tf.Operation, parameters: Parameters, operands: list[Shape], results: list[Shape]) -> list[Way]:
    table, index = operands
    axis = int(parameters[2]) % len(table)
    batches = op.get_attr("batch_dims") % (len(index) + 1)
    ways = [Way((place, place), (place,)) for place in range(batches)]
    ways += [Way((None, place), (axis + place - batches,)) for place in range(batches, len(index))]
    ways += [Way((place, None), (place,)) for place in range(batches, axis)]
    wider = len(index) - batches - 1
    return ways + [Way((place, None), (place + wider,)) for place in range(axis + 1, len(table))]


def _summed_by_segment(
    op: tf.Operation, parameters: Parameters, operands: list[Shape], results: list[Shape]
) -> list[Way]:
    values, segments = operands
    ways = [Way((axis, axis), (SUMMED,)) for axis in _of(segments)]
    narrower = len(segments) - 1
    return ways + [Way((axis, None), (axis - narrower,)) for axis in range(len(segments), len(values))]


def _joined(op: tf.Operation, parameters: Parameters, operands: list[Shape], results: list[Shape]) -> list[Way]:
    own = int(parameters[len(operands)]) % len(results[0])
    return [Way((axis,) * len(operands), (axis,)) for axis in _of(results[0]) if axis != own]


def _stacked(op: tf.Operation, parameters: Parameters, operands: list[Shape], results: list[Shape]) -> list[Way]:
    new = op.get_attr("axis") % len(results[0])
    return [Way((axis,) * len(operands), (axis + (axis >= new),)) for axis in _of(operands[0])]


def _unstacked(op: tf.Operation, parameters: Parameters, operands: list[Shape], results: list[Shape]) -> list[Way]:
    gone = op.get_attr("axis") % len(operands[0])
    axes = [axis for axis in _of(operands[0]) if axis != gone]
    return [Way((axis,), (axis - (axis > gone),) * len(results)) for axis in axes]


def _where_whole(op: tf.Operation, parameters: Parameters, operands: list[Shape], results: list[Shape]) -> list[Way]:
    """A part of a tensor, or a tensor around which something is put: cut along the axes that stay as they are."""
    before, after = operands[0], results[0]
    rest = (None,) * (len(operands) - 1)
    return [Way((axis, *rest), (axis,)) for axis in _of(before) if before[axis] == after[axis]]


def _part_by_strides(
    op: tf.Operation, parameters: Parameters, operands: list[Shape], results: list[Shape]
) -> list[Way]:
    before = operands[0]
    kept = _axes_kept(op, parameters, 1, len(before))
    after = results[0]
    return [Way((axis,), (place,)) for place, axis in enumerate(kept) if before[axis] == after[place]]


def _strides_gradient(
    op: tf.Operation, parameters: Parameters, operands: list[Shape], results: list[Shape]
) -> list[Way]:
    made = results[0]
    kept = _axes_kept(op, parameters, 1, len(made))
    return [Way((place,), (axis,)) for place, axis in enumerate(kept) if made[axis] == operands[0][place]]


def _axes_kept(op: tf.Operation, parameters: Parameters, begin: int, rank: int) -> list[int]:
    """The axes of what a strided slice is taken of that its result has; none where they are counted otherwise."""
    if op.get_attr("ellipsis_mask") or op.get_attr("new_axis_mask"):
        return []
    if any(int(stride) < 0 for stride in np.ravel(parameters[begin + 2])):
        return []  # What is turned round would be turned within each slice.
    gone = op.get_attr("shrink_axis_mask")
    return [axis for axis in range(rank) if not gone >> axis & 1]


def _cumulated(op: tf.Operation, parameters: Parameters, operands: list[Shape], results: list[Shape]) -> list[Way]:
    own = int(parameters[1]) % len(operands[0])
    return [Way((axis,), (axis,)) for axis in _of(operands[0]) if axis != own]


def _filled(op: tf.Operation, parameters: Parameters, operands: list[Shape], results: list[Shape]) -> list[Way]:
    return [Way((None,), (axis,)) for axis in _of(results[0])]


def _merged_ways(
    op: tf.Operation, parameters: Parameters, operands: Sequence[Shape], results: Sequence[Shape]
) -> list[Way]:
    """The ways to cut along merged axes, and along first axes that another shape has merged."""
    if not operands:
        return []
    before, after = operands[0], results[0]
    if op.type == "Reshape":
        return [Way((axis,), (made,)) for axis, made in reshaped_ways(before, after)]
    return [
        Way(tuple(inputs), tuple(outputs))
        for count in range(2, max(map(len, operands)) + 1)
        for inputs, outputs in _merged_way(op, parameters, operands, results, count)
    ]


def _merged_way(
    op: tf.Operation, parameters: Parameters, operands: Sequence[Shape], results: Sequence[Shape], count: int
) -> list[tuple[list[int | None], list[Part]]]:
    """The way to cut an operation along its first ``count`` axes taken together; none or one."""
    first, made = operands[0], results[0]
    rank = len(first)
    rest: list[int | None] = [None] * (len(operands) - 1)
    stays: tuple[list[int | None], list[Part]]
    stays = [merged(first, count), *rest], [merged(shape, count) for shape in results]
    if _RULES.get(op.type, _pointwise) is _pointwise and (op.type in _RULES or op.type in op_facts.ELEMENTWISE):
        if count > len(made):
            return []
        inputs: list[int | None] = []
        for shape in operands:
            if len(shape) == len(made) and shape[:count] == made[:count]:
                inputs.append(merged(shape, count))
            elif len(shape) <= len(made) - count:
                inputs.append(None)
            else:
                return []
        return [(inputs, [merged(made, count)])]
    if count > rank:
        return []
    behind = count < rank
    if op.type in _LAST_AXIS:
        is_last = "data_format" not in op.node_def.attr or _channel(op, first) == rank - 1
        if op.type == "BiasAddGrad":
            return [([merged(first, count)], [SUMMED])] if behind and is_last else []
        return [stays] if behind and is_last else []
    if op.type in _REDUCTIONS:
        over = {int(axis) % rank for axis in np.ravel(parameters[1])}
        if all(axis >= count for axis in over):
            return [stays]
        is_sum = op.type == "Sum" and over >= set(range(count))
        return [([merged(first, count)], [SUMMED])] if is_sum else []
    if op.type in ("ArgMax", "ArgMin"):
        return [stays] if int(parameters[1]) % rank >= count else []
    if op.type == "ExpandDims":
        return [stays] if int(np.ravel(parameters[1])[0]) % (rank + 1) >= count else []
    if op.type == "OneHot":
        return [stays] if op.get_attr("axis") == -1 else []
    if op.type == "Transpose":
        return [stays] if [int(axis) for axis in parameters[1][:count]] == list(range(count)) else []
    return []


_RULES: Final[dict[str, _Rule]] = {
    **dict.fromkeys(
        (
            *("AddN", "Cast", "Equal", "NotEqual", "Less", "LessEqual", "Greater", "GreaterEqual", "SelectV2"),
            *("Identity", "StopGradient", "Snapshot", "PreventGradient", "CheckNumerics", "ZerosLike", "OnesLike"),
            *("IsNan", "IsInf", "IsFinite", "LogicalNot", "Bitcast", "BroadcastTo"),
        ),
        _pointwise,
    ),
    "Select": _select,
    **dict.fromkeys(op_facts.MATRIX_PRODUCTS, _product),
    "Einsum": _einsum,
    "BiasAdd": _bias,
    "BiasAddGrad": _bias_gradient,
    **dict.fromkeys(("Softmax", "LogSoftmax", "TopKV2"), _all_but_last),
    **dict.fromkeys(("SparseSoftmaxCrossEntropyWithLogits", "SoftmaxCrossEntropyWithLogits", "InTopKV2"), _by_rows),
    "Reshape": _reshaped,
    "Transpose": _transposed,
    "ExpandDims": _expanded,
    "Squeeze": _squeezed,
    "Sum": _reduced(True),
    **dict.fromkeys(("Max", "Min", "Mean", "Prod", "All", "Any"), _reduced(False)),
    "L2Loss": _half_square,
    **dict.fromkeys(("ArgMax", "ArgMin"), _found),
    "OneHot": _one_hot,
    "GatherV2": _gathered,
    "UnsortedSegmentSum": _summed_by_segment,
    "ConcatV2": _joined,
    "Pack": _stacked,
    "Unpack": _unstacked,
    **dict.fromkeys(("Slice", "Tile", "Pad", "PadV2"), _where_whole),
    "StridedSlice": _part_by_strides,
    "StridedSliceGrad": _strides_gradient,
    "Cumsum": _cumulated,
    "Fill": _filled,
}
"""By the type of the operation; those of ``op_facts.ELEMENTWISE`` that are missing are cut as ``_pointwise`` says."""

_PARAMETERS: Final[dict[str, tuple[int, ...]]] = {
    **dict.fromkeys(("Reshape", "Transpose", "ExpandDims", "BroadcastTo", "Sum", "Max", "Min", "Mean", "Prod"), (1,)),
    **dict.fromkeys(("All", "Any", "ArgMax", "ArgMin", "Tile", "Pad", "Cumsum", "TopKV2", "OneHot", "PadV2"), (1,)),
    **dict.fromkeys(("GatherV2", "UnsortedSegmentSum", "InTopKV2"), (2,)),
    "Slice": (1, 2),
    "StridedSlice": (1, 2, 3),
    "StridedSliceGrad": (0, 1, 2, 3),
    "Fill": (0,),
}
"""Which inputs are parameters; of ``ConcatV2`` it is the last one."""

_REDUCTIONS: Final = frozenset({"Sum", "Max", "Min", "Mean", "Prod", "All", "Any"})
_LAST_AXIS: Final = frozenset({"BiasAdd", "BiasAddGrad", "LogSoftmax", "Softmax", "TopKV2"})
_TOLD_AXES: Final = _REDUCTIONS | {"ArgMax", "ArgMin", "ExpandDims"}
"""Kinds that are told axes of their operand."""

_STATED_SHAPE: Final = {"Reshape": 1, "BroadcastTo": 1, "Fill": 0}
"""Operations that are told the shape of their result, and by which input."""
