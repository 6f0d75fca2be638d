"""Steps that are captured by calling them, and steps that Dynamo captures, each beside plain training."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
import torch
from keras import layers

import remat.keras
from remat.keras.torch import called_step, graph_step

sys.path.insert(0, str(Path(__file__).parent.parent))

from worker_process import serve

WIDTH, BATCH, STEPS = 32, 512, 4

factor = 1.0
"""What layers of a class of their own read."""


@keras.saving.register_keras_serializable("tests")
class ReadsAGlobal(layers.Layer):
    def call(self, x: Any) -> Any:
        return x * factor


@keras.saving.register_keras_serializable("tests")
class Routed(layers.Layer):
    """Two experts of each row, picked by value, and a loss that is the layer's own."""

    def call(self, x: Any) -> Any:
        shares, experts = keras.ops.top_k(keras.ops.softmax(x), 2)
        picked = keras.ops.one_hot(experts, x.shape[-1])
        self.add_loss(1e-2 * keras.ops.mean(keras.ops.square(shares)))
        return x + keras.ops.sum(keras.ops.cast(picked, x.dtype) * shares[..., None], axis=1)


def own_activation(x: Any) -> Any:
    return keras.ops.tanh(x) * factor


def stack(between: Callable[[int], Any], activation: Any = "gelu") -> keras.Model:
    inputs = keras.Input((WIDTH,))
    x = inputs
    for number in range(4):
        x = layers.Dense(4 * WIDTH, activation=activation, kernel_regularizer=keras.regularizers.L2(1e-3))(x)
        x = between(number)(x)
    return keras.Model(inputs, layers.Dense(10)(x))


def twice_the_rate(model: keras.Model) -> None:
    for layer in model.layers:
        if isinstance(layer, layers.Dropout):
            layer.rate = 0.5


def twice_the_noise(model: keras.Model) -> None:
    for layer in model.layers:
        if isinstance(layer, layers.GaussianNoise):
            layer.stddev = 0.2


def no_longer_trained(model: keras.Model) -> None:
    model.layers[1].trainable = False


def weaker(model: keras.Model) -> None:
    for layer in model.layers:
        if isinstance(layer, layers.Dense) and layer.kernel_regularizer is not None:
            layer.kernel_regularizer.l2 = 1e-2


def another_activation(model: keras.Model) -> None:
    model.layers[1].activation = keras.activations.relu


def a_class_that_does_not_count(model: keras.Model) -> None:
    model.loss._fn_kwargs["ignore_class"] = 3


def an_activation_of_ones_own(model: keras.Model) -> None:
    model.layers[1].activation = own_activation


def another_factor(model: keras.Model) -> None:
    global factor
    factor = 0.5


def nothing(model: keras.Model) -> None:
    pass


CASES: dict[str, tuple[Callable[[], keras.Model], Callable[[keras.Model], None]]] = {
    "nothing changes": (lambda: stack(lambda _: layers.BatchNormalization()), nothing),
    "a rate changes": (lambda: stack(lambda _: layers.Dropout(0.1)), twice_the_rate),
    "a layer is frozen": (lambda: stack(lambda _: layers.LayerNormalization()), no_longer_trained),
    "a regularizer changes": (lambda: stack(lambda _: layers.LayerNormalization()), weaker),
    "a loss changes": (lambda: stack(lambda _: layers.LayerNormalization()), a_class_that_does_not_count),
    "an activation changes": (lambda: stack(lambda _: layers.LayerNormalization()), another_activation),
    "a function comes later": (lambda: stack(lambda _: layers.LayerNormalization()), an_activation_of_ones_own),
    "draws with seeds": (
        lambda: stack(lambda number: layers.Dropout(0.1, seed=number, noise_shape=(None, 1) if number else None)),
        nothing,
    ),
    "noise with seeds": (lambda: stack(lambda number: layers.GaussianNoise(0.1, seed=number)), twice_the_noise),
    "a layer of one's own": (lambda: stack(lambda _: ReadsAGlobal()), another_factor),
    "experts": (lambda: stack(lambda _: Routed()), nothing),
    "a function of one's own": (lambda: stack(lambda _: layers.Activation("tanh"), own_activation), another_factor),
}


def beside_plain(name: str, mode: Any = "graph") -> dict[str, Any]:
    """Weights after some steps, in the middle of which something changes."""
    make, change = CASES[name]
    draws = np.random.default_rng(1)
    x, y = draws.normal(size=(BATCH, WIDTH)).astype("float32"), draws.integers(0, 10, BATCH)
    called: list[str] = []

    def trained(limited: bool) -> tuple[list[Any], list[Any], keras.Model]:
        global factor
        factor = 1.0
        keras.utils.set_random_seed(3)
        model = make()
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        if limited:
            remat.keras.limit_memory(model, "80%", planner="peak_greedy", mode=mode)
        logs = []
        for step in range(STEPS):
            if step == STEPS // 2:
                change(model)
            logs.append(float(model.train_on_batch(x, y)))
        return logs, model.get_weights(), model

    own = called_step.state_of

    def noted(model: keras.Model) -> Any:
        called.append(model.name)
        return own(model)

    plain_logs, plain, _ = trained(False)
    with mock.patch.object(graph_step, "state_of", noted):
        logs, weights, model = trained(True)
    plan = remat.keras.plan_of(model)
    assert plan is not None
    graph = remat.keras.graph_of(model)
    assert graph is not None
    layer = getattr(model.layers[1], "path", None) or model.layers[1].name
    return {
        "mode": plan.mode,
        "called": len(called),
        "why not called": called_step.why_not_called(model),
        "recomputed": plan.recomputed,
        "same logs": logs == plain_logs,
        "same weights": all(np.array_equal(a, b) for a, b in zip(plain, weights, strict=True)),
        "captures": captures_of(model),
        "peak_bytes": plan.peak_bytes,
        "measured_peak_bytes": plan.measured_peak_bytes,
        "layers": sorted({op.layer for op in graph.ops if op.layer}),
        "phases of a layer": sorted({op.phase for op in graph.ops if op.layer == layer}),
    }


def captures_of(model: keras.Model) -> int:
    """How often a model's step was captured by calling it."""
    steps = remat.keras.limit._limit_of(model)._graph_steps
    return 0 if steps is None else len(getattr(steps._captured._compiled, "_captured", ()))


def by_both_ways() -> dict[str, Any]:
    """One step, captured by calling it and by Dynamo."""
    peaks, counts = [], []
    for known in (True, False):
        why_not = called_step.why_not_called if known else lambda model: "asked for"
        keras.utils.set_random_seed(3)
        model = stack(lambda _: layers.BatchNormalization())
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        with mock.patch.object(graph_step, "why_not_called", why_not):
            remat.keras.limit_memory(model, "80%", planner="peak_greedy", mode="graph")
            model.train_on_batch(np.zeros((BATCH, WIDTH), "float32"), np.zeros(BATCH, "int64"))
        plan, graph = remat.keras.plan_of(model), remat.keras.graph_of(model)
        assert plan is not None
        assert graph is not None
        peaks.append(plan.peak_bytes)
        counts.append([op.kind for op in graph.ops])
    return {"peaks": peaks, "same operators": counts[0] == counts[1], "operators": len(counts[0])}


def that_holds_tensors() -> dict[str, Any]:
    """Tensors that are no variables, a layer's own and the model's, are read where they are, whatever they hold."""
    draws = np.random.default_rng(1)
    x, y = draws.normal(size=(BATCH, WIDTH)).astype("float32"), draws.integers(0, 10, BATCH)

    def trained(limited: bool) -> tuple[list[Any], keras.Model]:
        keras.utils.set_random_seed(3)
        inputs = keras.Input((WIDTH,))
        normalized = layers.Normalization(mean=np.full(WIDTH, 0.5), variance=np.full(WIDTH, 2.0))
        hidden = normalized(inputs)
        for _ in range(4):
            hidden = layers.Dense(4 * WIDTH, activation="gelu")(hidden)
        scale = keras.ops.sqrt(2.0)
        model = keras.Sequential([keras.Model(inputs, hidden * scale), layers.Dense(10)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        if limited:
            remat.keras.limit_memory(model, "80%", planner="peak_greedy", mode="graph")
        for step in range(STEPS):
            if step == STEPS // 2:
                normalized.mean = normalized.mean + 1.0
                scale.mul_(0.5)
            model.train_on_batch(x, y)
        return model.get_weights(), model

    (plain, _), (weights, model) = trained(False), trained(True)
    plan = remat.keras.plan_of(model)
    assert plan is not None
    same = all(np.array_equal(a, b) for a, b in zip(plain, weights, strict=True))
    return {"mode": plan.mode, "same weights": same, "captures": captures_of(model)}


def holds_no_batch() -> bool:
    """Is the batch that a step was captured with gone, once nobody else holds it?"""
    import gc
    import weakref

    model = stack(lambda _: layers.LayerNormalization())
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    remat.keras.limit_memory(model, "80%", planner="peak_greedy", mode="graph")
    x = torch.zeros(BATCH, WIDTH)
    model.train_on_batch(x, torch.zeros(BATCH, dtype=torch.int64))
    seen = weakref.ref(x)
    del x
    gc.collect()
    return seen() is None


def goes_with_its_last_user(mode: Any) -> bool:
    """Is a model gone that trained within a budget, once nobody else holds it?"""
    import gc
    import weakref

    model = stack(lambda _: layers.LayerNormalization())
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    remat.keras.limit_memory(model, "80%", planner="peak_greedy", mode=mode)
    model.train_on_batch(torch.zeros(BATCH, WIDTH), torch.zeros(BATCH, dtype=torch.int64))
    seen = weakref.ref(model)
    del model
    gc.collect()
    return seen() is None


if __name__ == "__main__":
    serve(
        {
            "beside_plain": beside_plain,
            "by_both_ways": by_both_ways,
            "goes_with_its_last_user": goes_with_its_last_user,
            "holds_no_batch": holds_no_batch,
            "that_holds_tensors": that_holds_tensors,
        }
    )
