"""Train on handwritten digits within a budget of bytes: ``python examples/keras_fit.py 60%``."""

from __future__ import annotations

import sys

import keras
import numpy as np
from sklearn.datasets import load_digits

import remat.keras

budget = sys.argv[1] if len(sys.argv) > 1 else "60%"

digits = load_digits()
images = (digits.images[..., None] / 16).astype(np.float32)

layers = [keras.Input((8, 8, 1)), keras.layers.UpSampling2D(4)]
for _ in range(6):
    layers += [
        keras.layers.Conv2D(16, 3, padding="same", use_bias=False),
        keras.layers.BatchNormalization(),
        keras.layers.ReLU(),
    ]
model = keras.Sequential([*layers, keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(10, "softmax")])
model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])

remat.keras.limit_memory(model, budget=budget)
model.fit(images, digits.target, batch_size=128, epochs=1)
print(remat.keras.plan_of(model))
