"""Trains in a fresh process and prints the measured peak, and the predicted one where there is a plan.

python micro_batch_worker.py MICRO_BATCHES [BUDGET] [--jit] [--checkpoints LAYER ...]
"""

from __future__ import annotations

import argparse
import json

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import remat

BATCH, WIDTH, DEPTH = 4096, 256, 8


class Peaks(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.bytes = []

    def on_train_batch_begin(self, batch, logs=None):
        tf.config.experimental.reset_memory_stats("CPU:0")

    def on_train_batch_end(self, batch, logs=None):
        self.bytes.append(tf.config.experimental.get_memory_info("CPU:0")["peak"])


def main(count, budget, jit, checkpoints):
    keras.utils.set_random_seed(1)
    data = keras.Input((WIDTH,))
    hidden = data
    for number in range(DEPTH):
        hidden = layers.Dense(WIDTH, activation="tanh", name=f"dense_{number}")(hidden)
    model = keras.Model(data, layers.Dense(10)(hidden))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, jit_compile=jit)
    if count > 1:
        limit = {"planner": "peak_greedy"} if checkpoints is None else {"checkpoints": checkpoints}
        remat.keras.limit_memory(model, budget, micro_batches=count, **limit)
    random = np.random.default_rng(0)
    # Of a list: an array's memory may be shared, and the device's counter does not see it then.
    x = tf.constant(random.normal(size=(BATCH, WIDTH)).tolist(), tf.float32)
    feed = tf.data.Dataset.from_tensors((x, tf.constant(random.integers(0, 10, BATCH)))).repeat(6)
    peaks = Peaks()
    history = model.fit(feed, verbose=0, callbacks=[peaks])
    plan = remat.keras.plan_of(model) if budget or checkpoints else None
    planned = {"predicted": plan.peak_bytes, "budget": plan.budget_bytes, "recomputed": plan.recomputed} if plan else {}
    seen = {"peak": max(peaks.bytes[1:]), "least": min(peaks.bytes[1:])}
    print(json.dumps({**seen, "loss": history.history["loss"][-1], **planned}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("micro_batches", type=int)
    parser.add_argument("budget", nargs="?")
    parser.add_argument("--jit", action="store_true")
    parser.add_argument("--checkpoints", nargs="+")
    asked = parser.parse_args()
    main(asked.micro_batches, asked.budget, asked.jit, asked.checkpoints)
