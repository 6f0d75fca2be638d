"""BatchNormalization in micro-batches: the documented semantics, against a reference written in NumPy."""

from __future__ import annotations

import inspect

import keras
import numpy as np
import pytest
from accumulation import BATCH, FEATURES, SAMPLES, inputs, train
from keras import layers

import remat

EPSILON = 1e-3
RATE = 0.1
MOMENTUM = 0.8


def model_with(**options):
    data = keras.Input((FEATURES,))
    normalised = layers.BatchNormalization(momentum=MOMENTUM, epsilon=EPSILON, name="norm", **options)
    hidden = normalised(layers.Dense(4, name="first")(data))
    model = keras.Model(data, layers.Dense(1, name="last")(keras.ops.tanh(hidden)))
    model.compile(keras.optimizers.SGD(RATE), "mse", jit_compile=keras.backend.backend() == "jax")
    return model


def targets():
    return np.sin(inputs()[:, :1]) + 3.0


def training(model):
    return model.fit(inputs() + 3.0, targets(), batch_size=BATCH, epochs=4, shuffle=False, verbose=0)


class Reference:
    """The model above in float64: each micro-batch is normalised by itself, statistics move once per update."""

    def __init__(self, model):
        self.w, self.b, self.gamma, self.beta, self.v, self.c = (
            weight.numpy().astype("float64") for weight in model.trainable_weights
        )
        self.mean, self.variance = np.zeros(4), np.ones(4)

    def update(self, x, y, count):
        gradients = [np.zeros_like(p) for p in (self.w, self.b, self.gamma, self.beta, self.v, self.c)]
        seen, loss = [], 0.0
        for part, wanted in zip(np.array_split(x, count), np.array_split(y, count), strict=True):
            if not len(part):
                continue
            before = part @ self.w + self.b
            seen.append(before)
            deviation = np.sqrt(before.var(0) + EPSILON)
            normal = (before - before.mean(0)) / deviation
            hidden = np.tanh(normal * self.gamma + self.beta)
            error = hidden @ self.v + self.c - wanted
            loss += np.sum(error**2) / len(x)
            d_out = 2 * error / len(x)
            d_affine = (d_out @ self.v.T) * (1 - hidden**2)
            d_normal = d_affine * self.gamma
            d_before = (d_normal - d_normal.mean(0) - normal * (d_normal * normal).mean(0)) / deviation
            parts = (
                part.T @ d_before,
                d_before.sum(0),
                (d_affine * normal).sum(0),
                d_affine.sum(0),
                hidden.T @ d_out,
                d_out.sum(0),
            )
            gradients = [total + part for total, part in zip(gradients, parts, strict=True)]
        for parameter, gradient in zip((self.w, self.b, self.gamma, self.beta, self.v, self.c), gradients, strict=True):
            parameter -= RATE * gradient
        whole = np.concatenate(seen)
        self.mean = self.mean * MOMENTUM + whole.mean(0) * (1 - MOMENTUM)
        self.variance = self.variance * MOMENTUM + whole.var(0) * (1 - MOMENTUM)
        return loss * len(x)


@pytest.mark.filterwarnings("ignore:micro_batches=")
@pytest.mark.parametrize("count", [2, 3])  # Pieces of two samples have hardly a variance, and rounding blows up.
def test_against_numpy(count):
    found = train(model_with, training, count)
    keras.utils.set_random_seed(7)
    reference = Reference(model_with())
    x, y = (inputs() + np.float32(3.0)).astype("float64"), targets().astype("float64")
    for epoch in range(4):
        starts = range(0, SAMPLES, BATCH)
        total = sum(reference.update(x[s : s + BATCH], y[s : s + BATCH], count) for s in starts)
        np.testing.assert_allclose(found.history["loss"][epoch], total / SAMPLES, rtol=1e-4)
    layer = found.model.get_layer("norm")
    np.testing.assert_allclose(layer.moving_mean, reference.mean, rtol=1e-4)
    np.testing.assert_allclose(layer.moving_variance, reference.variance, rtol=1e-4)
    np.testing.assert_allclose(found.model.get_layer("last").kernel, reference.v, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(found.model.get_layer("first").kernel, reference.w, rtol=1e-3, atol=1e-4)
    assert layer.momentum == MOMENTUM


def training_twice(model):
    training(model)
    model.train_on_batch(inputs()[:4], targets()[:4])


def test_said_once_by_name():
    model = model_with()
    remat.keras.limit_memory(model, micro_batches=3)
    with pytest.warns(UserWarning, match="not the same as full batches for the BatchNormalization layers norm") as said:
        training_twice(model)
    assert sum("micro_batches=3" in str(warning.message) for warning in said) == 1


@pytest.mark.filterwarnings("error:micro_batches=")
def test_a_frozen_layer_is_no_matter():
    def frozen():
        model = model_with()
        model.get_layer("norm").trainable = False
        model.compile(keras.optimizers.SGD(RATE), "mse", jit_compile=keras.backend.backend() == "jax")
        return model

    def few(model):
        return model.fit(inputs(), targets(), batch_size=BATCH, epochs=1, shuffle=False, verbose=0)

    plain, found = train(frozen, few, 1), train(frozen, few, 3)
    np.testing.assert_allclose(found.history["loss"], plain.history["loss"], rtol=1e-5)
    np.testing.assert_array_equal(found.model.get_layer("norm").moving_mean, np.zeros(4))


@pytest.mark.skipif(
    "renorm" not in inspect.signature(keras.layers.BatchNormalization).parameters, reason="Keras has it from 3.14 on"
)
def test_renormalisation_is_refused():
    with pytest.raises(remat.UnsupportedStep, match="renorm=True \\('norm'\\) is not supported with micro-batches"):
        train(lambda: model_with(renorm=True), training, 3)
