"""``limit_memory`` under XLA and in mixed precision."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import remat.keras
from remat.tensorflow.peak.device import current_device

BATCH, WIDTH, CLASSES = 2048, 128, 4  # Activations of 1 MiB; the weights are too small to be counted.


def make_model() -> keras.Model:
    inputs = x = keras.Input((WIDTH,))
    for _ in range(12):
        x = keras.layers.Dense(WIDTH, "gelu")(x)
    x = keras.layers.Dropout(0.2, seed=5)(x)
    return keras.Model(inputs, keras.layers.Dense(CLASSES, "softmax", dtype="float32")(x))


def trained(budget: str | None, *, batch_size: int = BATCH, jit_compile: bool = False) -> tuple[keras.Model, Any]:
    random = np.random.default_rng(0)
    x, y = random.normal(size=(2 * batch_size, WIDTH)).astype("float32"), random.integers(0, CLASSES, 2 * batch_size)
    keras.utils.set_random_seed(7)
    model = make_model()
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "sparse_categorical_crossentropy", jit_compile=jit_compile)
    if budget is not None:
        remat.keras.limit_memory(model, budget=budget, planner="peak_greedy")
    # A data set's batch dimension is unknown while the step is traced, since its last batch may be short.
    feed = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch_size)
    return model, model.fit(feed, epochs=2, verbose=0)


@pytest.mark.slow
def test_compiled_with_xla() -> None:
    # All temporary memory is one block, for which the allocator takes powers of two: only a large step shows savings.
    batch_size = 7 * BATCH
    limited, got, limited_peak = measured("70%", batch_size)
    plain, expected, plain_peak = measured(None, batch_size)
    plan = remat.keras.plan_of(limited)
    assert plan is not None
    assert plan.recomputed > 0
    assert limited_peak <= plan.budget_bytes < 0.8 * plain_peak
    np.testing.assert_allclose(got.history["loss"], expected.history["loss"], rtol=1e-4)
    for want, have in zip(plain.weights, limited.weights, strict=True):
        np.testing.assert_allclose(np.asarray(have), np.asarray(want), rtol=1e-3, atol=1e-5)


def measured(budget: str | None, batch_size: int) -> tuple[keras.Model, Any, int]:
    device = current_device()
    device.reset_peak()
    return *trained(budget, batch_size=batch_size, jit_compile=True), device.peak_bytes


@pytest.fixture
def mixed_precision() -> Any:
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy("float32")


@pytest.mark.thorough
@pytest.mark.usefixtures("mixed_precision")
def test_mixed_precision_with_loss_scaling() -> None:
    plain, expected = trained(None, batch_size=2 * BATCH)
    limited, got = trained("85%", batch_size=2 * BATCH)
    assert remat.keras.plan_of(limited).recomputed > 0
    assert isinstance(limited.optimizer, keras.optimizers.LossScaleOptimizer)
    assert float(limited.optimizer.dynamic_scale) == float(plain.optimizer.dynamic_scale)
    np.testing.assert_allclose(got.history["loss"], expected.history["loss"], rtol=2e-3)
