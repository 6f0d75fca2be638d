"""``check_first_step=True``: the first step is run plainly, too, and what differs by more than rounding is said."""

from __future__ import annotations

import logging

import keras
import numpy as np
import pytest

import remat
import remat.keras
from said import said

SAMPLES, UNITS = 512, 128


class Drifting(keras.layers.Layer):
    """Adds another number in each trace, so that two functions made of it do not compute the same."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def call(self, x):
        self.calls += 1
        return x + 0.01 * self.calls

    def compute_output_shape(self, input_shape):
        return input_shape


def model_with(*more):
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(UNITS, "gelu") for _ in range(5)]
    special = [keras.layers.BatchNormalization(), keras.layers.Dropout(0.1, seed=1), *more]
    model = keras.Sequential([keras.Input((UNITS,)), *layers, *special, keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # Adam's first steps are as long as the learning rate, whatever the gradient: rounding has to be seen as such.
    model.compile("adam", loss, metrics=["accuracy"], jit_compile=keras.backend.backend() == "jax")
    return model


def fitted(model, epochs=2):
    random = np.random.default_rng(0)
    x, y = random.normal(size=(2 * SAMPLES, UNITS)).astype("float32"), random.integers(0, 10, 2 * SAMPLES)
    history = model.fit(x, y, batch_size=SAMPLES, epochs=epochs, shuffle=False, verbose=0).history
    return history, [keras.ops.convert_to_numpy(v.value) for v in (*model.variables, *model.optimizer.variables)]


def limited(model, **options):
    return remat.keras.limit_memory(model, "90%", planner="peak_greedy", check_first_step=True, **options)


def test_a_step_that_is_the_plain_one_is_run_as_ever(caplog):
    plain_history, plain = fitted(model_with())
    with caplog.at_level(logging.INFO, logger="remat"):
        model = limited(model_with())
        history, values = fitted(model)
    assert remat.keras.plan_of(model).recomputed > 0
    assert [line for line in caplog.messages if "is the plain one; they differ by" in line]
    assert not [line for line in caplog.messages if "is not the plain one" in line]
    for name, losses in plain_history.items():
        np.testing.assert_allclose(history[name], losses, rtol=1e-5, err_msg=name)
    for value, expected in zip(values, plain, strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
def test_a_step_that_is_another_one_is_said(caplog):
    fitted(limited(model_with(Drifting())), epochs=1)
    (line,) = [line for line in said(caplog) if "is not the plain one" in line]
    assert "please report the model" in line


@pytest.mark.thorough
def test_a_strict_limit_refuses_it_and_leaves_the_model_as_it_was():
    model = limited(model_with(Drifting()), strict=True)
    before = [keras.ops.convert_to_numpy(v.value).copy() for v in model.variables]
    with pytest.raises(remat.PlanMismatch, match="is not the plain one"):
        fitted(model)
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(variable.value), value)


class Noisy(keras.layers.Layer):
    """Draws from Keras' own generator, which belongs to no model."""

    def call(self, x):
        return x * keras.random.uniform((), 0.5, 1.5)

    def compute_output_shape(self, input_shape):
        return input_shape


@pytest.mark.thorough
def test_what_draws_other_numbers_each_time_cannot_be_compared(caplog):
    fitted(limited(model_with(Noisy())), epochs=1)
    assert [line for line in said(caplog) if "cannot be compared with the plain one" in line]
