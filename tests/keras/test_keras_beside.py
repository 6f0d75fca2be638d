"""Keras on TensorFlow: what lies beside a model counts against its budget, and a batch counts once.

Arrays are not there yet when a step is planned; the first batch of a data set is, held by the data set. Whether the
device counts an array depends on where its copy happens to lie, so data sets are made of tensors here.
"""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import remat
import remat.keras
from remat.tensorflow.peak.device import current_device

MIB = 1 << 20
BATCH, UNITS = 8192, 64
BATCH_BYTES = BATCH * UNITS * 4  # 2 MiB, as every activation


def a_model() -> keras.Model:
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(UNITS, "tanh") for _ in range(8)]
    model = keras.Sequential([keras.Input((UNITS,)), *layers, keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    return model


def counted_like(x):
    return tf.random.stateless_normal(x.shape, [1, 2])


def on_arrays(model, x, y):
    for _ in range(3):
        model.train_on_batch(x, y)


def on_tensors(model, x, y):
    x = counted_like(x)
    for _ in range(3):
        model.train_on_batch(x, y)


def on_a_data_set(model, x, y):
    model.fit(tf.data.Dataset.from_tensors((counted_like(x), y)).repeat(3), verbose=0)


@pytest.fixture(name="data")
def data_of_a_batch():
    random = np.random.default_rng(0)
    return random.normal(size=(BATCH, UNITS)).astype("float32"), random.normal(size=(BATCH, 1)).astype("float32")


def smallest_bytes(train, data) -> int:
    model = a_model()
    remat.keras.limit_memory(model, budget=1)
    with pytest.raises(remat.InfeasibleBudget) as refused:
        train(model, *data)
    return refused.value.minimum_bytes


@pytest.mark.parametrize("train", [on_arrays, on_tensors, on_a_data_set])
def test_the_smallest_budget_grows_by_what_lies_beside(data, train):
    device = current_device()
    before_bytes = device.in_use_bytes
    alone = smallest_bytes(train, data)
    held = tf.zeros([5 * MIB // 4])
    held_bytes = device.in_use_bytes - before_bytes
    beside = smallest_bytes(train, data)
    del held
    assert held_bytes >= 5 * MIB
    assert beside - alone == pytest.approx(held_bytes, rel=0.1)  # A budget's reserve is a share of it.


@pytest.mark.parametrize("train", [on_arrays, on_tensors, on_a_data_set])
def test_a_budget_holds_whatever_lies_beside(data, train):
    held = tf.zeros([5 * MIB // 4])
    device = current_device()
    before_bytes = device.in_use_bytes
    model = a_model()
    remat.keras.limit_memory(model, budget=smallest_bytes(train, data) + BATCH_BYTES)
    train(model, *data)
    plan = remat.keras.plan_of(model)
    del held
    assert plan is not None
    assert plan.recomputed > 0
    assert plan.measured_peak_bytes > before_bytes + 3 * BATCH_BYTES
    assert plan.measured_peak_bytes <= plan.budget_bytes
    assert plan.peak_bytes < plan.measured_peak_bytes + 1.5 * BATCH_BYTES
