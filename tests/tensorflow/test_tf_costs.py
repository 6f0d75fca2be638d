"""Floating-point operations against figures worked out by hand."""

from __future__ import annotations

import pytest
import tensorflow as tf

from remat.running.cost_model import get_profile
from remat.tensorflow.peak.device import current_device
from remat.tensorflow.trace.func_graph import trace_func_graph
from remat.tensorflow.trace.op_facts import flops, flops_on_cpu

B, H, W, C, F = 2, 16, 12, 8, 24


def ones(*shape):
    return tf.ones(shape)


CASES = {
    "matmul": (lambda: ones(5, 7) @ ones(7, 11), "MatMul", 2 * 5 * 7 * 11),
    "matmul transposed": (
        lambda: tf.linalg.matmul(ones(7, 5), ones(7, 11), transpose_a=True),
        "MatMul",
        2 * 5 * 7 * 11,
    ),
    "batch matmul": (lambda: ones(3, 4, 5, 7) @ ones(3, 4, 7, 11), "BatchMatMulV2", 2 * 12 * 5 * 7 * 11),
    "batch matmul transposed": (
        lambda: tf.linalg.matmul(ones(4, 7, 5), ones(4, 7, 11), adjoint_a=True),
        "BatchMatMulV2",
        2 * 4 * 5 * 7 * 11,
    ),
    "convolution": (
        lambda: tf.nn.conv2d(ones(B, H, W, C), ones(3, 5, C, F), 1, "SAME"),
        "Conv2D",
        2 * (B * H * W * F) * (3 * 5 * C),
    ),
    "convolution with strides": (
        lambda: tf.nn.conv2d(ones(B, H, W, C), ones(3, 3, C, F), 2, "SAME"),
        "Conv2D",
        2 * (B * (H // 2) * (W // 2) * F) * (3 * 3 * C),
    ),
    "convolution in groups": (
        lambda: tf.nn.conv2d(ones(B, H, W, C), ones(3, 3, C // 4, F), 1, "SAME"),
        "Conv2D",
        2 * (B * H * W * F) * (3 * 3 * C // 4),
    ),
    "convolution in three dimensions": (
        lambda: tf.nn.conv3d(ones(B, 4, H, W, C), ones(2, 3, 3, C, F), [1] * 5, "SAME"),
        "Conv3D",
        2 * (B * 4 * H * W * F) * (2 * 3 * 3 * C),
    ),
    "depthwise": (
        lambda: tf.nn.depthwise_conv2d(ones(B, H, W, C), ones(3, 3, C, 2), [1] * 4, "SAME"),
        "DepthwiseConv2dNative",
        2 * (B * H * W * C * 2) * (3 * 3),
    ),
    "gradient of a convolution's input": (
        lambda: tf.raw_ops.Conv2DBackpropInput(
            input_sizes=[B, H, W, C],
            filter=ones(3, 3, C, F),
            out_backprop=ones(B, H, W, F),
            strides=[1] * 4,
            padding="SAME",
        ),
        "Conv2DBackpropInput",
        2 * (B * H * W * F) * (3 * 3 * C),
    ),
    "gradient of a convolution's filter": (
        lambda: tf.raw_ops.Conv2DBackpropFilter(
            input=ones(B, H, W, C),
            filter_sizes=[3, 3, C, F],
            out_backprop=ones(B, H, W, F),
            strides=[1] * 4,
            padding="SAME",
        ),
        "Conv2DBackpropFilter",
        2 * (B * H * W * F) * (3 * 3 * C),
    ),
    "gradient of a depthwise convolution's filter": (
        lambda: tf.raw_ops.DepthwiseConv2dNativeBackpropFilter(
            input=ones(B, H, W, C),
            filter_sizes=[3, 3, C, 1],
            out_backprop=ones(B, H, W, C),
            strides=[1] * 4,
            padding="SAME",
        ),
        "DepthwiseConv2dNativeBackpropFilter",
        2 * (B * H * W * C) * (3 * 3),
    ),
    "einsum": (
        lambda: tf.einsum("bqhd,bkhd->bhqk", ones(2, 10, 4, 8), ones(2, 12, 4, 8)),
        "Einsum",
        2 * (2 * 4 * 10 * 12 * 8),
    ),
    "einsum with an ellipsis": (
        lambda: tf.einsum("...ij,jk->...ik", ones(2, 3, 5, 7), ones(7, 11)),
        "Einsum",
        2 * (2 * 3 * 5 * 7 * 11),
    ),
    "element-wise": (lambda: tf.tanh(ones(5, 7)), "Tanh", 5 * 7),
}


@pytest.mark.parametrize("name", CASES)
def test_flops(name):
    build, kind, expected = CASES[name]
    with tf.Graph().as_default() as graph:
        build()
    (op,) = [op for op in graph.get_operations() if op.type == kind]

    found = flops(op, [tuple(t.shape) for t in op.inputs], [tuple(t.shape) for t in op.outputs])

    assert found == expected


def test_unknown_shapes_count_what_is_known():
    with tf.Graph().as_default() as graph:
        ones(5, 7) @ ones(7, 11)
    (op,) = [op for op in graph.get_operations() if op.type == "MatMul"]

    assert flops(op, [None, (7, 11)], [(5, 11)]) == 2 * 5 * 11  # As if what is summed over had one element.


def on_cpu(build, kind):
    """What an operation counts as on a CPU, beside its own operations."""
    with tf.Graph().as_default() as graph:
        build()
    (op,) = [op for op in graph.get_operations() if op.type == kind]
    shapes = [[tuple(t.shape) for t in tensors] for tensors in (op.inputs, op.outputs)]
    return flops_on_cpu(op, *shapes) / flops(op, *shapes)


def test_what_is_dear_on_a_cpu_counts_as_what_it_takes():
    assert on_cpu(lambda: ones(5, 7) @ ones(7, 11), "MatMul") == 1
    assert on_cpu(lambda: tf.random.stateless_uniform((64, 64), (1, 2)), "StatelessRandomUniformV2") > 500
    assert on_cpu(lambda: tf.tanh(ones(5, 7)), "Tanh") > 10
    build, kind, _ = CASES["gradient of a depthwise convolution's filter"]
    assert on_cpu(build, kind) > 2


def test_powers_that_become_products_are_cheap():
    assert on_cpu(lambda: tf.pow(ones(5, 7), 3.0), "Pow") == 1
    assert on_cpu(lambda: tf.pow(ones(5, 7), tf.constant(3.0) - tf.constant(1.0)), "Pow") == 1
    assert on_cpu(lambda: tf.pow(ones(5, 7), 2.7), "Pow") > 1000
    assert on_cpu(lambda: tf.pow(ones(5, 7), ones(5, 7) * 2.0), "Pow") > 1000


@pytest.mark.parametrize(("device", "is_dear"), [("cpu", True), ("a100", False)])
def test_random_numbers_are_dear_on_a_cpu_only(device, is_dear):
    @tf.function
    def step(x):
        return x + tf.random.stateless_uniform((512, 512), (1, 2))

    graph = trace_func_graph(step.get_concrete_function(tf.ones((512, 512))).graph, profile=get_profile(device)).graph
    seconds = {op.kind: op.time_s for op in graph.ops}
    assert (seconds["StatelessRandomUniformV2"] > 3 * seconds["AddV2"]) is is_dear


@pytest.mark.parametrize(("dtype", "temporaries"), [(tf.float32, 0), (tf.float16, 3)])
def test_half_precision_products_need_float32_copies(dtype, temporaries):
    """Measured: the peak of one product, beyond its operands and its result."""
    side = 512

    @tf.function
    def product(x, y):
        return tf.reduce_max(x @ y)

    x = tf.cast(tf.random.normal((side, side)), dtype)
    device = current_device()
    step = trace_func_graph(
        product.get_concrete_function(x, x).graph, profile=get_profile("cpu"), allocator=device.allocator
    )
    [matmul] = [op for op in step.graph.ops if op.kind == "MatMul"]
    assert matmul.workspace_bytes == temporaries * side * side * 4

    product(x, x)
    in_use = device.in_use_bytes
    device.reset_peak()
    product(x, x)
    predicted = matmul.workspace_bytes + side * side * dtype.size
    # The allocator may hand out up to twice what a block needs.
    assert predicted <= device.peak_bytes - in_use < 1.95 * predicted
