"""``limit_memory(model, checkpoints=[...])``: the user's own cut points, with any optimizer."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import remat
from remat.keras import limit_memory, plan_of

WIDTH, BATCH = 128, 1024


def model(optimizer: Any = "sgd", **options: Any) -> keras.Model:
    keras.utils.set_random_seed(1)
    inputs = h = keras.Input((WIDTH,))
    for number in range(9):
        h = layers.Dense(WIDTH, activation="tanh", name=f"dense_{number}")(h)
        h = layers.Dropout(0.1)(h)
    made = keras.Model(inputs, layers.Dense(3, name="head")(h))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    made.compile(optimizer, loss, **{"jit_compile": False, **options})
    return made


def fit(made: keras.Model) -> list[np.ndarray[Any, Any]]:
    random = np.random.default_rng(0)
    x, y = random.normal(size=(2 * BATCH, WIDTH)).astype("float32"), random.integers(0, 3, 2 * BATCH)
    keras.utils.set_random_seed(2)
    made.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    return [v.numpy() for v in made.variables if v.dtype == "float32"]


@pytest.mark.parametrize(
    ("optimizer", "jit"),
    [
        ("sgd", False),
        ("rmsprop", False),
        *(pytest.param(*way, marks=pytest.mark.slow) for way in (("adafactor", False), ("lion", False), ("sgd", True))),
    ],
)
def test_training_is_the_same(optimizer: str, jit: bool) -> None:
    plain = fit(model(optimizer, jit_compile=jit))
    limited = limit_memory(model(optimizer, jit_compile=jit), checkpoints=["dense_2", "dense_5"])
    found = fit(limited)
    plan = plan_of(limited)
    assert plan.recomputed > 0
    assert plan.peak_bytes < plan.baseline_peak_bytes
    # Optimizers that divide by the gradient's size turn a rounding into a step where it is nearly zero.
    tolerance = 1e-6 if optimizer == "sgd" else 1e-3
    for one, other in zip(found, plain, strict=True):
        np.testing.assert_allclose(one, other, atol=tolerance * max(1.0, float(np.abs(other).max())))


def recomputed_names(limited: keras.Model) -> set[str]:
    graph, plan = remat.keras.graph_of(limited), plan_of(limited)
    runs = np.bincount(plan.schedule, minlength=len(graph.ops))
    return {op.name for op, count in zip(graph.ops, runs, strict=True) if count > 1}


def test_what_is_named_is_kept_and_the_rest_is_not() -> None:
    by_layer = limit_memory(model(), checkpoints=["dense_2", "dense_5"])
    fit(by_layer)
    names = recomputed_names(by_layer)
    for kept in ("dense_2", "dense_5"):
        assert not any(f"/{kept}_" in name or f"/{kept}/" in name for name in names)
    for dropped in ("dense_1", "dense_3", "dense_4", "dense_6"):
        assert any(f"/{dropped}_" in name or f"/{dropped}/" in name for name in names), names


def test_tensors_can_be_named() -> None:
    by_layer = limit_memory(model(), checkpoints=["dense_2", "dense_5"])
    fit(by_layer)
    tanhs = [op.name for op in remat.keras.graph_of(by_layer).ops if op.kind == "Tanh"]
    by_tensor = limit_memory(model(), checkpoints=[tanhs[2].split("/", 1)[1] + ":0", tanhs[5].split("/", 1)[1]])
    fit(by_tensor)
    assert plan_of(by_tensor).schedule == plan_of(by_layer).schedule


def test_bad_requests_say_what_to_do() -> None:
    with pytest.raises(ValueError, match="no layer 'dense_99'; it has"):
        limit_memory(model(), checkpoints=["dense_99"])
    with pytest.raises(ValueError, match="a budget or checkpoints, not both"):
        limit_memory(model(), "50%", checkpoints=["dense_2"])
    with pytest.raises(TypeError, match=r"write \['dense_2'\]"):
        limit_memory(model(), checkpoints="dense_2")
    with pytest.raises(remat.UnsupportedStep, match="names 0 tensors of the training step"):
        fit(limit_memory(model(), checkpoints=["nothing/Tanh:0"]))
