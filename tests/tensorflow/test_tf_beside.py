"""A budget counts what lies on the device beside a step: all of it, and the step's own arguments once.

An array of numpy is not there yet when the step is planned, a tensor is: the sum is the same either way. TensorFlow
copies an array, and where numpy happens to put the copy decides whether the device counts it.
"""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
import tensorflow as tf

import remat
from remat.tensorflow import GradientTape, value_and_grad
from remat.tensorflow._traces import arguments_of_calls
from remat.tensorflow.peak.device import _arguments_here, called_with, current_device

MIB = 1 << 20
BATCH, UNITS, LAYERS = 8192, 64, 8
ACTIVATION = BATCH * UNITS * 4  # 2 MiB
BESIDE = 5 * MIB
ROOM = 16 * MIB  # For the step alone, which takes 20 without a plan.


@pytest.fixture(name="weights")
def weights_too_small_to_be_counted() -> list[tf.Variable]:
    return [tf.Variable(tf.random.stateless_normal([UNITS, UNITS], [1, n]) / 8) for n in range(LAYERS)]


@pytest.fixture(name="beside", params=[0, BESIDE])
def something_beside(request) -> int:
    """Bytes in use, those of other tests and of a tensor that stays until the test ends."""
    gc.collect()
    held = tf.zeros([request.param // 4]) if request.param else None
    yield current_device().in_use_bytes
    del held


def an_array() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(BATCH, UNITS)).astype("float32")


def a_tensor() -> tf.Tensor:
    return tf.random.stateless_normal([BATCH, UNITS], [2, 3])


def loss_of(weights, h):
    for weight in weights:
        h = tf.tanh(h @ weight)
    return tf.reduce_mean(h)


def by_tape(weights, budget):
    @tf.function(autograph=False)
    def step(x):
        with GradientTape(budget=budget, planner="peak_greedy") as tape:
            loss = loss_of(weights, x)
        found = tape.gradient(loss, weights)
        step.plan = tape.plan
        return found

    return step


def inside_another(weights, budget):
    inner = by_tape(weights, budget)

    @tf.function(autograph=False)
    def outer(x):
        return inner(x)

    outer.inner = inner
    return outer


def plan_of(step):
    return getattr(step, "inner", step).plan


def in_a_replica(weights, budget):
    inner = by_tape(weights, budget)
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])

    @tf.function(autograph=False)
    def outer(x):
        return strategy.run(inner.python_function, (x,))

    outer.inner = inner
    return outer


def own_peak_bytes(step, argument, before_bytes: int) -> int:
    """What one call takes at most, beside what there was."""
    step(argument)
    device = current_device()
    assert device.in_use_bytes <= before_bytes + ACTIVATION
    device.reset_peak()
    found = step(argument)
    peak_bytes = device.peak_bytes
    del found
    return peak_bytes


@pytest.mark.parametrize("make", [by_tape, inside_another, in_a_replica])
@pytest.mark.parametrize(("argument", "uncounted_bytes"), [(an_array, ACTIVATION), (a_tensor, 0)])
def test_a_budget_holds_whatever_lies_beside(weights, beside, make, argument, uncounted_bytes):
    step = make(weights, beside + ROOM)
    peak_bytes = own_peak_bytes(step, argument(), beside)

    plan = plan_of(step)
    assert plan.recomputed > 0
    assert peak_bytes <= plan.budget_bytes
    # Neither too little nor an activation more than there is.
    assert peak_bytes <= plan.peak_bytes < peak_bytes + ACTIVATION + uncounted_bytes
    assert beside < plan.baseline_peak_bytes - ROOM < beside + 3 * ACTIVATION


def test_the_smallest_budget_grows_by_what_lies_beside(weights):
    def smallest(argument) -> int:
        with pytest.raises(remat.InfeasibleBudget) as refused:
            by_tape(weights, 1)(argument)
        return refused.value.minimum_bytes

    array, tensor = an_array(), a_tensor()
    before_bytes = current_device().in_use_bytes
    alone = smallest(array), smallest(tensor)
    held = tf.zeros([BESIDE // 4])
    # A block that is a little too large is not split, and counts whole.
    held_bytes = current_device().in_use_bytes - before_bytes
    beside = smallest(array), smallest(tensor)
    del held
    assert held_bytes >= BESIDE
    grown = [after - before for before, after in zip(alone, beside, strict=True)]
    assert grown == pytest.approx([held_bytes] * 2, rel=0.1)  # A budget's reserve is a share of it.
    assert alone[0] - alone[1] == pytest.approx(ACTIVATION, rel=0.1)  # Beside the array lies the tensor.


def test_a_captured_tensor_counts_once(weights, beside):
    x = a_tensor()
    step = by_tape(weights, beside + ACTIVATION + ROOM)
    captured = tf.function(lambda: step(x), autograph=False)
    captured()
    plan = step.plan
    device = current_device()
    device.reset_peak()
    captured()
    assert device.peak_bytes <= plan.peak_bytes < device.peak_bytes + ACTIVATION


def test_micro_batches_count_the_batch_once(weights, beside):
    peaks = []
    for argument in (an_array(), a_tensor()):
        gradients = value_and_grad(
            lambda x: loss_of(weights, x), weights, micro_batches=2, budget=beside + ROOM, planner="peak_greedy"
        )
        step = tf.function(gradients, autograph=False)
        step(argument)
        device = current_device()
        device.reset_peak()
        step(argument)
        peaks.append(device.peak_bytes)
    assert max(peaks) <= beside + ROOM


def test_a_share_counts_the_batch_once(weights):
    """It is one of the whole batch's plain peak, for which the function is traced aside, in a thread of its own."""
    for argument in (an_array(), a_tensor()):
        whole = by_tape(weights, "100%")
        whole(argument)
        share = value_and_grad(
            lambda x: loss_of(weights, x), weights, micro_batches=2, budget="1%", planner="peak_greedy"
        )
        with pytest.raises(remat.InfeasibleBudget) as refused:
            tf.function(share, autograph=False)(argument)
        assert 100 * refused.value.budget_bytes == pytest.approx(whole.plan.baseline_peak_bytes, rel=0.03)


def test_arguments_are_those_that_exist_of_all_calls_under_way():
    seen = []

    @tf.function(autograph=False)
    def inner(x, *, y):
        seen.append(arguments_of_calls())
        return x + y

    @tf.function
    def outer(x, pair):
        return inner(x * 2, y=pair["y"])

    x, y = tf.constant([1.0]), tf.constant([2.0])
    outer(x, {"y": y, "z": np.ones(3)})
    assert {id(value) for value in seen.pop()} == {id(x), id(y)}
    inner(np.ones(2, "float32"), y=y)
    assert [id(value) for value in seen.pop()] == [id(y)]
    inner.get_concrete_function(tf.TensorSpec([None, 2]), y=x)
    assert [id(value) for value in seen.pop()] == [id(x)]
    assert arguments_of_calls() == []


def test_a_replica_is_traced_in_a_thread_of_its_own():
    """Its caller's thread has seen the arguments, and has said what a data set hands over."""
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    seen = []

    def replica(x):
        seen.append((arguments_of_calls(), _arguments_here(), threading.current_thread()))
        return x

    x, y = tf.constant([1.0]), tf.zeros([2, 3])
    tf.function(lambda x: strategy.run(replica, (x,)))(x)
    given, here, thread = seen.pop()
    assert thread is not threading.current_thread()
    assert [id(value) for value in given] == [id(x)]
    assert [argument.shape for argument in here] == [[1]]
    with called_with([y]):
        tf.function(lambda x: strategy.run(replica, (x,)))(x)
    assert [argument.shape for argument in seen.pop()[1]] == [[2, 3]]
