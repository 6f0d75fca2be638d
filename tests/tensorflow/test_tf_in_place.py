"""Does every kernel that the table names really write into its input's memory? Asked of the device's counter."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import tensorflow as tf

import remat
import remat.tensorflow
from remat.tensorflow.peak.device import current_device
from remat.tensorflow.trace import op_facts

SIDE = 1024
SIZE_BYTES = SIDE * SIDE * 4
INTEGERS = frozenset({"BitwiseAnd", "BitwiseOr", "Invert", "TruncateDiv"})
BOOLEANS = frozenset({"LogicalAnd", "LogicalNot", "LogicalOr"})
FURTHER = {"ClipByValue": {"clip_value_min": 0.1, "clip_value_max": 0.9}}
POSITIONS = [(kind, position) for kind in sorted(op_facts._IN_PLACE) for position in op_facts._IN_PLACE[kind][0]]
POSITIONS += [("AddN", 0), ("AddN", 1)]


def dtype_of(kind):
    return tf.int32 if kind in INTEGERS else tf.bool if kind in BOOLEANS else tf.float32


def whole(kind):
    """An operand of 4 MiB."""
    dtype = dtype_of(kind)
    side = SIDE if dtype.size == 4 else 2 * SIDE
    values = tf.random.stateless_uniform([side, side], seed=[1, 2], minval=0.2, maxval=0.8)
    return tf.cast(values + 1.0, tf.int32) if dtype == tf.int32 else tf.cast(values, dtype)


def apply(kind, position, dying, other):
    result = called(kind, position, dying, other)
    _, output = op_facts._IN_PLACE.get(kind, ((), 0))
    return result[output] if isinstance(result, tuple) else result


def called(kind, position, dying, other):
    function = getattr(tf.raw_ops, kind)
    if kind == "AddN":
        return function(inputs=[dying, other] if position == 0 else [other, dying])
    names = [n for n, p in inspect.signature(function).parameters.items() if n != "name" and p.default is p.empty]
    if kind in ("Select", "SelectV2"):
        operands = [other > 0.5, dying, other] if position == 1 else [other > 0.5, other, dying]
    elif kind == "BiasAdd":
        operands = [dying, other[0]]
    elif kind == "SparseSoftmaxCrossEntropyWithLogits":
        operands = [dying, tf.zeros([SIDE], tf.int32)]
    elif kind == "MatrixBandPart":
        operands = [dying, 2, 2]
    elif kind.startswith("MatrixSetDiag"):
        operands = [dying, other[0], 0][: len(names)]
    elif kind in FURTHER:
        return function(**{names[0]: dying}, **FURTHER[kind])
    else:
        operands = [dying] if len(names) == 1 else [dying, other] if position == 0 else [other, dying]
    return function(**dict(zip(names, operands, strict=True)))


def tensors_at_peak(use):
    """How many tensors of 4 MiB a function allocates at its peak, for ``use(a tensor that dies, one that stays)``."""

    @tf.function(autograph=False)
    def step(x, other):
        dying = tf.reverse(x, [0])  # Not element-wise: makes a tensor of its own.
        result = use(dying, other)
        return tf.reduce_any(result) if result.dtype == tf.bool else tf.reduce_max(result)

    return step


def measured(use, x):
    step = tensors_at_peak(use)
    device = current_device()
    step(x, x)
    device.reset_peak()
    before = device.peak_bytes  # Not in_use_bytes, which collects garbage first: that is most of a test's time.
    step(x, x)
    return (device.peak_bytes - before) / SIZE_BYTES


@pytest.mark.parametrize(("kind", "position"), POSITIONS)
def test_output_takes_over_a_dying_input(kind, position):
    # One tensor, for which the allocator may hand out nearly twice what it needs. Two are at least 2.
    assert measured(lambda dying, other: apply(kind, position, dying, other), whole(kind)) < 1.95


@pytest.mark.parametrize("kind", ["Cumsum", "ReverseV2", "Transpose"])
def test_the_measurement_sees_an_operation_that_does_not(kind):
    use = {
        "Cumsum": lambda dying, other: tf.cumsum(dying),
        "ReverseV2": lambda dying, other: tf.reverse(dying, [1]),
        "Transpose": lambda dying, other: tf.transpose(dying),
    }[kind]

    assert measured(use, whole(kind)) >= 1.95


def test_the_measurement_sees_an_input_that_is_needed_later():
    assert measured(lambda dying, other: tf.sin(dying) + tf.cumsum(dying), whole("Sin")) >= 1.95


# What a trace says of operations whose second result is written in place, or that read a broadcast operand.
TRACED = {
    "SparseSoftmaxCrossEntropyWithLogits": lambda dying, other: tf.raw_ops.SparseSoftmaxCrossEntropyWithLogits(
        features=dying, labels=tf.constant(0, tf.int32, [SIDE])
    )[1],
    "SoftmaxCrossEntropyWithLogits": lambda dying, other: tf.raw_ops.SoftmaxCrossEntropyWithLogits(
        features=dying, labels=other
    )[1],
    "not its labels": lambda dying, other: tf.raw_ops.SoftmaxCrossEntropyWithLogits(features=other, labels=dying)[1],
    "SelectV2 of a number": lambda dying, other: tf.where(other > 0.5, 0.0, dying),
    "SelectV2 by rows": lambda dying, other: tf.where(other[:, :1] > 0.5, dying, other),
    "not Cumsum": lambda dying, other: tf.cumsum(dying),
    "Sum over no axis": lambda dying, other: tf.cumsum(tf.reduce_sum(other, tf.zeros([0], tf.int32))),
    "Max over an axis of one": lambda dying, other: tf.cumsum(tf.reduce_max(tf.expand_dims(other, 0), 0)),
    "not Sum of halves": lambda dying, other: tf.cumsum(tf.reduce_sum(tf.reshape(other, [2, SIDE // 2, SIDE]), 0)),
    "Transpose of an axis of one": lambda dying, other: tf.cumsum(tf.transpose(tf.expand_dims(other, 0), [1, 0, 2])),
    "Transpose back by its inverse": lambda dying, other: tf.cumsum(
        tf.transpose(tf.expand_dims(other, 0), tf.math.invert_permutation(tf.constant([1, 0, 2])))
    ),
    "not Transpose": lambda dying, other: tf.cumsum(tf.transpose(other)),
    "Transpose for a product": lambda dying, other: tf.matmul(tf.transpose(other), dying),
    "not Transpose of three axes": lambda dying, other: tf.matmul(
        tf.transpose(tf.reshape(other, [32, 32, SIDE]), [2, 1, 0]), tf.reshape(dying, [SIDE, 32, 32])
    ),
}


@pytest.mark.parametrize("name", TRACED)
def test_a_trace_counts_what_is_measured(name):
    x = whole("Sin")
    step = tensors_at_peak(TRACED[name])
    graph = remat.tensorflow.trace(step.python_function, x, x)
    predicted = (remat.simulate(graph, graph.plain_schedule).peak_bytes - graph.pinned_bytes) / SIZE_BYTES
    # A mask of truth values is a quarter of a tensor.
    assert predicted == pytest.approx(measured(TRACED[name], x), abs=0.3)


def of_two_that_die(kind, names):
    """A function that makes two tensors of these names one after the other, a result of both, and one more tensor."""

    @tf.function(autograph=False)
    def step(x):
        first = tf.reverse(x, [0], name=names[0])
        with tf.control_dependencies([first]):
            second = tf.reverse(x, [1], name=names[1])
        function = getattr(tf.raw_ops, kind)
        result = function(inputs=[first, second]) if kind == "AddN" else function(x=first, y=second)
        with tf.control_dependencies([result]):
            return result, tf.reverse(x, [0, 1])

    return step


def addresses(step, x):
    return [int(np.asarray(memoryview(tensor)).ctypes.data) for tensor in step(x)]


@pytest.mark.parametrize(
    ("kind", "commutes"),
    [("AddV2", True), ("Mul", True), ("SquaredDifference", True), ("AddN", True), ("Sub", False), ("Maximum", False)],
)
def test_of_two_that_die_the_first_is_taken_over_by_name_where_the_operation_commutes(kind, commutes):
    """What is made next lies where the other one did."""
    x = whole("Sin")
    steps = [of_two_that_die(kind, names) for names in (("a", "b"), ("b", "a"))]
    for step in steps:
        addresses(step, x)  # Until a heap has as much as both need, a run finds other holes than the next one.
    result, after = addresses(steps[0], x)
    assert addresses(steps[1], x) == ([after, result] if commutes else [result, after])

    for step, first in zip(steps, (0, 1 if commutes else 0), strict=True):
        operation = next(op for op in step.get_concrete_function(x).graph.get_operations() if op.type == kind)
        assert op_facts.in_place(operation)[0][0] == first
