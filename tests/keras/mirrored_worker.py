"""Trains on two replicas, plainly and in micro-batches or under a budget: python mirrored_worker.py [budgets]."""

from __future__ import annotations

import json
import sys

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


def perceptron():
    """Wide enough for a budget to mean something."""
    data = keras.Input((128,))
    hidden = data
    for _ in range(12):
        hidden = layers.Dense(128, activation="tanh")(hidden)
    model = keras.Model(data, layers.Dense(3)(hidden))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"], jit_compile=False)
    return model


def limited(strategy, seen, **limit):
    """As ``trained`` on a batch of 8192 samples, and one of 1000 at the end; the plan with it."""
    random = np.random.default_rng(0)
    data = random.normal(size=(2 * 8192 + 1000, 128)).astype("float32"), random.integers(0, 3, 2 * 8192 + 1000)
    keras.utils.set_random_seed(7)
    with strategy.scope():
        model = perceptron()
    if limit:
        remat.keras.limit_memory(model, **limit, planner="peak_greedy")
    del seen[:]
    history = model.fit(*data, batch_size=8192, epochs=2, shuffle=False, verbose=0).history
    plan = remat.keras.plan_of(model) if "budget" in limit else None
    return {
        "history": history,
        "variables": [v.numpy().tolist() for v in [*model.weights, *model.optimizer.variables]],
        "reductions": max(seen),
        "plan": None
        if plan is None
        else [plan.recomputed, plan.peak_bytes, plan.budget_bytes, plan.baseline_peak_bytes, plan.measured_peak_bytes],
    }


def refused(strategy, **limit):
    """The one line of each error."""
    keras.backend.clear_session()  # The first layer is called "dense" again.
    with strategy.scope():
        model = perceptron()
    if limit.pop("in_xla", False):
        model.jit_compile = True
    try:
        remat.keras.limit_memory(model, **limit)
        model.fit(np.ones((8, 128)), np.ones(8), verbose=0)
    except (remat.UnsupportedStep, remat.InfeasibleBudget) as error:
        return str(error)
    return "nothing was refused"


REFUSED = {
    'micro_batches="auto"': {"budget": "50%", "micro_batches": "auto"},
    "checkpoints=": {"checkpoints": ["dense"]},
    "check_first_step=True": {"budget": "50%", "check_first_step": True},
    "a share (50%) with micro_batches": {"budget": "50%", "micro_batches": 2},
    "XLA with a budget": {"budget": "50%", "in_xla": True},
    'the lever "split"': {"budget": "50%", "levers": ("recompute", "split")},
}


def under_budgets():
    strategy, seen = strategy_of_two_devices()
    refusals = {what: refused(strategy, **limit) for what, limit in REFUSED.items()}
    tf.config.experimental.enable_op_determinism()  # Keras drops jit_compile with it, which is to be refused above.
    return {
        "plain": limited(strategy, seen),
        "budget": limited(strategy, seen, budget="80%"),
        "pieces": limited(strategy, seen, budget=20 << 20, micro_batches=4),
        "refused": refusals,
    }


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
    if sys.argv[1:] == ["budgets"]:
        print(json.dumps(under_budgets()))
        return
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
