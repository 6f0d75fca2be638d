"""Batches of ever other lengths: a budget is kept for longer ones than the first, too."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from small_models import compiled, limit

import remat
import remat.keras
from remat.keras.tensorflow.batches import grown_shapes, may_grow
from remat.tensorflow.peak.device import current_device
from said import said

SAMPLES, UNITS = 8, 128  # 2 MiB an activation at a length of 512: blocks that the counter sees.
LENGTHS = (256, 384, 128, 512, 500, 256)


def per_token() -> keras.Model:
    layers = [keras.layers.Dense(UNITS, "tanh") for _ in range(12)]
    return keras.Sequential([keras.Input((None, UNITS)), *layers, keras.layers.Dense(10)])


def batches(lengths):
    random = np.random.default_rng(0)
    for length in lengths:
        x = random.normal(size=(SAMPLES, length, UNITS)).astype("float32")
        yield x, random.integers(0, 10, (SAMPLES, length))


def data_set(lengths=LENGTHS):
    spec = (tf.TensorSpec((None, None, UNITS), tf.float32), tf.TensorSpec((None, None), tf.int64))
    return tf.data.Dataset.from_generator(lambda: batches(lengths), output_signature=spec)


class Watched(keras.callbacks.Callback):
    """The loss of each step, and what it took."""

    def __init__(self):
        super().__init__()
        self.losses, self.peaks = [], []

    def on_train_batch_begin(self, batch, logs=None):
        if current_device().has_counter:
            current_device().reset_peak()

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(logs["loss"])
        if current_device().has_counter:
            self.peaks.append(current_device().peak_bytes)


def fitted(step_bytes, lengths=LENGTHS, epochs=1, **options):
    """What each step took and came to, and the budget; plain where no bytes are given for a step."""
    budget = current_device().in_use_bytes + (step_bytes or 0)
    model = compiled(per_token)
    if step_bytes is not None:
        model = limit(model, budget, planner="peak_greedy", **options)
    watched = Watched()
    model.fit(data_set(lengths), epochs=epochs, shuffle=False, verbose=0, callbacks=[watched])
    return model, watched, budget


def test_longer_batches_keep_the_budget(caplog):
    model, watched, budget = fitted(24_000_000)
    assert max(watched.peaks) <= budget
    assert max(watched.peaks) > 0.8 * budget  # The longest needs it.
    assert remat.keras.plan_of(model).recomputed > 0
    assert not said(caplog)


def test_without_looking_a_longer_batch_takes_more():
    """So that the test above can fail."""
    _, watched, budget = fitted(24_000_000, on_change="keep")
    assert max(watched.peaks) > 1.1 * budget


@pytest.mark.parametrize("epochs", [1, 2])
def test_losses_are_those_of_plain_training(epochs):
    _, planned, _ = fitted(24_000_000, epochs=epochs)
    _, plain, _ = fitted(None, epochs=epochs)
    np.testing.assert_allclose(planned.losses, plain.losses, rtol=1e-6)
    assert len(planned.losses) == epochs * len(LENGTHS)


def test_a_function_is_traced_for_larger_shapes_only(monkeypatch):
    traced = []
    make = remat.keras.tensorflow.limit.Limit._make_train_function

    def making(self, force=False):
        traced.append(list(self._shapes))
        return make(self, force)

    monkeypatch.setattr("remat.keras.tensorflow.limit.Limit._make_train_function", making)
    fitted(30_000_000, epochs=3)
    forced = [shapes[0][1] for shapes in traced if shapes]
    assert sorted(set(forced)) == [256, 384]  # Left behind: 512 is the largest, and stays.


def test_a_training_that_runs_is_not_refused_a_longer_batch(caplog):
    lengths = (256, 256, 2048, 256, 2048)
    _, watched, _ = fitted(16_000_000, lengths, epochs=2)
    assert len(watched.losses) == 2 * len(lengths)
    (line,) = [line for line in said(caplog) if "Batches of up to" in line]
    assert "[(8, 2048, 128), (8, 2048)] have come" in line
    _, plain, _ = fitted(None, lengths, epochs=2)
    np.testing.assert_allclose(watched.losses, plain.losses, rtol=1e-6)


def test_strictly_it_is():
    with pytest.raises(remat.InfeasibleBudget):
        fitted(16_000_000, (256, 2048), strict=True)


def test_a_larger_batch_that_is_given_by_itself_is_refused():
    budget = current_device().in_use_bytes + 16_000_000
    model = limit(compiled(per_token), budget, planner="peak_greedy")
    for length in (256, 128, 256):
        model.train_on_batch(*next(batches([length])))
    with pytest.raises(remat.InfeasibleBudget):
        model.train_on_batch(*next(batches([2048])))


def test_sizes_grow_axis_by_axis():
    assert grown_shapes([], [(2, 3), ()]) == [(2, 3), ()]
    assert grown_shapes([(2, 3), ()], [(4, 1), ()]) == [(4, 3), ()]
    assert grown_shapes([(2, 3)], [(2, 3, 4)]) == [(2, 3, 4)]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ((tf.TensorSpec((None, 3), tf.float32), tf.TensorSpec((None,), tf.int64)), False),
        ((tf.TensorSpec((None, 3), tf.float32), tf.TensorSpec((None, None), tf.int64)), True),
        (tf.TensorSpec(None, tf.float32), True),
        (tf.RaggedTensorSpec((None, None, 4), tf.float32), False),  # Its values are one tensor with one open axis.
    ],
)
def test_only_open_axes_beyond_the_first_are_looked_at(spec, expected):
    assert may_grow(spec) == expected
