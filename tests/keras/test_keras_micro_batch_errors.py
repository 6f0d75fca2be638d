"""Where micro-batches cannot be exact, ``limit_memory`` or ``fit`` says so."""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf
from accumulation import classes, compiled, dense, fit, inputs
from small_models import OwnTrainStep

import remat

BACKEND = keras.backend.backend()
INSTEAD = "torch.micro_batches" if BACKEND == "torch" else f"{BACKEND}.value_and_grad"


def limited(model, count=3, **options):
    return remat.keras.limit_memory(model, micro_batches=count, **options)


@pytest.mark.parametrize("count", [0, -1, 2.0, True, "3"])
def test_no_number_of_micro_batches(count):
    with pytest.raises(ValueError, match=f"at least 1, not {count!r}"):
        limited(dense(), count)


class OwnLoss(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.mean((y - y_pred) ** 2)


class OwnMetrics(keras.Model):
    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        return {"mine": keras.ops.max(y_pred)}


@pytest.mark.parametrize(
    ("build", "name", "instead"),
    [
        (OwnTrainStep, "train_step", f"use remat.{INSTEAD} inside it"),
        (OwnLoss, "compute_loss", r"give the loss to compile\(\) or add_loss\(\)"),
        (OwnMetrics, "compute_metrics", r"give the metrics to compile\(\)"),
    ],
)
def test_a_step_of_the_models_own(build, name, instead):
    with pytest.raises(remat.UnsupportedStep, match=f"has its own {name}, .*micro_batches=3.*{instead}"):
        limited(build())


def test_a_step_given_to_the_model_later():
    model = limited(compiled(dense()))
    model.train_step = lambda data: {}
    with pytest.raises(remat.UnsupportedStep, match="has its own train_step"):
        fit(model, inputs(), classes())


class PerColumn(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return keras.ops.mean((y_true - y_pred) ** 2, axis=0)


class Nested(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return keras.losses.MeanSquaredError()(y_true, y_pred) * keras.ops.ones_like(y_pred[:, 0])


class Whole(keras.losses.Loss):
    def __call__(self, y_true, y_pred, sample_weight=None):
        return keras.ops.mean((y_true - y_pred) ** 2)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            lambda y, p: keras.ops.mean((y - p) ** 2),
            r"returns values of the shape \(\) for one micro-batch, not one per",
        ),
        (PerColumn(name="column"), r"the loss 'column' returns values of the shape \(3,\)"),
        (Nested(name="nested"), "what the loss 'nested' divides by.*return one value per sample from its call"),
        (Whole(name="whole"), "what the loss 'whole' divides by"),
        (keras.losses.MeanSquaredError(reduction=None, name="none"), "'none' has reduction=None; give it"),
        (keras.losses.Dice(), r"'dice' returns values of the shape \(\)"),
    ],
)
def test_a_loss_of_unknown_denominator(loss, message):
    model = limited(compiled(dense(), loss=loss, metrics=None))
    before = [w.numpy() for w in model.weights]
    with pytest.raises(remat.UnsupportedStep, match=message):
        fit(model, inputs(), inputs()[:, :3])
    assert all((w.numpy() == b).all() for w, b in zip(model.weights, before, strict=True))


def test_a_loss_that_pairs_samples():
    model = limited(compiled(dense(), loss=keras.losses.Circle(), metrics=None))
    with pytest.raises(remat.UnsupportedStep, match="'circle' compares the samples of a batch with one another"):
        fit(model, inputs(), classes())


def test_no_loss():
    model = limited(compiled(dense(), loss=None, metrics=None))
    with pytest.raises(remat.UnsupportedStep, match="has no loss; give compile"):
        fit(model, inputs(), classes())


def test_an_unknown_size_that_differs():
    data = tf.data.Dataset.from_generator(
        lambda: iter([(inputs()[:8], classes()[:8]), (inputs()[:8], classes()[:7])]),
        output_signature=(tf.TensorSpec((None, 6)), tf.TensorSpec((None,), tf.int64)),
    )
    model = limited(compiled(dense()))
    with pytest.raises(tf.errors.InvalidArgumentError, match="y has another number of samples than x"):
        model.fit(data, verbose=0)
