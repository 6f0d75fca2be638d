"""The models that the tests train, small and of every kind that behaves differently under recomputation.

Batches are large against the models, so that activations dominate the peak as they do in practice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers


@dataclass(frozen=True)
class Case:
    """A model with data for it.

    Attributes:
        build: makes the model, fresh.
        batch_size: samples in a step.
        input_shape: of one sample.
        vocabulary: number of tokens where the input is integers, else 0.
        target_shape: of one sample's labels; () for one class per sample.
        classes: number of classes.
        policy: the dtype policy to build under, "float64" also for the data.
        slow: does one run take so long that it is left out of the default suite?
    """

    build: Callable[[], keras.Model]
    batch_size: int
    input_shape: tuple[int, ...]
    vocabulary: int = 0
    target_shape: tuple[int, ...] = ()
    classes: int = 10
    policy: str = "float32"
    slow: bool = False

    def batch(self, seed: int = 0, samples: int | None = None) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Inputs and labels of ``samples`` samples, one batch unless it says otherwise."""
        random = np.random.default_rng(seed)
        count = self.batch_size if samples is None else samples
        if self.vocabulary:
            x = random.integers(0, self.vocabulary, (count, *self.input_shape)).astype("int32")
        else:
            x = random.normal(size=(count, *self.input_shape)).astype(
                "float64" if self.policy == "float64" else "float32"
            )
        return x, random.integers(0, self.classes, (count, *self.target_shape)).astype("int32")

    def loss(self) -> keras.losses.Loss:
        """The loss of the model's logits."""
        return keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def model(self) -> keras.Model:
        """The model, its weights drawn from a fixed seed."""
        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy(self.policy)
        try:
            keras.utils.set_random_seed(7)
            return self.build()
        finally:
            keras.config.set_dtype_policy(before)

    def optimizer(self) -> keras.optimizers.Optimizer:
        """SGD with momentum: unlike Adam it does not blow rounding of tiny gradients up into whole steps."""
        inner = keras.optimizers.SGD(0.01, momentum=0.9)
        if self.policy == "mixed_float16":
            return keras.optimizers.LossScaleOptimizer(inner, initial_scale=1024.0)
        return inner


def mlp(width: int = 256, depth: int = 6) -> keras.Model:
    """Residual blocks of normalisation, two dense layers and dropout."""
    inputs = keras.Input((width,))
    x = inputs
    for _ in range(depth):
        y = layers.BatchNormalization()(x)
        y = layers.Dense(2 * width, activation="gelu")(y)
        y = layers.Dropout(0.2)(y)
        x = layers.Add()([x, layers.Dense(width)(y)])
    return keras.Model(inputs, layers.Dense(10, dtype="float32")(x), name="mlp")


def transformer(sequence: int = 128, width: int = 128, depth: int = 3) -> keras.Model:
    """A classifier with MultiHeadAttention and dropout, attention's own included."""
    inputs = keras.Input((sequence,), dtype="int32")
    x = layers.Embedding(1000, width)(inputs)
    for _ in range(depth):
        y = layers.LayerNormalization()(x)
        y = layers.MultiHeadAttention(4, width // 4, dropout=0.1)(y, y)
        x = layers.Add()([x, layers.Dropout(0.1)(y)])
        y = layers.LayerNormalization()(x)
        y = layers.Dense(4 * width, activation="gelu")(y)
        x = layers.Add()([x, layers.Dropout(0.1)(layers.Dense(width)(y))])
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)), name="transformer")


def lstm(sequence: int = 32, width: int = 128) -> keras.Model:
    """An LSTM, which TensorFlow runs as a loop, between dense blocks that can be recomputed."""
    inputs = keras.Input((sequence, width))
    x = inputs
    for _ in range(3):
        y = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dropout(0.1)(layers.Dense(width)(y))])
    x = layers.LSTM(width // 2, return_sequences=True)(x)
    for _ in range(2):
        y = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(width // 2)(y)])
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)), name="lstm")


def _conv_block(x: Any, filters: int) -> Any:
    for _ in range(2):
        x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        x = layers.ReLU()(layers.BatchNormalization()(x))
    return x


def unet(size: int = 64, filters: int = 16, depth: int = 3) -> keras.Model:
    """Skips from the first level to the last: tensors that a plain step holds nearly to its end."""
    inputs = keras.Input((size, size, 3))
    x, skips = inputs, []
    for level in range(depth):
        x = _conv_block(x, filters << level)
        skips.append(x)
        x = layers.MaxPooling2D()(x)
    x = layers.Dropout(0.2)(_conv_block(x, filters << depth))
    for level in reversed(range(depth)):
        x = layers.Conv2DTranspose(filters << level, 2, strides=2)(x)
        x = _conv_block(layers.Concatenate()([x, skips[level]]), filters << level)
    return keras.Model(inputs, layers.Conv2D(2, 1)(x), name="unet")


@keras.saving.register_keras_serializable("remat_tests")
class Iterated(layers.Layer):
    """Applies one dense layer several times in a ``tf.while_loop``."""

    def __init__(self, units: int, steps: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.units = units
        self.steps = steps

    def build(self, input_shape: Any) -> None:
        self.kernel = self.add_weight(shape=(input_shape[-1], self.units), initializer="orthogonal", name="kernel")

    def call(self, inputs: Any) -> Any:
        kernel = tf.convert_to_tensor(self.kernel)
        return tf.while_loop(
            lambda step, _: step < self.steps,
            lambda step, x: (step + 1, tf.tanh(x @ kernel)),
            (tf.constant(0), inputs),
            maximum_iterations=self.steps,
        )[1]

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "units": self.units, "steps": self.steps}


def loop(width: int = 128) -> keras.Model:
    """A ``tf.while_loop`` between dense blocks that can be recomputed."""
    inputs = keras.Input((width,))
    x = inputs
    for number in range(6):
        if number == 3:
            x = Iterated(width, 4)(x)
        y = layers.Dense(4 * width, activation="gelu")(layers.BatchNormalization()(x))
        x = layers.Add()([x, layers.Dense(width)(layers.Dropout(0.1)(y))])
    return keras.Model(inputs, layers.Dense(10)(x), name="loop")


def application(name: str, size: int = 64) -> Callable[[], keras.Model]:
    """A network of ``keras.applications`` for small images, its weights random."""

    def build() -> keras.Model:
        make = getattr(keras.applications, name)
        return make(weights=None, input_shape=(size, size, 3), classes=10, classifier_activation=None)

    return build


CASES: dict[str, Case] = {
    "mlp": Case(mlp, batch_size=2048, input_shape=(256,)),
    "transformer": Case(transformer, batch_size=16, input_shape=(128,), vocabulary=1000),
    "lstm": Case(lstm, batch_size=64, input_shape=(32, 128)),
    "unet": Case(unet, batch_size=16, input_shape=(64, 64, 3), target_shape=(64, 64), classes=2),
    "loop": Case(loop, batch_size=4096, input_shape=(128,)),
    "mixed_float16": Case(mlp, batch_size=2048, input_shape=(256,), policy="mixed_float16"),
    "MobileNetV2": Case(application("MobileNetV2"), batch_size=64, input_shape=(64, 64, 3)),
    "ResNet50": Case(application("ResNet50"), batch_size=128, input_shape=(64, 64, 3), slow=True),
    "DenseNet121": Case(application("DenseNet121"), batch_size=64, input_shape=(64, 64, 3), slow=True),
    "EfficientNetB0": Case(application("EfficientNetB0"), batch_size=64, input_shape=(64, 64, 3), slow=True),
    # In deep networks with random weights a rounding grows a thousandfold per step. In double precision it stays small
    # over three steps, and shows that there is nothing else.
    "MobileNetV2 float64": Case(application("MobileNetV2"), 16, (64, 64, 3), policy="float64", slow=True),
    "ResNet50 float64": Case(application("ResNet50"), 16, (64, 64, 3), policy="float64", slow=True),
    "DenseNet121 float64": Case(application("DenseNet121"), 16, (64, 64, 3), policy="float64", slow=True),
    "EfficientNetB0 float64": Case(application("EfficientNetB0"), 16, (64, 64, 3), policy="float64", slow=True),
}
"""Every model that "exact" and "within the budget" are shown on, by name."""

_TIMES_LARGER = {
    "mlp": 6,
    "transformer": 8,
    "lstm": 8,
    "unet": 8,
    "loop": 4,
    "mixed_float16": 6,
    "MobileNetV2": 3,
    "ResNet50": 2,
    "EfficientNetB0": 3,
}
LARGE = {
    f"{name} large": dataclasses.replace(CASES[name], batch_size=times * CASES[name].batch_size, slow=True)
    for name, times in _TIMES_LARGER.items()
}
"""The same with so large a batch that XLA's block of temporary memory is above 256 MB also under a budget of half.

The allocator rounds smaller ones up to a power of two, and a budget can then be kept in leaps only.
"""
