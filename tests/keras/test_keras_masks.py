"""Masks that layers hand on reach the metrics of a limited model as they do those of a plain one.

On TensorFlow here; ``tests/keras_contract.py`` runs it on JAX and PyTorch.
"""

from __future__ import annotations

import keras
import numpy as np
import pytest

import remat.keras

BATCH, STEPS, WORDS, UNITS = 64, 24, 30, 16


def a_model() -> keras.Model:
    keras.utils.set_random_seed(3)
    inputs = keras.Input((STEPS,), dtype="int32")
    x = keras.layers.Embedding(WORDS, UNITS, mask_zero=True, name="embedding")(inputs)
    for _ in range(3):
        x = keras.layers.Dense(UNITS, "tanh")(keras.layers.LayerNormalization()(x))
    outputs = {"words": keras.layers.Dense(WORDS, name="words")(x), "sums": keras.layers.Dense(1, name="sums")(x)}
    model = keras.Model(inputs, outputs)
    model.compile(
        "sgd",
        {"words": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "sums": "mse"},
        metrics={"words": ["accuracy"], "sums": ["mae"]},
        jit_compile=keras.backend.backend() == "jax",
    )
    return model


def data_of_some_lengths():
    random = np.random.default_rng(0)
    words = random.integers(1, WORDS, (2 * BATCH, STEPS))
    words[np.arange(STEPS) >= random.integers(4, STEPS, 2 * BATCH)[:, None]] = 0
    return words, {"words": words, "sums": words.sum(1, keepdims=True)[..., None] / WORDS * np.ones((1, STEPS, 1))}


def trained(**limit) -> dict[str, list[float]]:
    model = a_model()
    if limit:
        remat.keras.limit_memory(model, **limit)
    return model.fit(*data_of_some_lengths(), batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history


@pytest.mark.parametrize("limit", [{"budget": "85%"}, {"budget": "100%", "micro_batches": 2}], ids=str)
def test_metrics_see_masks(limit):
    plain, limited = trained(), trained(**limit)
    assert set(limited) == set(plain)
    for name, values in plain.items():
        assert limited[name] == pytest.approx(values, rel=1e-4), name


def test_there_are_masks_to_be_seen():
    """Without them, what is padded counts as any other step."""
    model = a_model()
    model.get_layer("embedding").mask_zero = False
    unmasked = model.fit(*data_of_some_lengths(), batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
    assert unmasked["words_accuracy"] != pytest.approx(trained()["words_accuracy"], rel=1e-3)
