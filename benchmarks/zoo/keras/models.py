"""The models of Keras' zoo: every family of ``keras.applications``, and recurrent ones, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from benchmarks.zoo.frame.subject import Array, Models, Subject

CLASSES: Final = 10
MIXED: Final = "mixed_bfloat16"


def _pictures(side: int, count: int) -> tuple[Array, Array]:
    draws = np.random.default_rng(5)
    images = draws.normal(size=(count, side, side, 3)).astype("float32")
    return images, draws.integers(0, CLASSES, (count,)).astype("int32")


def application(name: str, side: int = 64, count: int = 32, policy: str = "float32") -> Callable[[], Subject]:
    """A model of ``keras.applications`` for small pictures."""

    def build() -> Subject:
        import keras

        from benchmarks.zoo.keras.subject import KerasModel

        def make() -> Any:
            own = getattr(keras.applications, name)
            return own(weights=None, input_shape=(side, side, 3), classes=CLASSES, classifier_activation=None)

        return KerasModel(make, *_pictures(side, count), policy)

    return build


def recurrent(layer: str, units: int, samples: int, steps: int) -> Callable[[], Subject]:
    """Two bidirectional layers over a sequence."""

    def build() -> Subject:
        import keras

        from benchmarks.zoo.keras.subject import KerasModel

        def make() -> Any:
            def both_ways(sequences: bool) -> Any:
                return keras.layers.Bidirectional(getattr(keras.layers, layer)(units, return_sequences=sequences))

            return keras.Sequential(
                [keras.Input((steps, 64)), both_ways(True), both_ways(False), keras.layers.Dense(CLASSES)]
            )

        draws = np.random.default_rng(5)
        x = draws.normal(size=(samples, steps, 64)).astype("float32")
        return KerasModel(make, x, draws.integers(0, CLASSES, (samples,)).astype("int32"))

    return build


MODELS: Final[Models] = {
    "ConvNeXtTiny": application("ConvNeXtTiny"),
    "DenseNet121": application("DenseNet121"),
    "DenseNet169": application("DenseNet169"),
    "EfficientNetB0": application("EfficientNetB0"),
    "EfficientNetV2B0": application("EfficientNetV2B0"),
    "InceptionResNetV2": application("InceptionResNetV2", 96, 8),
    "InceptionV3": application("InceptionV3", 96, 16),
    "MobileNet": application("MobileNet"),
    "MobileNetV2": application("MobileNetV2"),
    "MobileNetV2 bfloat16": application("MobileNetV2", policy=MIXED),
    "MobileNetV3Large": application("MobileNetV3Large"),
    "MobileNetV3Small": application("MobileNetV3Small"),
    "NASNetMobile": application("NASNetMobile"),
    "ResNet50": application("ResNet50"),
    "ResNet50 bfloat16": application("ResNet50", policy=MIXED),
    "ResNet50V2": application("ResNet50V2"),
    "VGG16": application("VGG16"),
    "Xception": application("Xception", 96, 16),
    "LSTM": recurrent("LSTM", 128, 64, 96),
    "GRU": recurrent("GRU", 128, 64, 96),
}
