"""Steps of a few KiB, in which even a tensor's shape is among the large tensors."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import remat
import remat.keras


def data(rows):
    random = np.random.default_rng(0)
    batches = [(random.normal(size=(8, rows, 8)).astype("float32"), np.ones((8, rows, 1), "float32")) for _ in range(3)]
    spec = (tf.TensorSpec((None, rows, 8)), tf.TensorSpec((None, rows, 1)))
    return tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=spec)


def trained(rows, budget):
    keras.utils.set_random_seed(0)
    layers = [*(keras.layers.Dense(8) for _ in range(4)), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((rows, 8)), *layers])
    model.compile("sgd", "mse", jit_compile=False)
    if budget is not None:
        remat.keras.limit_memory(model, budget=budget)
    model.fit(data(rows), verbose=0)
    return model.get_weights()


@pytest.mark.parametrize("rows", [2, 16, 64])
def test_a_tiny_step_trains_as_plainly(rows):
    with pytest.raises(remat.InfeasibleBudget) as refused:
        trained(rows, 1)
    plain = trained(rows, None)
    for more in (0, rows * 16, rows * 64):
        planned = trained(rows, refused.value.minimum_bytes + more)
        for one, own in zip(plain, planned, strict=True):
            np.testing.assert_allclose(own, one, rtol=1e-6)
