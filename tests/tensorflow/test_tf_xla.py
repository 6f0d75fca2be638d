"""Under XLA: recomputations stay late, the numbers stay, and the compiled program is what the budget speaks of."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import remat.tensorflow
from remat.tensorflow import _private
from remat.tensorflow.emit import xla_ties
from remat.tensorflow.peak.compiled_memory import program_memory
from remat.tensorflow.peak.device import current_device

LAYERS, WIDTH, BATCH = 24, 512, 4096


def make_step(weights: list[tf.Variable], **limit: object):
    tapes = []

    @tf.function(jit_compile=True)
    def step(x: tf.Tensor) -> list[tf.Tensor]:
        tape = remat.tensorflow.GradientTape(**limit) if limit else tf.GradientTape()
        tapes.append(tape)
        with tape:
            h = x
            for weight in weights:
                h = tf.tanh(h @ weight)
            loss = tf.reduce_sum(h * h)
        return [loss, *tape.gradient(loss, weights)]

    return step, tapes


def peak_of(step, x: tf.Tensor) -> int:
    device = current_device()
    step(x)
    device.reset_peak()
    step(x)
    return device.peak_bytes


@pytest.fixture(scope="module")
def chain() -> tuple[list[tf.Variable], tf.Tensor]:
    random = np.random.default_rng(0)
    weights = [tf.Variable(random.normal(size=(WIDTH, WIDTH)).astype("float32") * 0.05) for _ in range(LAYERS)]
    return weights, tf.constant(random.normal(size=(BATCH, WIDTH)).astype("float32"))


def test_compiled_step_keeps_its_budget_and_its_numbers(chain) -> None:
    weights, x = chain
    plain, _ = make_step(weights)
    plain_peak = peak_of(plain, x)
    expected = [t.numpy() for t in plain(x)]

    limited, tapes = make_step(weights, budget="65%")
    peak = peak_of(limited, x)
    plan = tapes[-1].plan
    assert plan is not None
    assert plan.recomputed > 0
    assert len(tapes[-1].recomputed_operations) == plan.recomputed
    assert peak <= plan.budget_bytes < plain_peak
    assert peak == pytest.approx(plan.peak_bytes, rel=0.05)
    for want, got in zip(expected, limited(x), strict=True):
        np.testing.assert_allclose(got.numpy(), want, rtol=1e-4, atol=1e-5 * float(np.abs(want).max()))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int32", "uint8"])
def test_a_tie_changes_no_bit(dtype: str) -> None:
    special = [0.0, -0.0, 1.5, -2.25, np.inf, -np.inf, np.nan] if "float" in dtype else [0, 1, 7, 100, 0, 3, 255]
    values = tf.cast(tf.constant(special, tf.float64 if "float" in dtype else tf.int64), dtype)

    @tf.function(jit_compile=True)
    def tied(tensor: tf.Tensor, trigger: tf.Tensor) -> tf.Tensor:
        return xla_ties.tie(tensor, xla_ties.late_zero(trigger))

    for trigger in (-3.0, 0.0, 4.0, float("nan")):
        got = tied(values, tf.fill([2, 2], trigger))
        assert got.numpy().tobytes() == values.numpy().tobytes()
    if values.dtype.is_floating:
        once = tf.function(xla_ties.written_once, jit_compile=True)
        for shifted in (tf.roll(values, number, 0) for number in range(len(special))):
            assert once(shifted).numpy().tobytes() == shifted.numpy().tobytes()


def test_a_tie_survives_the_compiler() -> None:
    @tf.function(jit_compile=True)
    def step(x: tf.Tensor, trigger: tf.Tensor) -> tf.Tensor:
        return tf.tanh(xla_ties.tie(x, xla_ties.late_zero(trigger))) + tf.tanh(x)

    shape = tf.zeros([64, 64])
    program = step.experimental_get_compiler_ir(shape, shape)(stage="optimized_hlo")
    # Were the tie seen through, the two tanh would be one computation.
    assert program.count(" tanh(") == 2


@pytest.mark.parametrize("once", [False, True])
def test_what_is_written_once_is_read_and_not_computed_again(once: bool) -> None:
    """Along residual sums that products of matrices read, as the gradients of a residual network are."""
    depth, spec = 6, tf.TensorSpec((256, 256))

    def step(x: tf.Tensor, weights: tf.Tensor) -> list[tf.Tensor]:
        kept = []
        for _ in range(depth):
            x = x + tf.tanh(x @ weights) + tf.reduce_mean(x, axis=1, keepdims=True)
            x = xla_ties.written_once(x) if once else x
            kept.append(x)
        return [x, *(tf.reduce_sum(h @ weights, axis=0) for h in kept)]

    program = _private.compiled_program(tf.function(step).get_concrete_function(spec, spec).graph, {}, lambda _: None)
    # TensorFlow 2.19 puts each fusion that runs in parallel into a computation of its own.
    instructions = [i for computation in program.hlo_module.computations for i in computation.instructions]
    most_read = max(len(i.operand_ids) for i in instructions if i.opcode == "fusion")
    assert (most_read <= 4) == once


def test_program_memory_is_what_a_call_allocates() -> None:
    """Of a program that XLA cannot fuse: products of matrices, in a chain that needs two of them at a time."""
    side = 1024

    def chain(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        for _ in range(4):
            x = tf.tanh(x @ x)
        return x, tf.reduce_sum(x)

    concrete = tf.function(chain).get_concrete_function(tf.TensorSpec((side, side)))
    memory = program_memory(_private.compiled_program(concrete.graph, {}, lambda _: None))

    matrix_bytes = 4 * side * side
    assert sorted(memory.output_bytes)[-1] == matrix_bytes
    assert matrix_bytes <= sum(memory.temporary_bytes) <= 3 * matrix_bytes
    device = current_device()
    compiled, x = tf.function(chain, jit_compile=True), tf.random.normal((side, side))
    compiled(x)
    in_use = device.in_use_bytes
    device.reset_peak()
    compiled(x)
    needed = sum(memory.output_bytes) + sum(memory.temporary_bytes)
    # The allocator may hand out up to twice what a block needs.
    assert needed - 4096 <= device.peak_bytes - in_use <= 2 * needed


def pooled_chain(images: tf.Tensor, filters: tf.Tensor, depth: int = 12) -> list[tf.Tensor]:
    with tf.GradientTape() as tape:
        tape.watch([images, filters])
        hidden = tf.nn.max_pool2d(tf.nn.relu(images * 1.5), 3, 2, "SAME")
        for _ in range(depth):
            hidden = tf.tanh(tf.nn.conv2d(hidden, filters, 1, "SAME"))
        loss = tf.reduce_sum(hidden * hidden)
    return tape.gradient(loss, [images, filters])


def make_all_late(_named: object) -> None:
    graph = tf.compat.v1.get_default_graph()
    for operation in graph.get_operations():
        readers = operation.outputs[0].consumers() if operation.type.startswith("MaxPool") else []
        xla_ties.hold_filter(operation)
        late = xla_ties.in_slices(operation)
        for reader in readers if late is not None else []:
            _private.update_input(reader, list(reader.inputs).index(operation.outputs[0]), late)


def test_what_xla_adds_to_gradients_does_not_live_through_the_program() -> None:
    """Five index tensors as large as the pooling's input: one from the program's start, five at a time."""
    images, filters = tf.TensorSpec((16, 64, 64, 32)), tf.TensorSpec((3, 3, 32, 32))
    pooled_bytes = 4 * 16 * 64 * 64 * 32

    def temporary_bytes(depth: int, change) -> int:
        graph = tf.function(pooled_chain).get_concrete_function(images, filters, depth).graph
        return sum(program_memory(_private.compiled_program(graph, {}, change)).temporary_bytes)

    # With few layers the pooling's gradient is the peak, with many it is where the backward pass begins.
    assert temporary_bytes(3, lambda _: None) - temporary_bytes(3, make_all_late) >= 4 * pooled_bytes
    assert temporary_bytes(12, lambda _: None) - temporary_bytes(12, make_all_late) >= 0.9 * pooled_bytes


def pooled_volume(volume: tf.Tensor) -> list[tf.Tensor]:
    with tf.GradientTape() as tape:
        tape.watch(volume)
        pooled = tf.nn.max_pool3d(tf.nn.relu(volume), 3, 2, "VALID")
        loss = tf.reduce_sum(pooled * pooled)
    return [tape.gradient(loss, volume)]


@pytest.mark.parametrize("batch", [4, None])
@pytest.mark.parametrize("network", [pooled_chain, pooled_volume])
def test_late_gradients_are_the_same_numbers(network, batch: int | None) -> None:
    """Equal values in a window included: half of what relu gives is zero."""
    random = np.random.default_rng(0)
    shapes = [(4, 8, 8, 3), (3, 3, 3, 3)] if network is pooled_chain else [(4, 6, 6, 6, 2)]
    arrays = [tf.constant(random.normal(size=shape).astype("float32")) for shape in shapes]
    specs = [tf.TensorSpec((batch, *shapes[0][1:])), *map(tf.TensorSpec, shapes[1:])]

    @tf.function(jit_compile=True, input_signature=specs)
    def late(*arrays: tf.Tensor) -> list[tf.Tensor]:
        gradients = [tf.identity(g) for g in network(*arrays)]
        make_all_late(None)
        return gradients

    plain = tf.function(network, jit_compile=True)(*arrays)
    for want, got in zip(plain, late(*arrays), strict=True):
        np.testing.assert_allclose(got.numpy(), want.numpy(), rtol=1e-6, atol=1e-6 * float(np.abs(want).max()))
    kinds = {op.type for op in late.get_concrete_function().graph.get_operations()}
    assert kinds & {"While", "StatelessWhile"}
