"""Trains Keras models on JAX, plainly and limited, in a process that answers one case after the other.

The backend of Keras is fixed when it is imported, so the tests that run TensorFlow in their process cannot run JAX.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import keras
import numpy as np
from keras import layers

import remat
import remat.keras
from remat.keras.jax import choose
from remat.keras.jax.step import MicroBatchedStep

sys.path.insert(0, str(Path(__file__).parent.parent))

from keras_versions import ACTIVITY_REGULARIZER
from worker_process import serve

WIDTH, BATCH = 32, 128


def stack() -> list[layers.Layer]:
    made: list[layers.Layer] = [layers.BatchNormalization()]
    for number in range(5):
        name = f"{('even', 'odd')[number % 2]}_{number}"
        made += [layers.Dense(2 * WIDTH, activation="tanh", name=name), layers.Dropout(0.2)]
    return made


def functional() -> keras.Model:
    inputs = keras.Input((WIDTH,))
    x = inputs
    for layer in stack():
        x = layer(x)
    return keras.Model(inputs, layers.Dense(10, kernel_regularizer="l2", activity_regularizer=ACTIVITY_REGULARIZER)(x))


class Subclassed(keras.Model):
    """Layers in ``call``, and a train_step of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = stack()
        self.head = layers.Dense(10)

    def call(self, x: Any, training: bool | None = None) -> Any:
        for layer in self.stack:
            x = layer(x, training=training) if isinstance(layer, layers.Dropout) else layer(x)
        return self.head(x)

    def train_step(self, state: Any, data: Any) -> Any:
        logs, state = super().train_step(state, data)
        return {**logs, "doubled": 2.0 * logs["loss"]}, state


def dense(*, is_normalised: bool = False) -> keras.Model:
    """Nothing that couples samples or draws anew."""
    inputs = keras.Input((WIDTH,))
    x = layers.BatchNormalization()(inputs) if is_normalised else inputs
    for number in range(8):
        x = layers.Dense(2 * WIDTH, activation="tanh", name=f"hidden_{number}")(x)
    return keras.Model(inputs, layers.Dense(10, kernel_regularizer="l2", activity_regularizer=ACTIVITY_REGULARIZER)(x))


def masked() -> keras.Model:
    """Attention under a mask that nobody passes on by hand, with dropout, and a loss that a layer adds."""
    inputs = keras.Input((WIDTH,))
    x = layers.Embedding(20, WIDTH, mask_zero=True)(keras.ops.cast(3 * keras.ops.abs(inputs), "int32"))
    for number in range(2):
        attended = layers.MultiHeadAttention(2, WIDTH // 2, dropout=0.2, name=f"attention_{number}")(x, x)
        x = layers.LayerNormalization(name=f"norm_{number}")(layers.Add()([x, attended]))
        x = layers.ActivityRegularization(l2=1e-3)(x)
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


def wide() -> keras.Model:
    """Its head is the largest part of the memory."""
    inputs = keras.Input((WIDTH,))
    return keras.Model(inputs, layers.Dense(4000)(layers.Dense(WIDTH, activation="tanh")(inputs)))


def normalised() -> keras.Model:
    """Samples are coupled, and nothing draws."""
    return dense(is_normalised=True)


def turned() -> keras.Model:
    """Its first layer does not support ``jit``, so that Keras compiles nothing of the model."""
    inputs = keras.Input((WIDTH,))
    images = layers.RandomRotation(0.1, name="turning")(layers.Reshape((WIDTH // 4, 4, 1))(inputs))
    return keras.Model(inputs, layers.Dense(10)(layers.Flatten()(images)))


MODELS = {
    "dense": dense,
    "turned": turned,
    "normalised": normalised,
    "functional": functional,
    "masked": masked,
    "subclassed": Subclassed,
    "wide": wide,
}


def data(samples: int) -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    return random.normal(size=(samples, WIDTH)).astype("float32"), random.integers(0, 10, samples)


def planning_of(spec: dict[str, Any]) -> dict[str, Any]:
    """A quick planner where the planner is not what is tested."""
    return {"planner": spec.get("planner", "peak_greedy"), "time_limit_s": 0.3}


@functools.cache
def trained_plainly(told: str) -> dict[str, Any]:
    """Once for all limits that are compared with it."""
    return train(json.loads(told), False)


def plain_peak_bytes(spec: dict[str, Any]) -> int:
    """Of a whole batch's step, as a plan for it says."""
    whole = {**spec, "micro_batches": 1, "budget": "100%", "samples": spec["batch"]}
    return int(train(whole, True)["plan"]["baseline_peak_bytes"])


def train(spec: dict[str, Any], limited: bool) -> dict[str, Any]:
    keras.utils.set_random_seed(3)
    model = MODELS[spec["model"]]()
    model.compile(
        optimizer=keras.optimizers.SGD(0.05, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        steps_per_execution=spec.get("steps_per_execution", 1),
        **spec.get("compile", {}),
    )
    if limited:
        how = {name: spec[name] for name in ("micro_batches", "checkpoints", "levers") if name in spec}
        remat.keras.limit_memory(model, spec["budget"], **how, **planning_of(spec))
    batch = spec.get("batch", BATCH)
    x, y = data(spec.get("samples", 3 * batch))
    weights = np.linspace(0.1, 2, len(x)) if spec.get("weighted") else None

    def fit() -> Any:
        return model.fit(
            x,
            y,
            sample_weight=weights,
            batch_size=batch,
            epochs=2,
            shuffle=False,
            verbose=0,
            validation_data=data(50) if spec.get("validation") else None,
        )

    try:
        history = fit()
    except remat.InfeasibleBudget as error:
        if not spec.get("retried"):
            raise
        remat.keras.limit_memory(model, error.minimum_bytes, **planning_of(spec))
        history = fit()
    variables = [np.asarray(v) for v in [*model.variables, *model.optimizer.variables]]
    result: dict[str, Any] = {"history": history.history, "variables": variables, "plan": None}
    plan, graph = (remat.keras.plan_of(model), remat.keras.graph_of(model)) if limited else (None, None)
    choice = remat.keras.micro_batch_choice_of(model) if limited else None
    if choice is not None:
        result["choice"] = {
            "micro_batches": choice.micro_batches,
            "budget_bytes": choice.budget_bytes,
            "counts": [option.micro_batches for option in choice.options],
            "recomputes": any(option.recomputes for option in choice.options),
            "timed_s": choice.chosen.measured_time_s,
            "times_are_measured": choice.times_are_measured,
            "text": str(choice),
        }
    if isinstance(spec.get("micro_batches"), int):
        remat.keras.limit_memory(model, None)
        result["peak"] = step_bytes(model, spec["micro_batches"] if limited else 1, x[:batch], y[:batch])
    if plan is not None and graph is not None:
        runs = Counter(plan.schedule)
        result["plan"] = {
            "recomputed": plan.recomputed,
            "names": sorted({op.name for number, op in enumerate(graph.ops) if runs[number] > 1}),
            "peak_bytes": plan.peak_bytes,
            "baseline_peak_bytes": plan.baseline_peak_bytes,
            "budget_bytes": plan.budget_bytes,
            "ops": len(graph.ops),
            "slices": 0 if plan.split is None else plan.split.slices,
            "moved": 0 if plan.update is None else plan.update.moved,
        }
        remat.keras.limit_memory(model, None)
        model.fit(x[:BATCH], y[:BATCH], batch_size=BATCH, verbose=0)
    return result


def distribute(kind: str | None) -> None:
    """Batches, or batches and every second layer's units, over four devices of this machine."""
    devices = keras.distribution.list_devices()
    if kind == "batches":
        keras.distribution.set_distribution(keras.distribution.DataParallel(devices=devices))
    elif kind == "units":
        mesh = keras.distribution.DeviceMesh((2, 2), ("batch", "model"), devices)
        layout = keras.distribution.LayoutMap(mesh)
        layout["even.*kernel"], layout["odd.*kernel"] = (None, "model"), ("model", None)
        keras.distribution.set_distribution(keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="batch"))


def step_bytes(model: keras.Model, micro_batches: int, *batch: Any) -> int:
    """Temporary bytes of a model's compiled training step, in micro-batches or not."""
    parts = (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    )
    step: Any = model.train_step
    if micro_batches > 1:
        in_pieces = MicroBatchedStep(model, micro_batches)
        step = lambda state, data: in_pieces(model, state, data, lambda function: function)  # noqa: E731
    state = tuple([variable.value for variable in part] for part in parts)
    compiled = jax.jit(step, donate_argnums=0).lower(state, batch).compile()
    return int(compiled.memory_analysis().temp_size_in_bytes)


def compare(spec: dict[str, Any]) -> dict[str, Any]:
    try:
        return compared(spec)
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error)}


def compared(spec: dict[str, Any]) -> dict[str, Any]:
    distribute(spec.get("distribution"))
    # Whether a peak is measured depends on the number of micro-batches being one.
    limits = {"budget", "checkpoints", "planner", "retried", "levers"}
    plain = trained_plainly(json.dumps({name: value for name, value in spec.items() if name not in limits}))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        limited = train(spec, True)
    difference = 0.0
    for a, b in zip(limited["variables"], plain["variables"], strict=True):
        if b.dtype.kind == "f":
            difference = max(
                difference, float(np.max(np.abs(a - b), initial=0) / max(1e-3, np.max(np.abs(b), initial=0)))
            )
        else:
            np.testing.assert_array_equal(a, b)
    return {
        "difference": difference,
        "plain": plain["history"],
        "limited": limited["history"],
        "plan": limited["plan"],
        "choice": limited.get("choice"),
        "peaks": {"plain": plain.get("peak"), "limited": limited.get("peak")},
        "warnings": [str(one.message) for one in said],
        "loaded": sorted(name for name in sys.modules if name.startswith("remat.")),
        "devices": len(jax.devices()),
    }


def choose_as_if_all_took_a_second() -> dict[str, Any]:
    """What is chosen where samples take alike in micro-batches of any size, and each step under a plan takes a second.

    Each computation that would be timed is run once.
    """
    samples = 1536

    def seconds(runs: Any, *_: Any) -> dict[int, float]:
        for run in runs.values():
            run()
        # Steps under a plan go by the number of micro-batches, the whole batch among them; else by samples.
        return {key: 1.0 if 1 in runs else key / samples for key in runs}

    own = choose._least_times_s
    choose._least_times_s = seconds
    try:
        spec = {"model": "dense", "budget": "70%", "micro_batches": "auto", "batch": samples, "samples": samples}
        return dict(train(spec, True)["choice"])
    finally:
        choose._least_times_s = own


if __name__ == "__main__":
    serve(
        {
            "choose_as_if_all_took_a_second": choose_as_if_all_took_a_second,
            "compare": compare,
            "plain_peak_bytes": plain_peak_bytes,
        }
    )
