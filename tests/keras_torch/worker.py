"""Trains Keras models on PyTorch, plainly and limited, in a process that answers one case after the other.

The backend of Keras is fixed when it is imported, so the tests that run TensorFlow in their process cannot run PyTorch.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
import torch
from keras import layers

import remat.keras
import remat.torch
from remat.core.plan import NOT_PROVED
from remat.keras.torch import choose, graph_step

sys.path.insert(0, str(Path(__file__).parent.parent))

from keras_versions import ACTIVITY_REGULARIZER
from worker_process import serve

WIDTH, BATCH = 32, 128


def functional() -> keras.Model:
    inputs = keras.Input((WIDTH,))
    x = layers.BatchNormalization()(inputs)
    for number in range(6):
        x = layers.Dropout(0.2)(layers.Dense(4 * WIDTH, activation="tanh", name=f"hidden_{number}")(x))
    return keras.Model(inputs, layers.Dense(10, kernel_regularizer="l2", activity_regularizer=ACTIVITY_REGULARIZER)(x))


def dense(classes: int = 10, regulariser: str | None = None) -> keras.Model:
    """Nothing in it sees the other samples of a batch, or draws."""
    inputs = keras.Input((WIDTH,))
    x = inputs
    for number in range(6):
        x = layers.Dense(4 * WIDTH, activation="gelu", name=f"hidden_{number}")(x)
    return keras.Model(inputs, layers.Dense(classes, kernel_regularizer=regulariser)(x))


def regularised() -> keras.Model:
    return dense(regulariser="l2")


def wide() -> keras.Model:
    """What it returns is the largest part of the memory."""
    return dense(1000)


def deep() -> keras.Model:
    """Of its layers' outputs autograd saves a part, and Keras holds all until the forward pass ends."""
    inputs = keras.Input((WIDTH,))
    x = layers.Dense(2 * WIDTH)(inputs)
    for _ in range(6):
        x = layers.Add()([layers.Dense(2 * WIDTH)(layers.Dense(2 * WIDTH, activation="gelu")(x)), x])
    return keras.Model(inputs, layers.Dense(10)(x))


def preprocessed() -> keras.Model:
    """Layers of libraries: one asks TensorFlow where it is, one makes an operation at each call, one asks CUDA."""
    inputs = keras.Input((WIDTH,))
    x = layers.Reshape((4, 8))(layers.Rescaling(0.5, offset=0.1)(inputs))
    x = layers.Reshape((4, 8, 1))(layers.MultiHeadAttention(2, 8)(x, x))
    for _ in range(3):
        x = layers.Conv2D(32, 3, use_bias=False)(layers.ZeroPadding2D(1)(x))
        x = layers.ReLU(6.0)(layers.BatchNormalization()(x))
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


def sequence() -> keras.Model:
    """Large activations, small weights."""
    inputs = keras.Input((WIDTH,))
    x = layers.RepeatVector(100)(inputs)
    for _ in range(2):
        x = layers.Dense(WIDTH, activation="gelu")(x)
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


class Drawn(layers.Layer):
    """Draws from a generator that its seed makes anew at each step, which Dynamo cannot capture."""

    def __init__(self) -> None:
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(3)

    def call(self, x):
        return x * keras.random.uniform(keras.ops.shape(x), 0.5, 1.5, seed=self.seed_generator)


def drawing() -> keras.Model:
    inputs = keras.Input((WIDTH,))
    x = Drawn()(layers.Dense(4 * WIDTH, activation="tanh")(inputs))
    return keras.Model(inputs, layers.Dense(10)(layers.Dense(4 * WIDTH, activation="tanh")(x)))


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
    "regularised": regularised,
    "wide": wide,
    "deep": deep,
    "preprocessed": preprocessed,
    "sequence": sequence,
    "drawing": drawing,
    "own train_step": OwnTrainStep,
    "own loss": OwnLoss,
}


def train(spec: dict[str, Any], limited: bool) -> tuple[dict[str, Any], keras.Model]:
    keras.utils.set_random_seed(3)
    rng = np.random.default_rng(1)
    x = rng.normal(size=(spec.get("samples", 256), WIDTH)).astype("float32")
    y = rng.integers(0, 10, len(x))
    model = MODELS[spec.get("model", "functional")]()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, **spec.get("loss", {}))
    weights = rng.uniform(size=len(x)).astype("float32") if "loss" in spec else None
    model.compile(optimizer="adam", loss=loss, metrics=["accuracy"], **spec.get("compile", {}))
    if limited:
        try:
            how = {name: spec[name] for name in ("budget", "checkpoints", "micro_batches", "levers") if name in spec}
            # A capture takes seconds; the cases of graph mode ask for it.
            how["mode"] = spec.get("mode", "eager")
            remat.keras.limit_memory(model, **how, planner=spec.get("planner", "peak_greedy"))
            history = fit(model, spec, x, y, weights)
        except remat.InfeasibleBudget as error:
            if not spec.get("at least"):
                raise
            return train({**spec, "budget": error.minimum_bytes, "at least": False}, True)
    else:
        history = fit(model, spec, x, y, weights)
    return history.history, model


def fit(model: keras.Model, spec: dict[str, Any], x: Any, y: Any, weights: Any) -> Any:
    batch = spec.get("batch", BATCH)
    return model.fit(x, y, batch_size=batch, sample_weight=weights, epochs=2, shuffle=False, verbose=0)


OPTIMIZERS = {
    "AdamW on a schedule": lambda: keras.optimizers.AdamW(keras.optimizers.schedules.ExponentialDecay(1e-3, 2, 0.9)),
    "some without decay": lambda: undecayed(keras.optimizers.AdamW(1e-3, weight_decay=0.1)),
    "SGD, each clipped": lambda: keras.optimizers.SGD(0.01, momentum=0.9, nesterov=True, clipnorm=0.1),
    "Adam, amsgrad": lambda: keras.optimizers.Adam(1e-3, amsgrad=True),
    "RMSprop": lambda: keras.optimizers.RMSprop(1e-3, centered=True, momentum=0.9),
    "Lion": lambda: keras.optimizers.Lion(1e-3),
    "Adagrad": lambda: keras.optimizers.Adagrad(1e-2),
    "Adadelta": lambda: keras.optimizers.Adadelta(1e-1),
    "Adamax": lambda: keras.optimizers.Adamax(1e-3),
    "all clipped together": lambda: keras.optimizers.Adam(1e-3, global_clipnorm=1.0),
    "moving average": lambda: keras.optimizers.Adam(1e-3, use_ema=True),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1e-2)),
    "Nadam": lambda: keras.optimizers.Nadam(1e-3),
}


def undecayed(optimizer: Any) -> Any:
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


def updated_early(name: str) -> dict[str, Any]:
    """Training of large weights and few samples with updates in the backward pass, beside plain training."""
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(32, WIDTH)).astype("float32"), rng.integers(0, 10, 32)

    def trained(levers: tuple[str, ...]) -> tuple[keras.Model, int]:
        keras.utils.set_random_seed(3)
        inputs = keras.Input((WIDTH,))
        hidden = inputs
        for number in range(6):
            bound = keras.constraints.MaxNorm(1.0) if number == 2 else None
            hidden = layers.Dense(256, activation="tanh", kernel_constraint=bound)(hidden)
        model = keras.Model(inputs, layers.Dense(10)(hidden))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=OPTIMIZERS[name](), loss=loss)
        if levers:
            remat.keras.limit_memory(model, "150%", levers=levers, planner="peak_greedy", mode="graph")
        for _ in range(4):
            model.train_on_batch(x, y)
        return model, remat.torch.measure(lambda: model.train_on_batch(x, y), repeats=1).peak_bytes

    try:
        (plain, plain_bytes), (early, early_bytes) = trained(()), trained(("recompute", "update"))
    except remat.RematError as error:
        return {"error": type(error).__name__, "message": str(error)}
    plan = remat.keras.plan_of(early)
    assert plan is not None
    assert plan.update is not None
    pairs = zip(plain.get_weights(), early.get_weights(), strict=True)
    states = zip(plain.optimizer.variables, early.optimizer.variables, strict=True)
    weights = sum(weight.nbytes for weight in early.get_weights())
    return {
        "same weights": all(np.array_equal(a, b) for a, b in pairs),
        "same state": all(np.array_equal(a.numpy(), b.numpy()) for a, b in states),
        "mode": plan.mode,
        "moved": plan.update.moved,
        "bound by": plan.update.bound_by,
        "weights": weights,
        "plain": plain_bytes,
        "measured": early_bytes,
        "predicted": plan.peak_bytes,
    }


def ordered_alike() -> bool:
    """Does our way of putting keys in order, which Dynamo can follow, do what Keras' does?"""
    from remat.keras.torch import _for_dynamo

    some = {"b": 1, "a": [2, (3, None)]}
    structures = [some, [some, (some,)], (), [], None, 5, Counter({"b": 2, "a": 1}), torch.ones(2), ((some, "x"), [])]
    pairs = [(_for_dynamo._ordered(one), _for_dynamo._own_ordered(one)) for one in structures]
    return all(repr(ours) == repr(own) and type(ours) is type(own) for ours, own in pairs)


def without_room_in_graph_mode(spec: dict[str, Any]) -> dict[str, Any]:
    """As ``in_both_modes``, where no plan of graph mode fits."""

    def no_plan(self: Any, *args: Any) -> Any:
        raise remat.InfeasibleBudget("none", minimum_bytes=10**9, budget_bytes=1, binding_op="none")

    with mock.patch.object(graph_step.GraphSteps, "run_piece", no_plan):
        return in_both_modes(spec)


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """What remat logs inside."""
    said: list[str] = []
    told = logging.Handler()
    told.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("remat").addHandler(told)
    try:
        yield said
    finally:
        logging.getLogger("remat").removeHandler(told)


def in_both_modes(spec: dict[str, Any]) -> dict[str, Any]:
    """The same limit in eager and in graph mode."""
    with heard() as said:
        histories, models = zip(*(train({**spec, "mode": mode}, True) for mode in ("eager", "graph")), strict=True)
    plans = [remat.keras.plan_of(model) for model in models]
    pairs = zip(*(model.get_weights() for model in models), strict=True)
    return {
        "modes": [plan.mode for plan in plans],
        "said": said,
        "recomputed": [plan.recomputed for plan in plans],
        "same weights": all(np.array_equal(a, b) for a, b in pairs),
        "same history": histories[0] == histories[1],
        "peak_bytes": plans[1].peak_bytes,
        "measured": measured_peak(models[1], spec["batch"]),
    }


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
    """What was chosen, where there was a choice."""
    choice = remat.keras.micro_batch_choice_of(model)
    return choice and {
        "micro_batches": choice.micro_batches,
        "counts": [option.micro_batches for option in choice.options],
        "budget_bytes": choice.budget_bytes,
        "recomputes": any(option.recomputes for option in choice.options),
        "proved": [
            option.micro_batches
            for option in choice.options
            if option.plan is not None and option.plan.lower_bound_meaning != NOT_PROVED
        ],
        "timed_s": choice.chosen.measured_time_s,
        "times_are_measured": choice.times_are_measured,
        "text": str(choice),
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


def plain_peak_bytes(spec: dict[str, Any]) -> int:
    """Of a whole batch's step, as a plan for it says."""
    whole = {name: value for name, value in spec.items() if name != "checkpoints"}
    _, model = train({**whole, "budget": "100%", "micro_batches": 1, "samples": spec["batch"]}, limited=True)
    plan = remat.keras.plan_of(model)
    assert plan is not None
    return plan.baseline_peak_bytes


@functools.cache
def trained_plainly(told: str) -> tuple[dict[str, Any], list[Any]]:
    """History and weights; once for all limits that are compared with it."""
    history, model = train(json.loads(told), limited=False)
    return history, model.get_weights()


def outcome(spec: dict[str, Any]) -> dict[str, Any]:
    """What limited training came to, beside plain training of the same model on the same data."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), heard() as said:
            limited, model = train(spec, limited=True)
    except remat.RematError as error:
        return {"error": type(error).__name__, "message": str(error)}
    limits = {"budget", "checkpoints", "micro_batches", "planner", "at least", "mode", "levers"}
    plain, weights = trained_plainly(json.dumps({name: value for name, value in spec.items() if name not in limits}))
    plan = remat.keras.plan_of(model)
    assert plan is not None
    pairs = list(zip(weights, model.get_weights(), strict=True))
    first_bytes = plan.measured_peak_bytes
    departures = [applied.departures for applied in remat.keras.limit._limit_of(model)._applied.values()]
    measured, choice = measured_peak(model, spec.get("batch", BATCH)), chosen(model)
    kinds = recomputed_kinds(model)
    remat.keras.limit_memory(model, None)
    return {
        "measured": measured,
        "mode": plan.mode,
        "first step": first_bytes,
        "said": said,
        "choice": choice,
        "printed": printed.getvalue(),
        "difference": max(float(np.abs(a - b).max() / np.abs(a).max()) for a, b in pairs),
        "plain": plain,
        "limited": limited,
        "same weights": all(np.array_equal(a, b) for a, b in pairs),
        "departures": departures,
        "recomputed": plan.recomputed,
        "slices": 0 if plan.split is None else plan.split.slices,
        "recomputed_kinds": kinds,
        "peak_bytes": plan.peak_bytes,
        "budget_bytes": plan.budget_bytes,
        "plain_bytes": plan.baseline_peak_bytes,
        "detached": "make_train_function" not in vars(model),
    }


def choose_as_if_all_took_a_second() -> dict[str, Any]:
    """What is chosen where samples take alike in micro-batches of any size, and each step under a plan takes a second.

    Each computation that would be timed is run once.
    """
    samples = 900

    def seconds(runs: Any, *_: Any) -> dict[int, float]:
        for run in runs.values():
            run()
        # Steps under a plan go by the number of micro-batches, the whole batch among them; else by samples.
        return {key: 1.0 if 1 in runs else key / samples for key in runs}

    own = choose._least_times_s
    choose._least_times_s = seconds
    try:
        spec = {"model": "dense", "budget": "70%", "micro_batches": "auto", "batch": samples, "samples": samples}
        return dict(chosen(train(spec, limited=True)[1]) or {})
    finally:
        choose._least_times_s = own


if __name__ == "__main__":
    serve(
        {
            "choose_as_if_all_took_a_second": choose_as_if_all_took_a_second,
            "outcome": outcome,
            "checked": checked,
            "in_both_modes": in_both_modes,
            "without_room_in_graph_mode": without_room_in_graph_mode,
            "ordered_alike": ordered_alike,
            "plain_peak_bytes": plain_peak_bytes,
            "updated_early": updated_early,
        }
    )
