"""Measures one training step of a whole Keras model in a process of its own, and prints what happened as JSON.

python whole_model_worker.py graph|xla|eager plain|recompute
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import remat.keras
from remat.tensorflow.peak.device import current_device

BATCH, WIDTH, HIDDEN, BLOCKS = 2048, 256, 1024, 12


def residual_network() -> keras.Model:
    """Blocks of LayerNormalization, a wide layer with dropout, a narrow one and BatchNormalization."""
    keras.utils.set_random_seed(1)
    inputs = h = keras.Input((WIDTH,))
    for _ in range(BLOCKS):
        branch = layers.Dense(HIDDEN, activation="gelu")(layers.LayerNormalization()(h))
        branch = layers.Dense(WIDTH)(layers.Dropout(0.1)(branch))
        h = layers.Add()([h, layers.BatchNormalization()(branch)])
    return keras.Model(inputs, layers.Dense(3)(h))


def main(how: str, kind: str) -> dict[str, Any]:
    model = residual_network()
    if kind == "recompute":
        remat.keras.recompute(model)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01), loss, jit_compile=how == "xla", run_eagerly=how == "eager")
    random = np.random.default_rng(0)
    x = tf.constant(random.normal(size=(BATCH, WIDTH)).astype("float32"))
    y = tf.constant(random.integers(0, 3, BATCH))
    model.train_on_batch(x, y)
    device = current_device()
    in_use_bytes = device.in_use_bytes
    device.reset_peak()
    model.train_on_batch(x, y)
    peak_bytes = device.peak_bytes - in_use_bytes
    return {
        "peak_bytes": peak_bytes,
        "seeds": [int(v.numpy().sum()) for v in model.variables if "seed" in v.path],
        "sums": [float(np.abs(w.numpy()).sum(dtype="float64")) for w in model.weights if w.dtype == "float32"],
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
