"""The first planned step is held against its budget: measured, planned again once, told, or refused."""

from __future__ import annotations

import json
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from small_models import compiled, limit

import remat
import remat.keras
from blind_allocator import sees_only
from remat.tensorflow.peak.device import current_device
from remat.tensorflow.planned import rewrite
from said import said

SAMPLES, UNITS = 4096, 128  # 2 MiB an activation: blocks that the counter sees. The plain step takes 34 MB.


def wide() -> keras.Model:
    layers = [keras.layers.Dense(UNITS, "tanh") for _ in range(12)]
    return keras.Sequential([keras.Input((UNITS,)), *layers, keras.layers.Dense(10)])


def fitted(step_bytes, epochs=1, **options):
    """The plan and the losses within a budget for the step, beside what other tests have left in memory."""
    budget = current_device().in_use_bytes + step_bytes
    model = limit(compiled(wide), budget, planner="peak_greedy", **options)
    random = np.random.default_rng(0)
    x, y = random.normal(size=(SAMPLES, UNITS)).astype("float32"), random.integers(0, 10, SAMPLES)
    history = model.fit(x, y, batch_size=SAMPLES, epochs=epochs, shuffle=False, verbose=0)
    return remat.keras.plan_of(model), history.history["loss"]


@pytest.fixture
def blind(monkeypatch):
    sees_only(0.7, monkeypatch)


def test_the_plan_says_what_its_first_step_took(caplog):
    plan, _ = fitted(26_000_000)
    assert plan.recomputed > 0
    assert 0.5 * plan.peak_bytes < plan.measured_peak_bytes <= plan.budget_bytes
    assert "measured" in str(plan)
    assert not said(caplog)


def test_a_broken_budget_is_planned_again_once(blind, caplog):
    kept, plain = fitted(21_500_000, on_change="keep")
    assert kept.measured_peak_bytes > 1.01 * kept.budget_bytes, "the budget was to be broken"
    (line,) = said(caplog)
    assert "more than the budget of" in line
    caplog.clear()

    plan, losses = fitted(21_500_000, epochs=2)
    assert plan.budget_bytes == pytest.approx(kept.budget_bytes, rel=0.1)
    assert plan.peak_bytes - plan.budget_bytes < kept.peak_bytes - kept.budget_bytes, "the second plan leaves more room"
    # Beside other work 23.1 MB were once measured within 22.5; why is not known.
    assert plan.measured_peak_bytes <= 1.04 * plan.budget_bytes < kept.measured_peak_bytes
    np.testing.assert_allclose(losses[0], plain[0], rtol=1e-5)


def test_a_strict_limit_refuses_a_broken_budget(blind):
    with pytest.raises(remat.PlanMismatch, match=r"took .* more than the budget of"):
        fitted(21_500_000, on_change="keep", strict=True)


def test_an_unknown_word_is_refused():
    with pytest.raises(ValueError, match="on_change='again' is unknown"):
        remat.keras.limit_memory(compiled(wide), "70%", on_change="again")


class GrowsLater(keras.layers.Layer):
    """Takes 32 MB more, which no trace knows of, from the third step on."""

    def build(self, shape):
        self.steps = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False)

    def call(self, x):
        steps = self.steps.assign_add(1)
        large = tf.cond(steps > 2, lambda: tf.reduce_sum(tf.random.normal([8_000_000])), lambda: tf.zeros(()))
        return x + 0.0 * large


def growing(epochs, **options):
    budget = current_device().in_use_bytes + 26_000_000
    layers = [keras.layers.Dense(UNITS, "tanh") for _ in range(12)]
    model = keras.Sequential([keras.Input((UNITS,)), GrowsLater(), *layers, keras.layers.Dense(10)])
    limited = limit(compiled(lambda: model), budget, planner="peak_greedy", **options)
    x, y = np.zeros((SAMPLES, UNITS), "float32"), np.zeros(SAMPLES, "int64")
    limited.fit(x, y, batch_size=SAMPLES, epochs=epochs, shuffle=False, verbose=0)
    return remat.keras.plan_of(model)


@pytest.mark.parametrize("epochs", [2, 4])
def test_a_later_step_over_the_budget_is_told_once(caplog, epochs):
    plan = growing(epochs, on_change="keep")
    assert len([line for line in said(caplog) if "more than the budget of" in line]) == (0 if epochs == 2 else 1)
    assert plan.measured_peak_bytes <= plan.budget_bytes  # That of the first step.


def test_a_training_that_runs_is_not_refused_its_budget(monkeypatch, caplog):
    """What variables take once they have been moved may leave no plan within a budget that was kept before."""
    asked = []

    def rewrite_once(function, request):
        asked.append(request)
        if len(asked) > 1 and request.plan is None:
            raise remat.InfeasibleBudget("", minimum_bytes=2 * request.budget, budget_bytes=1, binding_op="")
        return rewrite(function, request)

    monkeypatch.setattr("remat.keras.tensorflow.limit.rewrite", rewrite_once)
    plan = growing(6)
    assert len(asked) == 3
    assert plan.schedule == asked[-1].plan.schedule
    assert len([line for line in said(caplog) if "more than the budget of" in line]) == 1


MOVING = """
import json
import keras, numpy as np
import remat, remat.keras
from remat.tensorflow.peak.device import current_device

keras.utils.set_random_seed(0)
units = [int(one) for one in np.random.default_rng(1).integers(300, 1100, 14)]
layers = [keras.layers.Dense(one, "tanh") for one in units]
model = keras.Sequential([keras.Input((256,)), *layers, keras.layers.Dense(10)])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss, jit_compile=False)
model.optimizer.build(model.trainable_variables)
x, y = np.zeros((512, 256), "float32"), np.zeros(512, "int32")

def within(budget):
    remat.keras.limit_memory(model, None)
    remat.keras.limit_memory(model, budget, planner="peak_greedy", on_change="keep")
    model.train_on_batch(x, y)

try:
    within(1)
except remat.InfeasibleBudget as error:
    smallest = error.minimum_bytes
within(smallest)
peaks, plan = [], remat.keras.plan_of(model)
for _ in range(9):
    current_device().reset_peak()
    model.train_on_batch(x, y)
    peaks.append(current_device().peak_bytes)
print(json.dumps([peaks, plan.measured_peak_bytes, plan.peak_bytes, plan.budget_bytes]))
"""


def test_slots_that_move_are_in_the_prediction():
    """Momentum is assigned anew in each step, wherever there is room: later steps take more than the first.

    In a process of its own: 60 MiB of weights and slots would lie beside the steps of other tests.
    """
    run = subprocess.run([sys.executable, "-c", MOVING], capture_output=True, text=True, check=True)
    peaks, first, predicted, budget = json.loads(run.stdout.splitlines()[-1])
    assert max(peaks) > first, "no slot has moved"
    # As slots lie where they happen to, steps took up to 1.05 of it; without the moves predicted, 1.17 to 1.19.
    assert max(peaks) <= 1.06 * predicted
    assert max(peaks) <= budget
