"""Small models trained on full batches and in micro-batches, from the same seeds."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import layers

import remat

# Five batches an epoch, the last of 12: no k of 7 divides any. Four epochs are 20 updates.
BATCH = 16
SAMPLES = 76
EPOCHS = 4
FEATURES = 6
WORDS = 11
STEPS = 5

Build = Callable[[], keras.Model]
Fit = Callable[[keras.Model], Any]
COUNTS = [2, 3, 7]


def inputs(samples: int = SAMPLES) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).normal(size=(samples, FEATURES)).astype("float32")


def classes(samples: int = SAMPLES, number: int = 3) -> np.ndarray[Any, Any]:
    return np.random.default_rng(1).integers(0, number, samples)


def weights(samples: int = SAMPLES) -> np.ndarray[Any, Any]:
    return np.random.default_rng(2).uniform(0.1, 2.0, samples).astype("float32")


def sentences(samples: int = SAMPLES) -> np.ndarray[Any, Any]:
    """Words, 0 where a sentence has ended; some have no word at all, all of a batch's first micro-batch among them."""
    random = np.random.default_rng(3)
    words = random.integers(1, WORDS, (samples, STEPS))
    words[np.arange(STEPS) >= random.integers(1, STEPS + 1, samples)[:, np.newaxis]] = 0
    words[np.arange(samples) % BATCH < 8] *= np.arange(samples)[np.arange(samples) % BATCH < 8, np.newaxis] % 16 == 9
    return words


def targets(samples: int = SAMPLES) -> np.ndarray[Any, Any]:
    """One class per word."""
    return np.random.default_rng(4).integers(0, 3, (samples, STEPS))


def dense() -> keras.Model:
    data = keras.Input((FEATURES,))
    return keras.Model(data, layers.Dense(3)(layers.Dense(8, activation="tanh")(data)))


def cross_entropy(**options: Any) -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def momentum() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.05, momentum=0.9)


def compiled(model: keras.Model, **options: Any) -> keras.Model:
    defaults = {
        "optimizer": momentum(),
        "loss": cross_entropy(),
        "metrics": ["accuracy"],
        "jit_compile": keras.backend.backend() == "jax",
    }
    model.compile(**{**defaults, **options})
    return model


def fit(model: keras.Model, x: Any, y: Any, **options: Any) -> Any:
    defaults = {"batch_size": BATCH, "epochs": EPOCHS, "shuffle": False, "verbose": 0}
    return model.fit(x, y, **{**defaults, **options})


# The momentum of a bias sums terms of this size that cancel: what is left has their rounding, not its own.
SMALLEST_SCALE = 5e-2


@dataclass(frozen=True)
class Trained:
    """What training left behind."""

    model: keras.Model
    history: dict[str, list[float]]


def train(build: Build, training: Fit, count: int, budget: int | str | None = None, **options: Any) -> Trained:
    keras.utils.set_random_seed(7)
    model = build()
    if count > 1:
        remat.keras.limit_memory(model, budget, micro_batches=count, **options)
    history = training(model)
    return Trained(model, getattr(history, "history", history))


@functools.cache
def full_batches(build: Build, training: Fit) -> Trained:
    """Trained plainly; once, however many numbers of micro-batches are compared with it."""
    return train(build, training, 1)


def assert_equal_training(
    build: Build, training: Fit, count: int, *, tolerance: float = 1e-5, **options: Any
) -> Trained:
    """History, weights, statistics and the optimizer's variables, all equal to rounding; integers exactly."""
    plain = full_batches(build, training)
    found = train(build, training, count, **options)
    assert_equal_history(found.history, plain.history, tolerance)
    ours = [*found.model.variables, *found.model.optimizer.variables]
    theirs = [*plain.model.variables, *plain.model.optimizer.variables]
    for one, other in zip(ours, theirs, strict=True):
        if other.dtype.startswith("float"):
            expected = other.numpy()
            scale = max(SMALLEST_SCALE, float(np.max(np.abs(expected), initial=0.0)))
            np.testing.assert_allclose(one, expected, rtol=0, atol=tolerance * scale, err_msg=other.path)
        elif "seed" not in other.path:
            np.testing.assert_array_equal(one, other, err_msg=other.path)
    return found


def assert_equal_history(
    found: dict[str, list[float]], expected: dict[str, list[float]], tolerance: float = 1e-5
) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=tolerance, atol=tolerance, err_msg=name)
