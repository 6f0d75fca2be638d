"""Saving and loading: a limit is a setting of the object, never part of the file, and never in its way."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from small_models import BATCH, BUILDERS, assert_same_variables, compiled, data, limit

import remat


def train(model):
    model.fit(*data(), batch_size=BATCH, shuffle=False, verbose=0)


def load(path):
    keras.utils.set_random_seed(9)  # The seeds of dropout are drawn anew when a model is loaded.
    return keras.saving.load_model(path)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "build",
    [b if b.__name__ == "functional" else pytest.param(b, marks=pytest.mark.slow) for b in BUILDERS],
    ids=lambda b: b.__name__,
)
def test_save_and_load(build, tmp_path):
    path = tmp_path / "model.keras"
    model = limit(compiled(build))
    train(model)
    model.save(path)
    assert remat.keras.plan_of(model).recomputed > 0

    plain, limited = load(path), load(path)

    for a, b in zip(limited.weights, model.weights, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    with pytest.raises(ValueError, match=r"has no memory limit; call remat\.keras\.limit_memory"):
        remat.keras.plan_of(limited)
    limit(limited)
    train(limited)
    train(plain)
    assert remat.keras.plan_of(limited).recomputed > 0
    assert_same_variables(limited, plain)


@pytest.mark.slow
def test_a_checkpoint_callback_works(tmp_path):
    model = limit(compiled(BUILDERS[0]))
    callback = keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.keras")
    model.fit(*data(), batch_size=BATCH, epochs=2, verbose=0, callbacks=[callback])

    assert sorted(p.name for p in tmp_path.iterdir()) == ["1.keras", "2.keras"]


def test_weights_file(tmp_path):
    model = limit(compiled(BUILDERS[0]))
    train(model)
    model.save_weights(tmp_path / "model.weights.h5")
    other = compiled(BUILDERS[0])
    other.load_weights(tmp_path / "model.weights.h5")

    for a, b in zip(other.weights, model.weights, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


@pytest.mark.slow
def test_a_clone_is_plain():
    model = limit(compiled(BUILDERS[0]))
    train(model)
    clone = keras.models.clone_model(model)

    with pytest.raises(ValueError, match=r"has no memory limit"):
        remat.keras.plan_of(clone)
