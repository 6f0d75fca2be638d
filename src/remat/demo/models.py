"""The two models of the demo and their data, which scikit-learn brings along."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import keras
import numpy as np
from keras import layers

# Scikit-learn's digits: ten classes, images of 8 x 8.
_CLASSES: Final = 10
_PIXELS: Final = 8


@dataclass(frozen=True)
class Workload:
    """How one model is trained.

    Attributes:
        model: the model, compiled.
        images: float32 of shape (images, 8, 8, 1), with mean 0 and variance 1.
        labels: int64 of shape (images,).
        batch_size: images in a step.
        epochs: passes over the images.
    """

    model: keras.Model
    images: np.ndarray[Any, Any]
    labels: np.ndarray[Any, Any]
    batch_size: int
    epochs: int


def make_workload(name: str, *, quick: bool) -> Workload:
    """The workload of one line of the demo, its random numbers seeded.

    Both models upscale the images themselves: the data set stays small, so that what a step holds is activations.
    Both are trained by SGD with momentum, whose update is linear in the gradient. Adam divides by the gradient's
    size; where a gradient is zero but for rounding, it would make a step of full length of that rounding.

    Args:
        name: "residual" or "transformer".
        quick: few images and a small model, to see that everything works.
    """
    keras.utils.set_random_seed(0)
    images, labels = _digits()
    if quick:
        images, labels = images[:512], labels[:512]
    model = (
        residual_network(width=16, blocks=3 if quick else 8)
        if name == "residual"
        else transformer(width=96, blocks=1 if quick else 4)
    )
    model.compile(
        optimizer=keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=1.0),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=False,
    )
    # 1,797 images make 7 batches of 225 and one of 222: the short last batch is trained on as well.
    return Workload(model, images, labels, batch_size=128 if quick else 225, epochs=1 if quick else 2)


def residual_network(*, width: int, blocks: int) -> keras.Model:
    """Residual blocks of two convolutions with BatchNormalization, on images upscaled to 32 x 32.

    No convolution before a BatchNormalization has a bias: the normalization takes it away again, so its gradient is
    zero and its value would be rounding errors only.
    """

    def convolution(values: Any, strides: int = 1) -> Any:
        values = layers.Conv2D(width, 3, strides=strides, padding="same", use_bias=False)(values)
        # As many steps as the demo has are few for the usual momentum of 0.99.
        return layers.BatchNormalization(momentum=0.9)(values)

    image = keras.Input((_PIXELS, _PIXELS, 1))
    values = layers.UpSampling2D(4, interpolation="bilinear")(image)
    values = layers.ReLU()(convolution(values, strides=2))
    for _ in range(blocks):
        branch = layers.ReLU()(convolution(values))
        values = layers.ReLU()(layers.Add()([convolution(branch), values]))
    values = layers.GlobalAveragePooling2D()(values)
    return keras.Model(image, layers.Dense(_CLASSES)(values), name="residual_network")


def transformer(*, width: int, blocks: int) -> keras.Model:
    """A small vision Transformer on images upscaled to 32 x 32, in 16 patches.

    Dropout is in the attention, behind it and behind the MLP.
    """
    image = keras.Input((_PIXELS, _PIXELS, 1))
    values = layers.UpSampling2D(4, interpolation="bilinear")(image)
    values = layers.Conv2D(width, 8, strides=8)(values)
    values = layers.Reshape((16, width))(values)
    values = PositionEmbedding()(values)
    for _ in range(blocks):
        branch = layers.LayerNormalization()(values)
        branch = layers.MultiHeadAttention(num_heads=4, key_dim=width // 4, dropout=0.1)(branch, branch)
        values = layers.Add()([values, layers.Dropout(0.1)(branch)])
        branch = layers.LayerNormalization()(values)
        branch = layers.Dense(4 * width, activation="gelu")(branch)
        branch = layers.Dense(width)(branch)
        values = layers.Add()([values, layers.Dropout(0.1)(branch)])
    values = layers.Flatten()(layers.LayerNormalization()(values))
    # From zero, every class starts equally likely: the few steps of the demo are not spent on unlearning noise.
    classes = layers.Dense(_CLASSES, kernel_initializer="zeros")(values)
    return keras.Model(image, classes, name="transformer")


class PositionEmbedding(layers.Layer):  # type: ignore[misc]
    """Adds a learned vector to each position of (batch, positions, width)."""

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Make the vectors."""
        self.embedding = self.add_weight(shape=input_shape[1:], initializer="random_normal", name="embedding")

    def call(self, inputs: Any) -> Any:
        """Add them."""
        return inputs + self.embedding


def _digits() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = (digits.images - digits.images.mean()) / digits.images.std()
    return images[..., None].astype(np.float32), digits.target.astype(np.int64)
