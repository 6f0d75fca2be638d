"""``remat.keras.recompute``: the same training, whatever is inside the layers and however the model is compiled."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import remat
from remat.keras import recompute
from remat.keras.recompute import is_recomputed

COMPILED = {
    "graph": {"jit_compile": False},
    "xla": {"jit_compile": True},
    "eager": {"run_eagerly": True, "jit_compile": False},
}
WIDTH, STEPS, BATCH = 16, 3, 32
NAMES = ["first", "second", "third"]


def block(name: str) -> keras.Model:
    """A block with everything that must not happen twice or be lost: dropout, statistics, an activity regulariser."""
    inputs = keras.Input((WIDTH,))
    h = layers.Dense(WIDTH, activation="gelu", kernel_regularizer="l2")(inputs)
    h = layers.Dropout(0.3)(h)
    h = layers.BatchNormalization()(h)
    # Keras itself cannot add a float16 activity loss to a float32 one.
    half = keras.mixed_precision.global_policy().name == "mixed_float16"
    h = layers.Dense(WIDTH, activity_regularizer=None if half else "l2")(h)
    return keras.Model(inputs, h, name=name)


def blocks() -> keras.Model:
    inputs = h = keras.Input((WIDTH,))
    for name in NAMES:
        h = layers.Add()([h, block(name)(h)])
    return keras.Model(inputs, layers.Dense(3)(h))


@keras.saving.register_keras_serializable("remat_tests")
class Attention(layers.Layer):
    """A layer of one's own whose call takes a mask and the training flag, and adds a loss."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.supports_masking = True
        self.attention = layers.MultiHeadAttention(2, 8, dropout=0.2)
        self.norm = layers.LayerNormalization()

    def build(self, shape: Any) -> None:
        self.attention.build(shape, shape)
        self.norm.build(shape)
        super().build(shape)

    def call(self, x: Any, mask: Any = None, training: bool = False) -> Any:
        h = self.attention(x, x, attention_mask=None if mask is None else mask[:, None, :], training=training)
        self.add_loss(0.01 * tf.reduce_mean(tf.cast(h, tf.float32) ** 2))
        return self.norm(x + h)


def masked_attention() -> keras.Model:
    inputs = keras.Input((6,), dtype="int32")
    h = layers.Embedding(20, WIDTH, mask_zero=True)(inputs)
    for name in NAMES:
        h = Attention(name=name)(h)
    h = layers.GlobalAveragePooling1D()(h)  # Reads the mask, which must have come through.
    return keras.Model(inputs, layers.Dense(3)(h))


def recurrent() -> keras.Model:
    inputs = keras.Input((6, WIDTH))
    h = layers.LSTM(WIDTH, return_sequences=True, name="first", dropout=0.2)(inputs)
    h = layers.GRU(WIDTH, return_sequences=True, name="second")(h)
    h = layers.LSTM(WIDTH, name="third", unroll=True)(h)
    return keras.Model(inputs, layers.Dense(3)(h))


def mixed_precision() -> keras.Model:
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        return blocks()
    finally:
        keras.mixed_precision.set_global_policy("float32")


_QUICK = {("blocks", "graph"), ("masked_attention", "graph"), ("blocks", "eager"), ("mixed_precision", "graph")}
BUILDERS = {f.__name__: f for f in (blocks, masked_attention, recurrent, mixed_precision)}


def data(model: keras.Model) -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    shape = (STEPS * BATCH, *model.inputs[0].shape[1:])
    integers = model.inputs[0].dtype == "int32"
    x = random.integers(0, 20, shape) if integers else random.normal(size=shape).astype("float32")
    return x, random.integers(0, 3, STEPS * BATCH)


def train(name: str, compiled: dict[str, Any], when: str | None) -> tuple[keras.Model, list[float]]:
    keras.utils.set_random_seed(1)
    model = BUILDERS[name]()
    if when == "before compile":
        recompute(model, NAMES)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.05), loss, metrics=["accuracy"], **compiled)
    if when == "after compile":
        recompute(model, NAMES)
    if when == "after fit":
        x, y = data(model)
        weights = model.get_weights()
        model.fit(x[:BATCH], y[:BATCH], verbose=0)
        recompute(model, NAMES)
        model.set_weights(weights)
    keras.utils.set_random_seed(2)
    history = model.fit(*data(model), batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    return model, history.history["loss"]


def assert_same(found: keras.Model, plain: keras.Model, tolerance: float) -> None:
    for one, other in zip(found.variables, plain.variables, strict=True):
        got, want = one.numpy(), other.numpy()
        if np.issubdtype(want.dtype, np.floating):
            scale = max(1e-2, float(np.abs(want).max()))
            np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * scale, err_msg=one.path)
        else:
            np.testing.assert_array_equal(got, want, err_msg=one.path)  # Seeds and counters.


@pytest.mark.parametrize(
    ("name", "how"),
    [
        pytest.param(name, how, marks=() if (name, how) in _QUICK else pytest.mark.slow, id=f"{name}-{how}")
        for name in BUILDERS
        for how in COMPILED
    ],
)
def test_fit_is_the_same(name: str, how: str) -> None:
    plain, plain_loss = train(name, COMPILED[how], None)
    found, loss = train(name, COMPILED[how], "after compile")
    assert all(is_recomputed(found.get_layer(n)) for n in NAMES)
    tolerance = 5e-3 if name == "mixed_precision" else 2e-5
    np.testing.assert_allclose(loss, plain_loss, rtol=tolerance)
    assert_same(found, plain, tolerance)


@functools.cache
def measured(how: str, kind: str) -> dict[str, Any]:
    worker = Path(__file__).parent / "whole_model_worker.py"
    done = subprocess.run([sys.executable, worker, how, kind], capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("how", COMPILED)
def test_a_whole_model_is_recomputed_in_segments(how: str) -> None:
    plain, found = measured(how, "plain"), measured(how, "recompute")
    # XLA's memory is one block, for which the allocator may give one of twice its size.
    share = {"graph": 0.2, "eager": 0.25, "xla": 0.5}[how]
    assert found["peak_bytes"] <= share * plain["peak_bytes"]
    assert found["seeds"] == plain["seeds"]
    # Biases before a BatchNormalization have no gradient but what rounding leaves: 1e-8.
    np.testing.assert_allclose(found["sums"], plain["sums"], rtol=1e-5, atol=1e-6)


@pytest.mark.thorough
def test_a_whole_model_trains_to_the_same_numbers() -> None:
    plain, plain_loss = train("blocks", COMPILED["graph"], None)
    keras.utils.set_random_seed(1)
    found = recompute(blocks())
    found.compile(keras.optimizers.SGD(0.05), plain.loss, metrics=["accuracy"], jit_compile=False)
    keras.utils.set_random_seed(2)
    history = found.fit(*data(found), batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    np.testing.assert_allclose(history.history["loss"], plain_loss, rtol=2e-5)
    assert_same(found, plain, 2e-5)
    assert copies_in_train_step(found) > 0
    assert segments_in_train_step(found) > 1
    as_a_block = keras.Sequential([found, layers.Dense(3)])
    as_a_block.compile("sgd", plain.loss, jit_compile=False)
    assert segments_in_train_step(as_a_block) == 1


def test_segments_survive_save_and_load(tmp_path: Path) -> None:
    model = recompute(blocks(), ["first"], in_segments=True)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.get_layer("first")._remat_in_segments
    assert not is_recomputed(loaded.get_layer("second"))


@pytest.mark.thorough
@pytest.mark.parametrize("when", ["before compile", "after fit"])
def test_before_and_after(when: str) -> None:
    model, loss = train("blocks", COMPILED["graph"], when)
    assert np.isfinite(loss).all()
    step = model.train_function
    assert step is not None
    assert copies_in_train_step(model) > 0
    recompute(model, NAMES, enabled=False)
    assert not any(is_recomputed(layer) for layer in model.layers)
    assert copies_in_train_step(model) == 0


def copies_in_train_step(model: keras.Model) -> int:
    return sum("_remat_copy" in op.node_def.attr for op in train_step_of(model).get_operations())


def segments_in_train_step(model: keras.Model) -> int:
    """Each begins in a scope of its own."""
    names = {op.name.partition("/recompute")[2].partition("/")[0] for op in train_step_of(model).get_operations()}
    return sum(name == "" or name.lstrip("_").isdecimal() for name in names)


def train_step_of(model: keras.Model) -> tf.Graph:
    x, y = (part[:BATCH] for part in data(model))

    @tf.function
    def step(x: Any, y: Any) -> Any:
        return model.train_step((x, y))

    return step.get_concrete_function(tf.constant(x), tf.constant(y)).graph


def test_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = train("blocks", COMPILED["graph"], "after compile")
    assert copies_in_train_step(model) > 0
    monkeypatch.setenv("REMAT_RECOMPUTE", "0")
    assert copies_in_train_step(model) == 0
    monkeypatch.setenv("REMAT_RECOMPUTE", "1")
    on = True
    recompute(model, NAMES, enabled=lambda: on)
    assert copies_in_train_step(model) > 0
    on = False
    assert copies_in_train_step(model) == 0


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["blocks", "masked_attention"])
def test_save_load_and_clone_keep_the_setting(name: str, tmp_path: Any) -> None:
    model, _ = train(name, COMPILED["graph"], "after compile")
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    clone = keras.models.clone_model(model)
    for other in (loaded, clone):
        assert [is_recomputed(layer) for layer in other.layers] == [is_recomputed(layer) for layer in model.layers]
    for one, other in zip(loaded.weights, model.weights, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())
    assert copies_in_train_step(loaded) > 0
    # Weights go from one to the other either way.
    model.save_weights(tmp_path / "model.weights.h5")
    plain = BUILDERS[name]()
    plain.load_weights(tmp_path / "model.weights.h5")
    for one, other in zip(plain.weights, model.weights, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())


def test_one_layer_by_inheritance_and_decorator() -> None:
    class Dense(layers.Dense):
        @remat.tensorflow.recompute
        def call(self, inputs: Any, training: Any = None) -> Any:
            return super().call(inputs)

    found = []
    for made in (
        layers.Dense(WIDTH, activation="tanh"),
        recompute(layers.Dense(WIDTH, activation="tanh")),
        remat.tensorflow.recompute(layers.Dense(WIDTH, activation="tanh")),
        remat.tensorflow.recompute(layers.Dense)(WIDTH, activation="tanh"),
        Dense(WIDTH, activation="tanh"),
    ):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((WIDTH,)), made, layers.Dense(3)])
        model.set_weights([np.random.default_rng(n).normal(size=w.shape) for n, w in enumerate(model.get_weights())])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
        model.fit(*data(model), batch_size=BATCH, shuffle=False, verbose=0)
        found.append(model)
    assert copies_in_train_step(found[0]) == 0
    for model in found[1:]:
        assert copies_in_train_step(model) > 0
        assert_same(model, found[0], 1e-6)


def test_bad_requests_say_what_to_do() -> None:
    model = blocks()
    with pytest.raises(ValueError, match=r"no layer 'fourth'; it has .*first, .*second, third"):
        recompute(model, ["fourth"])
    with pytest.raises(TypeError, match=r"write \['first'\]"):
        recompute(model, "first")
    with pytest.raises(TypeError, match="takes a Keras layer or model"):
        recompute(3)
    with pytest.raises(remat.UnsupportedStep, match="symbolic Keras tensor"):
        remat.tensorflow.recompute(lambda x: x)(keras.Input((3,)))
