"""``remat.keras.check`` with a budget in bytes: copies of the gradients lie beside the step.

On TensorFlow here; ``tests/keras_contract.py`` runs it on JAX and PyTorch.
"""

from __future__ import annotations

import keras
import numpy as np
import pytest

import remat
import remat.keras

BATCH, UNITS = 4096, 128


def a_model():
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(UNITS, "tanh") for _ in range(6)]
    model = keras.Sequential([keras.Input((UNITS,)), *layers, keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, jit_compile=keras.backend.backend() == "jax")
    return model


@pytest.fixture(name="data")
def data_of_two_batches():
    random = np.random.default_rng(0)
    return random.normal(size=(2 * BATCH, UNITS)).astype("float32"), random.integers(0, 10, 2 * BATCH)


def test_the_smallest_budget_is_kept_with_the_same_numbers(data):
    model = a_model()
    with pytest.raises(remat.InfeasibleBudget) as refused:
        remat.keras.check(model, *data, budget=1, batch_size=BATCH)
    budget = refused.value.minimum_bytes
    result = remat.keras.check(model, *data, budget=budget, batch_size=BATCH)
    assert result.passed, str(result)
    assert result.budget_bytes == budget
    assert result.recomputed > 0
    shown = {"weights", "losses"} if keras.backend.backend() == "jax" else {"gradients", "weights", "losses"}
    assert {one.what for one in result.comparisons} >= shown
