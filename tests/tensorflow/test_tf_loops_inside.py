"""Loops planned inside: the forward body keeps less, the backward body makes the rest again, and the numbers stay."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import remat.keras
import remat.tensorflow
from remat.core.errors import InfeasibleBudget
from remat.core.plan import Plan
from remat.tensorflow.loops.bodies import Choice, values_of_lists, written
from remat.tensorflow.loops.pairs import Pair, find_pairs
from remat.tensorflow.peak.device import current_device

ITERATIONS = 12
SHAPE = (512, 256)  # 512 KiB an item, above what TensorFlow's counter leaves out


@pytest.fixture
def variables() -> list[tf.Variable]:
    random = np.random.default_rng(0)
    weight = random.normal(size=(SHAPE[1], SHAPE[1]), scale=SHAPE[1] ** -0.5).astype("float32")
    return [tf.Variable(weight), tf.Variable(random.normal(size=SHAPE[1]).astype("float32"))]


@pytest.fixture
def batch() -> tf.Tensor:
    return tf.constant(np.random.default_rng(1).normal(size=SHAPE).astype("float32"))


def loss_of(x: tf.Tensor, variables: list[tf.Variable]) -> tf.Tensor:
    weight, bias = variables
    _, h = tf.while_loop(
        lambda i, _: i < ITERATIONS,
        lambda i, h: (i + 1, tf.tanh(tf.sin(tf.exp(tf.cos(h @ weight + bias))) + h)),
        [tf.constant(0), x],
    )
    return tf.reduce_sum(h * h)


def make_step(variables: list[tf.Variable], budget: str | None = None, plan: Plan | None = None):
    tapes = []

    @tf.function
    def step(x: tf.Tensor) -> list[tf.Tensor]:
        if budget is None and plan is None:
            tape = tf.GradientTape()
        else:
            tape = remat.tensorflow.GradientTape(budget=budget, plan=plan, planner="peak_greedy")
        tapes.append(tape)
        with tape:
            loss = loss_of(x, variables)
        return [loss, *tape.gradient(loss, variables)]

    return step, tapes


def test_a_step_that_is_a_loop_keeps_half_of_its_bytes(variables: list[tf.Variable], batch: tf.Tensor) -> None:
    plain, _ = make_step(variables)
    expected = [t.numpy() for t in plain(batch)]
    limited, tapes = make_step(variables, "60%")
    got = [t.numpy() for t in limited(batch)]
    plan = tapes[-1].plan
    device = current_device()
    if device.has_counter:  # Without oneDNN there is none on a CPU; the rest holds there, too.
        _ = device.in_use_bytes
        device.reset_peak()
        limited(batch)
        assert device.peak_bytes <= plan.budget_bytes
    assert plan.peak_bytes <= 0.6 * plan.baseline_peak_bytes
    assert plan.overhead > 0
    for want, value in zip(expected, got, strict=True):
        np.testing.assert_allclose(value, want, rtol=1e-5, atol=1e-6 * float(np.abs(want).max()))
    again, _ = make_step(variables, plan=plan)
    for want, value in zip(got, again(batch), strict=True):
        np.testing.assert_array_equal(value.numpy(), want)


def test_a_step_that_is_a_loop_is_not_refused_at_its_own_bytes(variables: list[tf.Variable], batch: tf.Tensor) -> None:
    limited, tapes = make_step(variables, "100%")
    limited(batch)
    assert tapes[-1].plan.peak_bytes <= tapes[-1].plan.baseline_peak_bytes


def test_what_no_loop_can_keep_is_refused(variables: list[tf.Variable], batch: tf.Tensor) -> None:
    limited, _ = make_step(variables, "10%")
    with pytest.raises(InfeasibleBudget):
        limited(batch)


@pytest.fixture
def pair(variables: list[tf.Variable]) -> Pair:
    step, _ = make_step(variables)
    [found] = find_pairs(step.get_concrete_function(tf.TensorSpec(SHAPE)).graph.get_operations())
    return found


def test_a_pair_of_loops_is_found(pair: Pair) -> None:
    assert pair.forward.type in ("While", "StatelessWhile")
    assert "gradient" in pair.backward.name
    assert all(slot.item.graph is pair.first and slot.popped.graph is pair.second for slot in pair.slots)


def test_loops_with_branches_inside_are_left_alone(variables: list[tf.Variable]) -> None:
    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            _, h = tf.while_loop(
                lambda i, _: i < ITERATIONS,
                lambda i, h: (i + 1, tf.cond(i > 3, lambda: tf.sin(h @ variables[0]), lambda: tf.cos(h))),
                [tf.constant(0), x],
            )
            loss = tf.reduce_sum(h * h)
        return tape.gradient(loss, variables[0])

    assert not find_pairs(step.get_concrete_function(tf.TensorSpec(SHAPE)).graph.get_operations())


def test_a_value_without_a_list_cannot_be_stored(pair: Pair) -> None:
    tensors = [t.name for op in pair.first.get_operations() for t in op.outputs if t.dtype == tf.float32]
    choice = Choice(frozenset(tensors), frozenset())
    assert values_of_lists(pair, choice) is None
    with pytest.raises(ValueError, match="there is no list for some of"):
        written(pair, choice)


def test_what_is_neither_stored_nor_made_again_is_an_error(pair: Pair) -> None:
    with pytest.raises(ValueError, match="is neither stored nor made again"):
        written(pair, Choice(frozenset(), frozenset()))


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_keras_fits_recurrent_layers_within_a_budget(kind: str) -> None:
    x = np.random.default_rng(0).normal(size=(256, 10, 96)).astype("float32")
    y = np.random.default_rng(1).normal(size=(256, 10, 4)).astype("float32")

    def trained(budget: str | None) -> tuple[list[np.ndarray], Plan | None]:
        keras.utils.set_random_seed(0)
        layer = getattr(keras.layers, kind)
        layers = [keras.layers.Bidirectional(layer(96, return_sequences=True)) for _ in range(2)]
        model = keras.Sequential([keras.Input((10, 96)), *layers, keras.layers.Dense(4)])
        model.compile(keras.optimizers.SGD(0.01), "mse", jit_compile=False)
        if budget is not None:
            remat.keras.limit_memory(model, budget, planner="peak_greedy", micro_batches=1)
        model.fit(x, y, batch_size=128, epochs=1, shuffle=False, verbose=0)
        return model.get_weights(), None if budget is None else remat.keras.plan_of(model)

    expected, _ = trained(None)
    got, plan = trained("72%")
    assert plan is not None
    assert plan.peak_bytes <= 0.72 * plan.baseline_peak_bytes
    for want, value in zip(expected, got, strict=True):
        np.testing.assert_allclose(value, want, rtol=1e-4, atol=1e-6)
