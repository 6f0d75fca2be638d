"""Losses whose denominators differ between micro-batches: masks, weights, several outputs, ``add_loss``, float16."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
from accumulation import (
    BATCH,
    SAMPLES,
    STEPS,
    WORDS,
    assert_equal_training,
    classes,
    compiled,
    cross_entropy,
    fit,
    inputs,
    sentences,
    targets,
    train,
    weights,
)
from keras import layers, optimizers


def tagger(loss, **options):
    """One class per word; words of 0 are masked."""
    words = keras.Input((STEPS,), dtype="int32")
    hidden = layers.Dense(8, activation="tanh")(layers.Embedding(WORDS, 4, mask_zero=True)(words))
    return compiled(keras.Model(words, layers.Dense(3)(hidden)), loss=loss, **options)


LOSSES = {
    "masked": lambda: cross_entropy(),
    "masked_weights": lambda: cross_entropy(reduction="mean_with_sample_weight"),
    "sum": lambda: cross_entropy(reduction="sum"),
    "ignored_class": lambda: cross_entropy(ignore_class=1),
}


@functools.cache
def with_loss(name):
    return lambda: tagger(LOSSES[name](), weighted_metrics=["accuracy"])


def on_sentences(model):
    return fit(model, sentences(), targets())


def on_weighted_sentences(model):
    per_word = np.random.default_rng(5).uniform(0.0, 2.0, (SAMPLES, STEPS)).astype("float32")
    return fit(model, sentences(), targets(), sample_weight=per_word)


def test_some_micro_batches_are_all_masked():
    words = sentences()
    assert not words[:8].any()
    assert words[8:BATCH].any()


@pytest.mark.parametrize(
    ("loss", "training"),
    [
        ("masked", on_sentences),
        ("masked", on_weighted_sentences),
        ("masked_weights", on_weighted_sentences),
        ("sum", on_weighted_sentences),
        ("ignored_class", on_sentences),
    ],
)
def test_denominators_that_differ(loss, training):
    assert_equal_training(with_loss(loss), training, 3)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 7])
@pytest.mark.parametrize("training", [on_sentences, on_weighted_sentences])
@pytest.mark.parametrize("loss", LOSSES)
def test_denominators_that_differ_in_every_count(loss, training, count):
    assert_equal_training(with_loss(loss), training, count)


class Noted(layers.Layer):
    """Adds the mean square of what it sees to the loss."""

    def call(self, x):
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
        return x


def several_outputs():
    """Inputs and targets by name; a masked, a weighted, a summed and a plain loss over a shared trunk."""
    words = keras.Input((STEPS,), dtype="int32", name="words")
    data = keras.Input((6,), name="data")
    embedded = layers.Embedding(WORDS, 4, mask_zero=True)(words)
    hidden = Noted()(layers.Dense(8, activation="tanh", kernel_regularizer="l2")(data))
    tags = layers.Dense(3, name="tags")(layers.LSTM(4, return_sequences=True)(embedded))
    outputs = {
        "tags": tags,
        "kind": layers.Dense(3, name="kind")(hidden),
        "size": layers.Dense(1, name="size")(hidden),
        "total": layers.Dense(1, name="total")(hidden),
    }
    return compiled(
        keras.Model({"words": words, "data": data}, outputs),
        loss={
            "tags": cross_entropy(),
            "kind": cross_entropy(reduction="mean_with_sample_weight"),
            "size": "mse",
            "total": keras.losses.MeanAbsoluteError(reduction="sum"),
        },
        loss_weights={"tags": 0.5, "kind": 2.0, "size": 1.5, "total": 0.01},
        metrics={"kind": ["accuracy"], "size": ["mae"]},
        weighted_metrics={"kind": ["accuracy"]},
    )


def on_several_outputs(model):
    return fit(
        model,
        {"words": sentences(), "data": inputs()},
        {"tags": targets(), "kind": classes(), "size": inputs()[:, :1], "total": inputs()[:, 1:2]},
        sample_weight={
            "tags": np.ones((SAMPLES, STEPS), "float32"),
            "kind": weights(),
            "size": weights() ** 2,
            "total": np.ones(SAMPLES, "float32"),
        },
    )


@pytest.mark.parametrize("count", [*(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3)), 7])
def test_several_outputs(count):
    found = assert_equal_training(several_outputs, on_several_outputs, count)
    assert {"tags_loss", "kind_loss", "size_loss", "total_loss", "kind_weighted_accuracy"} <= set(found.history)


def nested():
    one, two, three = (keras.Input((6,)) for _ in range(3))
    hidden = layers.Dense(4, activation="tanh")(layers.Concatenate()([one, two, three]))
    model = keras.Model(
        [one, (two, three)], [layers.Dense(1, name="size")(hidden), layers.Dense(3, name="kind")(hidden)]
    )
    return compiled(model, loss=["mse", cross_entropy()], metrics=None)


def on_nested(model):
    return fit(model, [inputs(), (inputs() * 2, inputs() - 1)], [inputs()[:, :1], classes()])


@pytest.mark.thorough
def test_nested_inputs_and_a_list_of_outputs():
    assert_equal_training(nested, on_nested, 3)


def only_added():
    data = keras.Input((6,))
    return compiled(keras.Model(data, Noted()(layers.Dense(3)(data))), loss=None, metrics=None)


def test_no_loss_but_what_layers_add():
    assert_equal_training(only_added, lambda model: fit(model, inputs(), None), 3)


def partly_frozen():
    data = keras.Input((6,))
    unused = layers.Dense(2, name="unused")
    hidden = layers.Dense(8, activation="tanh", trainable=False)(data)
    return compiled(
        keras.Model(data, [layers.Dense(3)(hidden), unused(data)]), loss=[cross_entropy(), None], metrics=None
    )


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_variables_without_a_gradient_stay():
    found = assert_equal_training(partly_frozen, lambda model: fit(model, inputs(), [classes(), inputs()[:, :2]]), 3)
    keras.utils.set_random_seed(7)
    np.testing.assert_array_equal(
        found.model.get_layer("unused").kernel, partly_frozen().get_layer("unused").kernel.numpy()
    )


def half_precision(scale=2.0**10, loss=None):
    policy = keras.mixed_precision.dtype_policy()
    keras.mixed_precision.set_dtype_policy("mixed_float16")
    try:
        words = keras.Input((STEPS,), dtype="int32")
        hidden = layers.Dense(8, activation="tanh")(layers.Embedding(WORDS, 4, mask_zero=True)(words))
        model = keras.Model(words, layers.Dense(3)(hidden))
    finally:
        keras.mixed_precision.set_dtype_policy(policy)
    optimizer = optimizers.LossScaleOptimizer(
        optimizers.SGD(0.05, momentum=0.9), initial_scale=scale, dynamic_growth_steps=4
    )
    return compiled(model, optimizer=optimizer)


@pytest.mark.thorough
def test_loss_scale_grows_once_in_so_many_updates():
    # float16 rounds to 1e-3, and sums in another order round otherwise.
    found = assert_equal_training(half_precision, on_sentences, 3, tolerance=3e-3)
    assert float(found.model.optimizer.dynamic_scale) == 2.0**15


def overflowing():
    data = keras.Input((6,))
    optimizer = optimizers.LossScaleOptimizer(optimizers.SGD(0.05, momentum=0.9), initial_scale=2.0**12)
    return compiled(keras.Model(data, layers.Dense(3)(data)), optimizer=optimizer)


def on_one_infinite_sample(model):
    data = inputs()
    data[BATCH + 3] = np.inf  # In one micro-batch of the second batch.
    logs = []
    for start in range(0, SAMPLES, BATCH):
        before = [w.numpy() for w in model.weights]
        model.train_on_batch(data[start : start + BATCH], classes()[start : start + BATCH])
        logs.append(any((w.numpy() != b).any() for w, b in zip(model.weights, before, strict=True)))
    return {"changed": logs}


@pytest.mark.thorough
def test_one_infinity_drops_the_whole_update():
    found = train(overflowing, on_one_infinite_sample, 3)
    assert found.history["changed"] == [True, False, True, True, True]
    plain = assert_equal_training(overflowing, on_one_infinite_sample, 3)
    assert int(plain.model.optimizer.iterations) == 4
    assert float(plain.model.optimizer.dynamic_scale) == 2.0**11


EMBEDDING_OPTIMIZERS = {
    "lion": lambda: optimizers.Lion(0.002),
    "adam": lambda: optimizers.Adam(0.01),
    "clipped": lambda: optimizers.SGD(0.5, global_clipnorm=0.02),
}


@functools.cache
def text_model(optimizer, is_masked=False, **options):
    """Words and their places, one table read twice, and two losses of which one counts its own denominator."""

    def build():
        words = keras.Input((STEPS,), dtype="int32")
        table = layers.Embedding(WORDS, 4, mask_zero=is_masked, name="words")
        hidden = table(words)
        if not is_masked:
            # A value of the time when the model is made, which PyTorch would differentiate once and then no more.
            places = layers.Embedding(STEPS, 4, name="places")(keras.ops.arange(STEPS))
            hidden = hidden + keras.ops.stop_gradient(places) + table(keras.ops.flip(words, axis=1))
        outputs = {"tags": layers.Dense(3, name="tags")(layers.Dense(8, activation="tanh")(hidden))}
        outputs["kinds"] = layers.Dense(3, name="kinds")(hidden)
        losses = {"tags": cross_entropy(), "kinds": cross_entropy(reduction="mean_with_sample_weight")}
        made = EMBEDDING_OPTIMIZERS[optimizer]()
        return compiled(keras.Model(words, outputs), optimizer=made, loss=losses, metrics=None, **options)

    return build


def in_batches_of_nine(model):
    """Five batches an epoch, twenty updates; all words of the last batch are masked."""
    words = sentences()[:45]
    words[36:] = 0
    per_word = np.random.default_rng(5).uniform(0.1, 2.0, (45, STEPS)).astype("float32")
    given = {"tags": np.ones_like(per_word), "kinds": per_word}
    return fit(model, words, {"tags": targets(45), "kinds": targets(45)}, batch_size=9, sample_weight=given)


@pytest.mark.filterwarnings("ignore:.*shuffle=True:UserWarning")
@pytest.mark.filterwarnings("ignore:.*__array__:DeprecationWarning")  # Keras on PyTorch and JAX, with NumPy 2.
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("optimizer", "is_masked", "count"),
    [("adam", False, 6), ("adam", True, 6), ("clipped", False, 2), ("lion", False, 2)],
)
def test_an_embedding_gets_the_update_of_the_full_batch(optimizer, is_masked, count):
    """Optimizers of Keras on TensorFlow work row by row: a word that occurs twice is not the sum of its rows."""
    found = assert_equal_training(text_model(optimizer, is_masked), in_batches_of_nine, count)
    assert int(found.model.optimizer.iterations) == 20


def on_ragged_batches(model):
    """The last batch of an epoch has twelve samples."""
    weighted = {"tags": np.ones((SAMPLES, STEPS), "float32"), "kinds": np.ones((SAMPLES, STEPS), "float32")}
    return fit(model, sentences(), {"tags": targets(), "kinds": targets()}, sample_weight=weighted)


@pytest.mark.thorough
@pytest.mark.parametrize("xla", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_embedding_in_batches_of_several_sizes(xla):
    if keras.backend.backend() == "torch":
        xla = False
    assert_equal_training(text_model("adam", jit_compile=xla or keras.backend.backend() == "jax"), on_ragged_batches, 5)


def all_masked(model):
    logs = model.train_on_batch(0 * sentences()[:9], targets(9), return_dict=True)
    return {name: [float(value)] for name, value in logs.items()}


def test_a_batch_that_is_all_masked_gives_zero():
    keras.utils.set_random_seed(7)
    untrained = [weight.numpy() for weight in with_loss("masked")().weights]
    found = train(with_loss("masked"), all_masked, 6)
    assert found.history["loss"] == [0.0]
    for one, other in zip(found.model.weights, untrained, strict=True):
        np.testing.assert_array_equal(one.numpy(), other)


class SquareOfMean(layers.Layer):
    """Adds what depends on how a batch is cut."""

    def call(self, x):
        self.add_loss(keras.ops.square(keras.ops.mean(x)))
        return x


def told_by_its_cut():
    data = keras.Input((6,))
    hidden = layers.Dense(1, use_bias=False, kernel_initializer="ones")(data)
    return compiled(keras.Model(data, SquareOfMean()(hidden)), loss=None, metrics=None)


def test_nine_samples_in_six_micro_batches_are_cut_as_numpy_cuts_them():
    pieces = np.array_split(inputs(9), 6)
    expected = sum(len(piece) / 9 * piece.sum(axis=1).mean() ** 2 for piece in pieces)
    found = train(told_by_its_cut, lambda model: {"loss": [float(model.train_on_batch(inputs(9)))]}, 6)
    assert found.history["loss"][0] == pytest.approx(expected, rel=1e-5)
