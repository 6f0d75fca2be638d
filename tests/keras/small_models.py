"""Models whose plan takes a fraction of a second, in every way that Keras lets one write them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import remat

# An activation has more than 256 KiB, so that the device counts it, and a weight less: in TensorFlow 2.21 the variables
# of a model stay allocated once its optimizer has stepped inside a function, and would pile up from test to test.
WIDTH = 100
BATCH = 1024
BUDGET = "75%"
QUICK = {"planner": "peak_greedy"}  # Where training under a plan is tested, not the plan.
BEST = {"planner": "auto", "time_limit_s": 0.5}


def _stack() -> list[layers.Layer]:
    stack: list[layers.Layer] = [layers.BatchNormalization()]
    for _ in range(4):
        stack += [layers.Dense(2 * WIDTH, activation="tanh"), layers.Dropout(0.2)]
    return stack


def functional() -> keras.Model:
    inputs = keras.Input((WIDTH,))
    x = inputs
    for layer in _stack():
        x = layer(x)
    return keras.Model(inputs, layers.Dense(10)(x))


def sequential() -> keras.Model:
    return keras.Sequential([keras.Input((WIDTH,)), *_stack(), layers.Dense(10)])


def sequential_without_input() -> keras.Model:
    return keras.Sequential([*_stack(), layers.Dense(10)])


@keras.saving.register_keras_serializable("remat_tests")
class Subclassed(keras.Model):
    """A model with its layers in ``call``."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.stack = _stack()
        self.head = layers.Dense(10)

    def call(self, x: Any, training: bool | None = None) -> Any:
        for layer in self.stack:
            x = (
                layer(x, training=training)
                if isinstance(layer, layers.Dropout | layers.BatchNormalization)
                else layer(x)
            )
        return self.head(x)


@keras.saving.register_keras_serializable("remat_tests")
class OwnTrainStep(Subclassed):
    """A model with a ``train_step`` of its own, written with TensorFlow's plain tape."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = 2.0 * self.compute_loss(x, y, self(x, training=True), sample_weight)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"doubled_loss": loss}


BUILDERS = [functional, sequential, sequential_without_input, Subclassed, OwnTrainStep]


def data(samples: int = 3 * BATCH, seed: int = 0) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    random = np.random.default_rng(seed)
    return random.normal(size=(samples, WIDTH)).astype("float32"), random.integers(0, 10, samples)


def compiled(build: Callable[[], keras.Model], **options: Any) -> keras.Model:
    """The model with weights from a fixed seed; SGD, which does not blow rounding up."""
    keras.utils.set_random_seed(3)
    model = build()
    defaults = {
        "optimizer": keras.optimizers.SGD(0.05, momentum=0.9),
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "metrics": None if build is OwnTrainStep else ["accuracy"],
        "jit_compile": False,
    }
    model.compile(**{**defaults, **options})
    return model


def limit(model: keras.Model, budget: int | str = BUDGET, **planning: Any) -> keras.Model:
    return remat.keras.limit_memory(model, budget, **(planning or QUICK))


@dataclass(frozen=True)
class Trained:
    """A model after training, and its history."""

    model: keras.Model
    history: dict[str, list[float]]


Fit = Callable[[keras.Model], Any]


def both(
    build: Callable[[], keras.Model], fit: Fit, planning: dict[str, Any] = QUICK, **options: Any
) -> tuple[Trained, Trained]:
    """The same training plainly and within the budget, from the same seeds."""
    trained = []
    for limited in (False, True):
        model = compiled(build, **options)
        if limited:
            limit(model, **planning)
        keras.utils.set_random_seed(5)
        history = fit(model)
        trained.append(Trained(model, getattr(history, "history", history)))
    return trained[0], trained[1]


def assert_same(plain: Trained, limited: Trained) -> None:
    """Equal history, weights, statistics, optimizer and seeds; floats to rounding. And something was recomputed."""
    plan = remat.keras.plan_of(limited.model)
    assert plan is not None
    assert plan.recomputed > 0
    if plain.history is not None:
        assert limited.history.keys() == plain.history.keys()
        for name, values in plain.history.items():
            np.testing.assert_allclose(limited.history[name], values, rtol=1e-4, atol=1e-6, err_msg=name)
    assert_same_variables(limited.model, plain.model)


def assert_same_variables(one: keras.Model, other: keras.Model) -> None:
    ours = [*one.variables, *one.optimizer.variables]
    theirs = [*other.variables, *other.optimizer.variables]
    for a, b in zip(ours, theirs, strict=True):
        found, expected = a.numpy(), b.numpy()
        if np.issubdtype(expected.dtype, np.floating):
            scale = max(1e-3, float(np.max(np.abs(expected), initial=0.0)))
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * scale, err_msg=a.path)
        else:
            np.testing.assert_array_equal(found, expected, err_msg=a.path)
