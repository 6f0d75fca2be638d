"""One training of a Keras model on PyTorch, plain and limited, in a process of its own; prints one JSON object.

The backend of Keras is fixed when it is imported, so the tests that run TensorFlow in this process cannot run PyTorch.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections import Counter
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
from keras import layers

import remat.keras
import remat.torch

WIDTH, BATCH = 32, 128
PLANNING: dict[str, Any] = {"planner": "peak_greedy"}


def functional() -> keras.Model:
    inputs = keras.Input((WIDTH,))
    x = layers.BatchNormalization()(inputs)
    for number in range(6):
        x = layers.Dropout(0.2)(layers.Dense(4 * WIDTH, activation="tanh", name=f"hidden_{number}")(x))
    return keras.Model(inputs, layers.Dense(10, kernel_regularizer="l2", activity_regularizer="l2")(x))


def dense(classes: int = 10) -> keras.Model:
    """Nothing in it sees the other samples of a batch, or draws."""
    inputs = keras.Input((WIDTH,))
    x = inputs
    for number in range(6):
        x = layers.Dense(4 * WIDTH, activation="gelu", name=f"hidden_{number}")(x)
    return keras.Model(inputs, layers.Dense(classes)(x))


def wide() -> keras.Model:
    """What it returns is the largest part of the memory."""
    return dense(1000)


def sequence() -> keras.Model:
    """Large activations, small weights."""
    inputs = keras.Input((WIDTH,))
    x = layers.RepeatVector(100)(inputs)
    for _ in range(2):
        x = layers.Dense(WIDTH, activation="gelu")(x)
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


class Inner(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.inner = functional()
        self.never_called = layers.Identity(name="never_called")

    def call(self, x, training=None):
        return self.inner(x, training=training)


class OwnTrainStep(Inner):
    def train_step(self, data):
        return super().train_step(data)


class OwnLoss(Inner):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)


MODELS = {
    "functional": functional,
    "dense": dense,
    "wide": wide,
    "sequence": sequence,
    "own train_step": OwnTrainStep,
    "own loss": OwnLoss,
}


def train(spec: dict[str, Any], limited: bool) -> tuple[dict[str, Any], keras.Model]:
    keras.utils.set_random_seed(3)
    rng = np.random.default_rng(1)
    x = rng.normal(size=(spec.get("samples", 256), WIDTH)).astype("float32")
    y = rng.integers(0, 10, len(x))
    model = MODELS[spec.get("model", "functional")]()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer="adam", loss=loss, metrics=["accuracy"], **spec.get("compile", {}))
    if limited:
        try:
            how = {name: spec[name] for name in ("budget", "checkpoints", "micro_batches") if name in spec}
            remat.keras.limit_memory(model, **how, **PLANNING)
            history = model.fit(x, y, batch_size=spec.get("batch", BATCH), epochs=2, shuffle=False, verbose=0)
        except remat.InfeasibleBudget as error:
            if not spec.get("at least"):
                raise
            return train({**spec, "budget": error.minimum_bytes, "at least": False}, True)
    else:
        history = model.fit(x, y, batch_size=spec.get("batch", BATCH), epochs=2, shuffle=False, verbose=0)
    return history.history, model


def checked(budget: str) -> dict[str, Any]:
    """What ``remat.keras.check`` says of the model."""
    keras.utils.set_random_seed(3)
    rng = np.random.default_rng(1)
    model = functional()
    model.compile(optimizer="adam", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = rng.normal(size=(4 * BATCH, WIDTH)).astype("float32"), rng.integers(0, 10, 4 * BATCH)
    found = remat.keras.check(model, x, y, budget=budget, steps=2)
    return {"verdict": str(found), "recomputed": found.recomputed}


def chosen(model: keras.Model) -> dict[str, Any] | None:
    """What the joint plan says, where there is one."""
    joint = remat.keras.joint_plan_of(model)
    return joint and {
        "micro_batches": joint.micro_batches,
        "counts": [option.micro_batches for option in joint.options],
        "budget_bytes": joint.budget_bytes,
        "times_are_measured": joint.times_are_measured,
        "text": str(joint),
    }


def recomputed_kinds(model: keras.Model) -> dict[str, int]:
    """How many ops of each kind run more than once."""
    graph, runs = remat.keras.graph_of(model), Counter(remat.keras.plan_of(model).schedule)
    return Counter(op.kind for number, op in enumerate(graph.ops) if runs[number] > 1)


def measured_peak(model: keras.Model, batch: int) -> int:
    """Of one training step on a batch."""
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(batch, WIDTH)).astype("float32"), rng.integers(0, 10, batch)
    return remat.torch.measure(lambda: model.train_on_batch(x, y), repeats=1).peak_bytes


def outcome(spec: dict[str, Any]) -> dict[str, Any]:
    if "check" in spec:
        return checked(spec["check"])
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            limited, model = train(spec, limited=True)
    except remat.RematError as error:
        return {"error": type(error).__name__, "message": str(error)}
    plain, plain_model = train(spec, limited=False)
    plan = remat.keras.plan_of(model)
    assert plan is not None
    weights = zip(plain_model.get_weights(), model.get_weights(), strict=True)
    difference = max(float(np.abs(a - b).max() / np.abs(a).max()) for a, b in weights)
    same = all(np.array_equal(a, b) for a, b in zip(plain_model.get_weights(), model.get_weights(), strict=True))
    departures = [applied.departures for applied in remat.keras.limit._limits[model]._applied.values()]
    measured, joint = measured_peak(model, spec.get("batch", BATCH)), chosen(model)
    kinds = recomputed_kinds(model)
    remat.keras.limit_memory(model, None)
    return {
        "measured": measured,
        "joint": joint,
        "printed": printed.getvalue(),
        "difference": difference,
        "plain": plain,
        "limited": limited,
        "same weights": same,
        "departures": departures,
        "recomputed": plan.recomputed,
        "recomputed_kinds": kinds,
        "peak_bytes": plan.peak_bytes,
        "budget_bytes": plan.budget_bytes,
        "plain_bytes": plan.baseline_peak_bytes,
        "detached": "make_train_function" not in vars(model),
    }


if __name__ == "__main__":
    print(json.dumps([outcome(spec) for spec in json.loads(sys.argv[1])]))
