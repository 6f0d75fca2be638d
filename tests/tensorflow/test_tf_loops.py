"""Loops are kept, exact, and what they keep for the backward pass is counted."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import remat.tensorflow
from remat.tensorflow.peak.device import current_device
from remat.tensorflow.trace.sizes import LOOPS, Loop, sizes_with_loops

ITERATIONS = 24
SHAPE = (1024, 256)  # 1 MiB a tensor


def make_step(weight: tf.Variable, budget: str | None, limit: int | None = ITERATIONS):
    tapes = []

    @tf.function
    def step(x: tf.Tensor, count: tf.Tensor) -> list[tf.Tensor]:
        tape = remat.tensorflow.GradientTape(budget=budget, planner="peak_greedy") if budget else tf.GradientTape()
        tapes.append(tape)
        with tape:
            h = x
            for _ in range(16):
                h = tf.tanh(h @ weight)
            _, h = tf.while_loop(
                lambda i, _: i < (ITERATIONS if limit else count),
                lambda i, h: (i + 1, tf.tanh(h @ weight)),
                [tf.constant(0), h],
            )
            loss = tf.reduce_sum(h * h)
        return [loss, tape.gradient(loss, weight)]

    return step, tapes


@pytest.fixture
def weight() -> tf.Variable:
    random = np.random.default_rng(0)
    return tf.Variable(random.normal(size=(SHAPE[1], SHAPE[1]), scale=SHAPE[1] ** -0.5).astype("float32"))


def test_a_loop_is_counted_and_exact(weight: tf.Variable) -> None:
    x = tf.constant(np.random.default_rng(1).normal(size=SHAPE).astype("float32"))
    count = tf.constant(ITERATIONS)
    plain, _ = make_step(weight, None)
    expected = [t.numpy() for t in plain(x, count)]
    limited, tapes = make_step(weight, "85%")
    got = [t.numpy() for t in limited(x, count)]
    plan = tapes[-1].plan
    assert plan is not None
    assert plan.recomputed > 0
    assert not any("while" in name for name in tapes[-1].recomputed_operations)
    device = current_device()
    device.reset_peak()
    limited(x, count)
    assert device.peak_bytes <= plan.budget_bytes
    # The prediction also counts the blocks that the counter leaves out. In a heap that earlier tests left in pieces,
    # blocks are larger than asked.
    assert 0.9 * device.peak_bytes <= plan.peak_bytes <= 1.1 * device.peak_bytes
    for want, value in zip(expected, got, strict=True):
        np.testing.assert_allclose(value, want, rtol=1e-4, atol=1e-5 * float(np.abs(want).max()))


def test_a_loop_of_an_older_function_is_kept(weight: tf.Variable) -> None:
    """TensorFlow makes loops of functions without a graph for the loss of CTC."""
    random = np.random.default_rng(2)
    x = tf.constant(random.normal(size=(16 * 64, SHAPE[1])).astype("float32"))
    labels = tf.constant(random.integers(1, 6, (16, 10)), tf.int32)

    def gradient(**limit: str) -> tuple[tf.Tensor, list]:
        tapes = []

        @tf.function
        def step(x: tf.Tensor) -> tf.Tensor:
            tape = remat.tensorflow.GradientTape(**limit) if limit else tf.GradientTape()
            tapes.append(tape)
            with tape:
                h = x
                for _ in range(8):
                    h = tf.tanh(h @ weight)
                logits = tf.reshape(h, [16, 64, SHAPE[1]])[..., :6]
                lengths = [tf.fill([16], 10), tf.fill([16], 64)]
                loss = tf.reduce_mean(tf.nn.ctc_loss(labels, logits, *lengths, logits_time_major=False, blank_index=0))
            return tape.gradient(loss, weight)

        return step(x), tapes

    expected, _ = gradient()
    with pytest.warns(UserWarning, match="number of iterations"):
        found, tapes = gradient(budget="70%")
    assert any(op.type in LOOPS for op in tapes[-1]._rewritten.step.operations)
    assert tapes[-1].plan.recomputed > 0
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * float(np.abs(expected).max()))


def test_the_lists_of_a_loop_grow_with_its_iterations(weight: tf.Variable) -> None:
    step, _ = make_step(weight, None)
    graph = remat.tensorflow.trace(step, tf.TensorSpec(SHAPE), tf.TensorSpec((), tf.int32))
    [loop] = [op for op in graph.ops if op.kind in ("While", "StatelessWhile") and "gradient" not in op.name]
    kept = sorted(graph.tensors[t].size_bytes for t in loop.outputs if graph.tensors[t].dtype == "variant")
    assert kept[-1] >= ITERATIONS * 4 * SHAPE[0] * SHAPE[1]
    assert not loop.recomputable


def test_a_loop_of_unknown_length_warns(weight: tf.Variable) -> None:
    step, _ = make_step(weight, None, limit=None)
    with pytest.warns(UserWarning, match="number of iterations of the loop .* is not known"):
        graph = remat.tensorflow.trace(step, tf.TensorSpec(SHAPE), tf.TensorSpec((), tf.int32))
    assert any("number of iterations of the loop" in note for note in graph.notes)


def test_shapes_behind_a_loop_are_found_for_the_real_batch() -> None:
    """Inside ``fit`` the batch dimension is unknown, and TensorFlow forgets the shape of a list that leaves a loop."""
    model = keras.Sequential([keras.Input((6, 8)), *[keras.layers.LSTM(4, return_sequences=True) for _ in range(2)]])

    def step(x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tf.tanh(model(x)) ** 2)

    def shapes(batch: int | None) -> dict[str, tuple[int, ...] | None]:
        graph = tf.function(step).get_concrete_function(tf.TensorSpec((batch, 6, 8))).graph
        [placeholder] = [t for t in graph.inputs if t.dtype == tf.float32]
        sizes = sizes_with_loops(graph, {placeholder.name: (5, 6, 8)})
        kinds = ("Tanh", "TensorListStack", "Transpose")
        return {op.name: sizes.shape(op.outputs[0]) for op in graph.get_operations() if op.type in kinds}

    found = shapes(None)
    assert found == shapes(5)
    assert found["Tanh"] == (5, 6, 4)


def test_a_size_that_nothing_tells_warns() -> None:
    @tf.function
    def step(handle: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(
            tf.raw_ops.TensorListStack(input_handle=handle, element_shape=-1, element_dtype=tf.float32)
        )

    with pytest.warns(UserWarning, match="sizes of 1 tensors are not known .* of a TensorListStack"):
        remat.tensorflow.trace(step, tf.TensorSpec((), tf.variant))


def test_the_shapes_of_what_a_loop_reads_from_lists_are_known_inside_fit() -> None:
    """A body, and a gradient's body, read what another loop or a whole tensor has put into a list."""
    model = keras.Sequential([keras.Input((6, 8)), keras.layers.LSTM(4, return_sequences=True), keras.layers.LSTM(3)])
    weights = [weight.value for weight in model.trainable_variables]

    def step(x: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x) ** 2)
        return tape.gradient(loss, weights)

    def items_read(batch: int | None) -> dict[str, set[tuple[int, ...] | None]]:
        graph = tf.function(step).get_concrete_function(tf.TensorSpec((batch, 6, 8))).graph
        [placeholder] = [t for t in graph.inputs if t.dtype == tf.float32]
        sizes = sizes_with_loops(graph, {placeholder.name: (5, 6, 8)})
        return {
            op.name: {
                loop.sizes.shape(read.outputs[-1])
                for loop in [Loop(op, sizes)]
                for read in loop.body.get_operations()
                if read.type in ("TensorListGetItem", "TensorListPopBack") and read.outputs[-1].dtype.is_floating
            }
            for op in graph.get_operations()
            if op.type in LOOPS
        }

    found = items_read(None)
    assert found == items_read(5)
    assert len(found) == 4
    assert {(5, 8), (5, 4), (5, 3)} <= set().union(*found.values())
