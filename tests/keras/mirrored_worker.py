"""Trains on two replicas, plainly and in micro-batches, and prints both: python mirrored_worker.py."""

from __future__ import annotations

import json

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import remat

REPLICAS, BATCH, SAMPLES, EPOCHS = 2, 16, 76, 4
WORDS, STEPS = 11, 5


class Noting(tf.distribute.ReductionToOneDevice):
    """Notes how many tensors each reduction in a traced step adds up over the replicas."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def batch_reduce_implementation(self, reduce_op, value_destination_pairs, options):
        self.seen.append(len(value_destination_pairs))
        return super().batch_reduce_implementation(reduce_op, value_destination_pairs, options)


def strategy_of_two_devices():
    devices = [tf.config.LogicalDeviceConfiguration()] * REPLICAS
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], devices)
    reductions = Noting()
    return tf.distribute.MirroredStrategy([f"CPU:{n}" for n in range(REPLICAS)], reductions), reductions.seen


def tagger():
    """A masked loss per word and a plain one: one denominator counted, one known."""
    words = keras.Input((STEPS,), dtype="int32")
    embedded = layers.Embedding(WORDS, 4, mask_zero=True)(words)
    hidden = layers.Dense(8, activation="tanh", kernel_regularizer="l2")(embedded)
    model = keras.Model(words, {"tags": layers.Dense(3, name="tags")(hidden)})
    loss = {"tags": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}
    optimizer = keras.optimizers.SGD(0.2, momentum=0.9)
    model.compile(optimizer, loss, metrics={"tags": ["accuracy"]}, jit_compile=False)
    return model


def classifier():
    data = keras.Input((6,))
    hidden = layers.Dense(8, activation="tanh")(data)
    model = keras.Model(data, layers.Dense(3)(hidden))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"], jit_compile=False)
    return model


def trained(strategy, seen, build, data, count):
    keras.utils.set_random_seed(7)
    with strategy.scope():
        model = build()
    if count > 1:
        remat.keras.limit_memory(model, micro_batches=count)
    del seen[:]
    history = model.fit(*data, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0).history
    variables = [v.numpy().tolist() for v in [*model.weights, *model.optimizer.variables]]
    return {"history": history, "variables": variables, "reductions": list(seen)}


def main():
    strategy, seen = strategy_of_two_devices()
    random = np.random.default_rng(0)
    numbers = random.normal(size=(SAMPLES, 6)).astype("float32"), random.integers(0, 3, SAMPLES)
    sentences = random.integers(0, WORDS, (SAMPLES, STEPS)), {"tags": random.integers(0, 3, (SAMPLES, STEPS))}
    # Of the last batch one replica gets no sample.
    uneven = tuple(part[: BATCH + 1] for part in numbers)
    cases = {"classes": (classifier, numbers), "masked": (tagger, sentences), "uneven": (classifier, uneven)}
    results = {
        name: {count: trained(strategy, seen, build, data, count) for count in (1, 3, 7)}
        for name, (build, data) in cases.items()
    }
    print(json.dumps(results))


if __name__ == "__main__":
    main()
