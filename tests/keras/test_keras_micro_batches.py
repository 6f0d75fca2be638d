"""``limit_memory(model, micro_batches=k)``: twenty updates equal to those of full batches, whatever the update does."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from accumulation import (
    BATCH,
    COUNTS,
    EPOCHS,
    FEATURES,
    SAMPLES,
    assert_equal_training,
    classes,
    compiled,
    dense,
    fit,
    full_batches,
    inputs,
    train,
    weights,
)
from keras import layers, optimizers

import remat
from remat.keras import _private

UPDATES = EPOCHS * -(-SAMPLES // BATCH)


def on_samples(model, **options):
    return fit(model, inputs(), classes(), **options)


OPTIMIZERS = {
    "sgd": functools.partial(optimizers.SGD, 0.05, momentum=0.9),
    "adam": functools.partial(optimizers.Adam, 0.01),
    "adamw": functools.partial(optimizers.AdamW, 0.01, weight_decay=0.05),
    "adafactor": functools.partial(optimizers.Adafactor, 0.01),
    "lion": functools.partial(optimizers.Lion, 0.002),
}

# Each is wrong, or lost, when it is applied once per micro-batch.
PER_UPDATE = {
    "clipnorm": {"clipnorm": 0.02},
    "global_clipnorm": {"global_clipnorm": 0.02},
    "clipvalue": {"clipvalue": 0.002},
    "schedule": {"learning_rate": optimizers.schedules.ExponentialDecay(0.05, 4, 0.5)},
    "ema": {"use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": 6},
    "weight_decay": {"weight_decay": 0.1},
    "loss_scale_factor": {"loss_scale_factor": 128.0},
    "keras_steps": {"gradient_accumulation_steps": 2},
}


@functools.cache
def with_optimizer(name, feature=None):
    make, options = OPTIMIZERS[name], PER_UPDATE.get(feature, {})
    if "learning_rate" in options:
        make = functools.partial(make.func, **make.keywords)
    return lambda: compiled(dense(), optimizer=make(**options))


@pytest.mark.parametrize(
    ("optimizer", "count"), [(name, 3) for name in OPTIMIZERS] + [("sgd", 2), ("sgd", 7), ("adam", 7)]
)
def test_optimizers(optimizer, count):
    found = assert_equal_training(with_optimizer(optimizer), on_samples, count)
    assert int(found.model.optimizer.iterations) == UPDATES == 20


@pytest.mark.parametrize("feature", PER_UPDATE)
def test_once_per_update(feature):
    found = assert_equal_training(with_optimizer("sgd", feature), on_samples, 3)
    assert int(found.model.optimizer._iterations) == UPDATES


@pytest.mark.slow
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("feature", [None, *PER_UPDATE])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_feature_and_count(optimizer, feature, count):
    found = assert_equal_training(with_optimizer(optimizer, feature), on_samples, count)
    assert int(found.model.optimizer._iterations) == UPDATES


@functools.cache
def constrained(optimizer="sgd"):
    return lambda: _constrained(OPTIMIZERS[optimizer]())


def _constrained(optimizer):
    data = keras.Input((6,))
    hidden = layers.Dense(
        8,
        activation="tanh",
        kernel_constraint=keras.constraints.MaxNorm(0.5),
        kernel_regularizer="l1l2",
        activity_regularizer=None if _private.sums_activity_losses() else keras.regularizers.L2(0.1),
    )(data)
    return compiled(keras.Model(data, layers.Dense(3, bias_regularizer="l2")(hidden)), optimizer=optimizer)


@pytest.mark.parametrize("count", [3, 7])
def test_constraints_and_regularisers(count):
    assert_equal_training(constrained(), on_samples, count)


def test_activity_regularisers_that_are_sums_are_refused(monkeypatch):
    monkeypatch.setattr(_private, "sums_activity_losses", lambda: True)
    data = keras.Input((6,))
    hidden = layers.Dense(8, activity_regularizer="l2", name="hidden")(data)
    model = compiled(keras.Model(data, layers.Dense(3)(hidden)))
    with pytest.raises(remat.UnsupportedStep, match="activity_regularizer of 'hidden' over the samples of a batch"):
        remat.keras.limit_memory(model, micro_batches=3)


@functools.cache
def with_weighted_metrics(optimizer="sgd"):
    def build():
        top2 = keras.metrics.SparseTopKCategoricalAccuracy(2, name="top2")
        metrics = {"metrics": ["accuracy", top2], "weighted_metrics": ["accuracy"]}
        return compiled(dense(), optimizer=OPTIMIZERS[optimizer](), **metrics)

    return build


def on_weighted_samples(model):
    return on_samples(model, sample_weight=weights())


def on_weighted_classes(model):
    return on_samples(model, class_weight={0: 0.2, 1: 1.0, 2: 3.0})


@pytest.mark.parametrize("count", [3, 7])
@pytest.mark.parametrize("training", [on_weighted_samples, on_weighted_classes])
def test_weights_and_weighted_metrics(training, count):
    found = assert_equal_training(with_weighted_metrics(), training, count)
    assert set(found.history) == {"loss", "accuracy", "top2", "weighted_accuracy"}


@pytest.mark.slow
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(
    ("build", "training"),
    [
        (constrained, on_samples),
        (with_weighted_metrics, on_weighted_samples),
        (with_weighted_metrics, on_weighted_classes),
    ],
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_with_weights_and_constraints(optimizer, build, training, count):
    assert_equal_training(build(optimizer), training, count)


def several_steps_per_call():
    return compiled(dense(), steps_per_execution=3)


def test_steps_per_execution():
    found = assert_equal_training(several_steps_per_call, on_samples, 3)
    assert int(found.model.optimizer.iterations) == UPDATES


def compiled_by_xla():
    return compiled(dense(), jit_compile=True)


def test_xla():
    assert_equal_training(compiled_by_xla, on_samples, 3)


def on_a_dataset(model):
    data = tf.data.Dataset.from_tensor_slices((inputs(), classes())).batch(BATCH, drop_remainder=True)
    return model.fit(data, epochs=2, verbose=0)


def test_batches_of_a_known_size():
    assert_equal_training(with_optimizer("sgd"), on_a_dataset, 3)


def on_varying_batches(model):
    def batches():
        for size in (5, 16, 2, 9, 1, 7):
            yield inputs()[:size], classes()[:size], weights()[:size]

    return model.fit(batches(), steps_per_epoch=6, verbose=0)


def test_a_generator_of_varying_sizes():
    """A batch of fewer samples than micro-batches is cut into single samples."""
    assert_equal_training(with_optimizer("sgd"), on_varying_batches, 7)


def by_hand(model):
    logs = [model.train_on_batch(inputs()[:size], classes()[:size], return_dict=True) for size in (16, 16, 5, 16)]
    return {name: [float(log[name]) for log in logs] for name in logs[0]}


def test_train_on_batch():
    assert_equal_training(with_optimizer("sgd"), by_hand, 3)


def test_callbacks_see_updates_not_micro_batches():
    seen = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append((batch, int(self.model.optimizer.iterations)))

    train(with_optimizer("sgd"), lambda model: on_samples(model, callbacks=[Watch()]), 3)
    assert seen == [(n % 5, n + 1) for n in range(UPDATES)]


def test_taking_the_limit_off_again():
    def training(model):
        first = on_samples(model, epochs=2).history
        remat.keras.limit_memory(model, None)
        second = on_samples(model, epochs=2).history
        return {name: first[name] + second[name] for name in first}

    plain = full_batches(with_optimizer("sgd"), on_samples)
    found = train(with_optimizer("sgd"), training, 3)
    np.testing.assert_allclose(found.history["loss"], plain.history["loss"], rtol=1e-5)
    assert "make_train_function" not in vars(found.model)


def wide():
    """Activations of 800 kB, so that each device counts them, and weights that TensorFlow's counter leaves out."""
    values = data = keras.Input((FEATURES,))
    for _ in range(3):
        values = layers.Dense(200, activation="gelu")(values)
    return compiled(keras.Model(data, layers.Dense(3)(values)), metrics=None)


def plan_of_a_step(count):
    keras.utils.set_random_seed(7)
    model = wide()
    remat.keras.limit_memory(model, "70%", micro_batches=count, planner="peak_greedy")
    model.train_on_batch(inputs(1000), classes(1000))
    return remat.keras.plan_of(model)


def test_a_percentage_is_one_of_the_whole_batch():
    """In four micro-batches a step needs much less than 70 %, so that nothing is recomputed."""
    whole, pieces = plan_of_a_step(1), plan_of_a_step(4)
    assert whole.recomputed > 0 == pieces.recomputed
    assert pieces.baseline_peak_bytes == pytest.approx(whole.baseline_peak_bytes, rel=0.02)
    assert pieces.budget_bytes == pytest.approx(0.7 * pieces.baseline_peak_bytes, rel=1e-4)
    assert pieces.peak_bytes < pieces.budget_bytes
