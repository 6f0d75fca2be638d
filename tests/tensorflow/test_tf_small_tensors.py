"""A budget counts every byte: steps of tensors that a CPU's counter leaves out are planned by their real sizes."""

from __future__ import annotations

import pytest
import tensorflow as tf

import remat
import remat.tensorflow
from remat.tensorflow import GradientTape
from remat.tensorflow.peak.device import current_device

pytestmark = pytest.mark.other_cpu

BATCH, UNITS, LAYERS = 512, 64, 12
ACTIVATION = BATCH * UNITS * 4  # 128 KiB: half of what the counter begins with.
WEIGHT = UNITS * UNITS * 4


@pytest.fixture(scope="module")
def weights() -> list[tf.Variable]:
    return [tf.Variable(tf.random.stateless_normal([UNITS, UNITS], [1, n]) / 8) for n in range(LAYERS)]


def step_of(weights, tape_of):
    @tf.function(autograph=False)
    def step(x):
        with tape_of() as tape:
            h = x
            for weight in weights:
                h = tf.tanh(h @ weight)
            loss = tf.reduce_mean(h)
        found = tape.gradient(loss, weights)
        step.plan = getattr(tape, "plan", None)
        return found

    return step


def test_the_bytes_of_a_traced_step_are_the_sums_written_by_hand(weights):
    graph = remat.tensorflow.trace(step_of(weights, tf.GradientTape), tf.TensorSpec([BATCH, UNITS]))

    # Weights and batch, but for what the gradient of a mean is made of: shapes and factors of a few bytes.
    assert 0 <= graph.pinned_bytes - (LAYERS * WEIGHT + ACTIVATION) < 256
    plan = remat.plan(graph, "100%", planner="store_all")
    # At the turning point every activation lives, and beside them the gradient of the last two, one made of the other.
    forward = LAYERS * (WEIGHT + ACTIVATION) + ACTIVATION
    assert forward + ACTIVATION <= plan.peak_bytes <= forward + 2 * ACTIVATION + WEIGHT + 256


def test_a_step_of_small_tensors_is_planned_by_its_real_bytes(weights):
    x = tf.random.stateless_normal([BATCH, UNITS], [2, 3])
    elsewhere = current_device().in_use_bytes  # Of other tests, which is no share of this step.
    plain_bytes = LAYERS * (WEIGHT + ACTIVATION) + 3 * ACTIVATION
    step = step_of(weights, lambda: GradientTape(budget=elsewhere + int(0.65 * plain_bytes), planner="peak_greedy"))
    found = step(x)

    plan = step.plan
    assert plan.baseline_peak_bytes >= LAYERS * (WEIGHT + ACTIVATION)
    assert plan.recomputed > 0
    assert LAYERS * WEIGHT + 2 * ACTIVATION < plan.peak_bytes <= plan.budget_bytes
    for ours, plain in zip(found, step_of(weights, tf.GradientTape)(x), strict=True):
        tf.debugging.assert_near(ours, plain, rtol=1e-5)


def test_a_budget_below_the_weights_of_small_tensors_is_refused(weights):
    step = step_of(weights, lambda: GradientTape(budget=LAYERS * WEIGHT, planner="peak_greedy"))

    with pytest.raises(remat.InfeasibleBudget) as caught:
        step(tf.zeros([BATCH, UNITS]))
    assert caught.value.minimum_bytes > LAYERS * WEIGHT + ACTIVATION
