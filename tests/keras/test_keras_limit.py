"""``limit_memory``: training as ever, in less memory, for every way of feeding and building a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import remat
import remat.keras

SAMPLES, BATCH, WIDTH, CLASSES = 4608, 2048, 128, 4  # Two full batches of 1 MiB activations, and a short one.


def layers() -> list[keras.layers.Layer]:
    dense = [keras.layers.Dense(WIDTH, "tanh", name=f"dense_{n}") for n in range(12)]
    return [
        *dense[:4],
        keras.layers.Dropout(0.2, seed=5),
        *dense[4:],
        keras.layers.Dense(CLASSES, "softmax", name="out"),
    ]


class OwnStep(keras.Model):
    """A subclassed model with a ``train_step`` of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = layers()

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        for part in self.parts:
            x = part(x, training=training) if isinstance(part, keras.layers.Dropout) else part(x)
        return x

    def train_step(self, data: Any) -> dict[str, tf.Tensor]:
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True), sample_weight=weights) * 2.0
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"doubled": loss}


def functional() -> keras.Model:
    inputs = keras.Input((WIDTH,))
    x = inputs
    for layer in layers():
        x = layer(x)
    return keras.Model(inputs, x)


def sequential() -> keras.Model:
    return keras.Sequential([keras.Input((WIDTH,)), *layers()])


def sequential_without_input() -> keras.Model:
    return keras.Sequential(layers())


def subclassed() -> keras.Model:
    return OwnStep()


MODELS = [functional, sequential, sequential_without_input, subclassed]


def data(count: int = SAMPLES) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    return random.normal(size=(count, WIDTH)).astype("float32"), random.integers(0, CLASSES, count).astype("int32")


def trained(
    make: Callable[[], keras.Model],
    fit: Callable[[keras.Model], Any],
    *,
    budget: str | None,
    **compile_options: Any,
) -> tuple[keras.Model, Any]:
    keras.utils.set_random_seed(7)
    model = make()
    options: dict[str, Any] = {"metrics": ["accuracy"]} if make is not subclassed else {}
    model.compile(
        optimizer=keras.optimizers.SGD(0.05, momentum=0.9),
        loss="sparse_categorical_crossentropy",
        **{"jit_compile": False, **options, **compile_options},
    )
    if budget is not None:
        remat.keras.limit_memory(model, budget=budget, time_limit_s=0.5)
    return model, fit(model)


def assert_trains_alike(make: Callable[[], keras.Model], fit: Callable[[keras.Model], Any], **options: Any) -> Any:
    """Train plain and limited; compare history and every variable. Returns the plan."""
    plain, expected = trained(make, fit, budget=None, **options)
    limited, got = trained(make, fit, budget="75%", **options)
    plan = remat.keras.plan_of(limited)
    assert plan is not None
    assert plan.recomputed > 0
    if isinstance(expected, keras.callbacks.History):
        expected, got = expected.history, got.history
        assert set(expected) == set(got)
        for name, values in expected.items():
            np.testing.assert_allclose(got[name], values, rtol=1e-4, err_msg=name)
    else:
        np.testing.assert_allclose(got, expected, rtol=1e-4)
    for want, have in zip(plain.variables, limited.variables, strict=True):
        want_, have_ = np.asarray(want), np.asarray(have)
        if want_.dtype.kind == "f":
            np.testing.assert_allclose(have_, want_, rtol=1e-4, atol=1e-6, err_msg=want.path)
        else:
            # Seed generators: dropout drew the same numbers, once.
            np.testing.assert_array_equal(have_, want_, err_msg=want.path)
    return plan


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_every_kind_of_model(make: Callable[[], keras.Model]) -> None:
    x, y = data()
    assert_trains_alike(make, lambda model: model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, shuffle=False))


FEEDS: dict[str, Callable[[keras.Model], Any]] = {
    "validation": lambda m: m.fit(*data(), batch_size=BATCH, verbose=0, validation_data=data(256), shuffle=False),
    "sample_weight": lambda m: m.fit(
        *data(), batch_size=BATCH, verbose=0, shuffle=False, sample_weight=np.linspace(0, 1, SAMPLES)
    ),
    "class_weight": lambda m: m.fit(
        *data(), batch_size=BATCH, verbose=0, shuffle=False, class_weight={0: 1.0, 1: 2.0, 2: 0.5, 3: 0.0}
    ),
    "dataset": lambda m: m.fit(tf.data.Dataset.from_tensor_slices(data()).batch(BATCH), epochs=2, verbose=0),
    "dataset_of_fixed_batches": lambda m: m.fit(
        tf.data.Dataset.from_tensor_slices(data()).batch(BATCH, drop_remainder=True), epochs=2, verbose=0
    ),
    "generator": lambda m: m.fit(
        ((x[:BATCH], y[:BATCH]) for x, y in [data()] * 4), steps_per_epoch=2, epochs=2, verbose=0
    ),
    "train_on_batch": lambda m: [m.train_on_batch(*(part[:BATCH] for part in data())) for _ in range(3)],
    "schedule_and_callbacks": lambda m: m.fit(
        *data(),
        batch_size=BATCH,
        epochs=3,
        verbose=0,
        shuffle=False,
        callbacks=[keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1))],
    ),
}


@pytest.mark.parametrize("feed", FEEDS)
def test_every_way_of_feeding(feed: str) -> None:
    assert_trains_alike(functional, FEEDS[feed])


def test_several_steps_per_execution() -> None:
    x, y = data()
    assert_trains_alike(
        functional,
        lambda model: model.fit(x, y, batch_size=BATCH // 2, epochs=2, verbose=0, shuffle=False),
        steps_per_execution=2,
    )


def test_compiled_with_xla() -> None:
    x, y = data()
    options = {"batch_size": BATCH, "epochs": 2, "verbose": 0, "shuffle": False}
    plain, expected = trained(functional, lambda m: m.fit(x, y, **options), budget=None, jit_compile=True)
    limited, got = trained(functional, lambda m: m.fit(x, y, **options), budget="90%", jit_compile=True)
    assert remat.keras.plan_of(limited).recomputed > 0
    np.testing.assert_allclose(got.history["loss"], expected.history["loss"], rtol=1e-4)
    for want, have in zip(plain.weights, limited.weights, strict=True):
        np.testing.assert_allclose(np.asarray(have), np.asarray(want), rtol=1e-3, atol=1e-5)


def test_dict_inputs_and_several_outputs() -> None:
    def make() -> keras.Model:
        inputs = {"left": keras.Input((WIDTH,), name="left"), "right": keras.Input((WIDTH,), name="right")}
        x = inputs["left"]
        for number in range(12):
            x = keras.layers.Dense(WIDTH, "tanh", name=f"d{number}")(x) + inputs["right"]
        outputs = {"one": keras.layers.Dense(1, name="one")(x), "two": keras.layers.Dense(2, name="two")(x)}
        return keras.Model(inputs, outputs)

    x, _ = data(BATCH)
    targets = {"one": x[:, :1], "two": x[:, 1:3]}

    def fit(model: keras.Model) -> Any:
        model.compile(keras.optimizers.SGD(0.01), loss={"one": "mse", "two": "mae"}, loss_weights={"one": 1, "two": 3})
        return model.fit({"left": x, "right": x[::-1]}, targets, batch_size=BATCH, epochs=2, verbose=0)

    assert_trains_alike(make, fit, metrics=None)


def test_mixed_precision_with_loss_scaling() -> None:
    def make() -> keras.Model:
        keras.config.set_dtype_policy("mixed_float16")
        try:
            return functional()
        finally:
            keras.config.set_dtype_policy("float32")

    x, y = data()

    def run(budget: str | None) -> tuple[keras.Model, Any]:
        def fit(model: keras.Model) -> Any:
            return model.fit(x, y, batch_size=BATCH * 2, epochs=2, verbose=0, shuffle=False)

        return trained(make, fit, budget=budget)

    (plain, expected), (limited, got) = run(None), run("85%")
    assert isinstance(limited.optimizer, keras.optimizers.LossScaleOptimizer)
    assert float(limited.optimizer.dynamic_scale) == float(plain.optimizer.dynamic_scale)
    np.testing.assert_allclose(got.history["loss"], expected.history["loss"], rtol=2e-3)


def test_a_larger_batch_is_planned_again() -> None:
    x, y = data()
    model, _ = trained(functional, lambda m: m.train_on_batch(x[:256], y[:256]), budget="90%")
    first = remat.keras.plan_of(model)
    model.train_on_batch(x[:BATCH], y[:BATCH])
    second = remat.keras.plan_of(model)
    assert second.peak_bytes > first.peak_bytes
    model.train_on_batch(x[:100], y[:100])
    assert remat.keras.plan_of(model) is second


def test_a_limit_survives_compile_and_can_be_replaced() -> None:
    x, y = data(BATCH)
    model, _ = trained(functional, lambda m: m.fit(x, y, batch_size=BATCH, verbose=0), budget="80%")
    first = remat.keras.plan_of(model)
    model.compile(keras.optimizers.SGD(), loss="sparse_categorical_crossentropy", jit_compile=False)
    model.fit(x, y, batch_size=BATCH, verbose=0)
    assert remat.keras.plan_of(model) is not first
    assert remat.keras.plan_of(model).recomputed > 0
    remat.keras.limit_memory(model, budget="200%")
    assert remat.keras.plan_of(model) is None
    model.fit(x, y, batch_size=BATCH, verbose=0)
    assert remat.keras.plan_of(model).recomputed == 0


def test_save_and_load(tmp_path: Any) -> None:
    x, y = data(BATCH)
    model, _ = trained(functional, lambda m: m.fit(x, y, batch_size=BATCH, verbose=0), budget="80%")
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    for want, have in zip(model.weights, loaded.weights, strict=True):
        np.testing.assert_array_equal(np.asarray(have), np.asarray(want))
    with pytest.raises(ValueError, match="no memory limit"):
        remat.keras.plan_of(loaded)
    remat.keras.limit_memory(loaded, budget="80%")
    loaded.fit(x, y, batch_size=BATCH, verbose=0)
    assert remat.keras.plan_of(loaded).recomputed > 0


def test_an_impossible_budget_names_the_smallest() -> None:
    x, y = data(BATCH)
    model, _ = trained(functional, lambda m: None, budget=None)
    remat.keras.limit_memory(model, budget="1MiB")
    with pytest.raises(remat.InfeasibleBudget, match="smallest budget that can be kept is") as caught:
        model.fit(x, y, batch_size=BATCH, verbose=0)
    assert caught.value.minimum_bytes > caught.value.budget_bytes == 1 << 20
    assert "op " in caught.value.binding_op
    remat.keras.limit_memory(model, budget=caught.value.minimum_bytes + (4 << 20))
    model.fit(x, y, batch_size=BATCH, verbose=0)
    assert remat.keras.plan_of(model).recomputed > 0


def test_what_is_refused() -> None:
    model = functional()
    with pytest.raises(remat.InvalidBudget, match="plenty"):
        remat.keras.limit_memory(model, budget="plenty")
    with pytest.raises(remat.UnsupportedStep, match="micro_batches=2"):
        remat.keras.limit_memory(model, budget="1GiB", micro_batches=2)
    with pytest.raises(TypeError, match="not Dense"):
        remat.keras.limit_memory(keras.layers.Dense(1), budget="1GiB")
    with pytest.raises(ValueError, match="no memory limit"):
        remat.keras.plan_of(model)
    model.compile("sgd", "sparse_categorical_crossentropy", run_eagerly=True)
    remat.keras.limit_memory(model, budget="1GiB")
    with pytest.raises(remat.UnsupportedStep, match="run_eagerly"):
        model.fit(*data(8), verbose=0)


def test_auto_means_a_gpu() -> None:
    x, y = data(8)
    model, _ = trained(functional, lambda m: None, budget=None)
    remat.keras.limit_memory(model, budget="auto")
    with pytest.raises(remat.InvalidBudget, match="CPU:0"):
        model.fit(x, y, verbose=0)
