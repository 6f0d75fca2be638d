"""Keras 2 (``tf_keras``): the decorator works; what needs Keras 3 says so."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import remat

WIDTH, BATCH = 16, 32


def build(way: str) -> Any:
    tf_keras.utils.set_random_seed(1)

    class Block(tf_keras.layers.Layer):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.dense = tf_keras.layers.Dense(WIDTH, activation="gelu", activity_regularizer="l2")
            self.norm = tf_keras.layers.BatchNormalization()

        def call(self, x: Any, training: Any = None) -> Any:
            h = self.norm(self.dense(x), training=training)
            self.add_loss(tf.reduce_mean(h**2))
            return x + tf.tanh(h)

    if way == "decorator":
        Block.call = remat.tensorflow.recompute(Block.call)
    inputs = h = tf_keras.Input((WIDTH,))
    for number in range(3):
        h = Block(name=f"block_{number}")(h)
    model = tf_keras.Model(inputs, tf_keras.layers.Dense(3)(h))
    if way == "layer":
        for number in range(3):
            remat.keras.recompute(model.get_layer(f"block_{number}"))
    return model


@pytest.mark.parametrize(
    "how",
    [{}, *(pytest.param({way: True}, marks=pytest.mark.slow) for way in ("jit_compile", "run_eagerly"))],
    ids=str,
)
@pytest.mark.parametrize("way", ["decorator", "layer"])
def test_fit_is_the_same(way: str, how: dict[str, Any]) -> None:
    random = np.random.default_rng(0)
    x, y = random.normal(size=(3 * BATCH, WIDTH)).astype("float32"), random.integers(0, 3, 3 * BATCH)
    found = []
    for current in ("plain", way):
        model = build(current)
        model.compile("sgd", tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True), **how)
        history = model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, epochs=2)
        found.append((history.history["loss"], model.get_weights()))
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=1e-5)
    for one, other in zip(found[1][1], found[0][1], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("way", ["decorator", "layer"])
def test_something_is_recomputed(way: str) -> None:
    def copies(current: str) -> int:
        model = build(current)

        @tf.function
        def step(x: tf.Tensor) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(model(x, training=True) ** 2)
            return tape.gradient(loss, model.trainable_variables)

        graph = step.get_concrete_function(tf.TensorSpec([BATCH, WIDTH])).graph
        return sum("_remat_copy" in op.node_def.attr for op in graph.get_operations())

    assert copies("plain") == 0 < copies(way)


def test_a_memory_limit_needs_keras_3() -> None:
    with pytest.raises(remat.UnsupportedStep, match=r"tf_keras model, and limit_memory needs Keras 3; build"):
        remat.keras.limit_memory(build("plain"))
