"""What ``limit_memory`` refuses, and what its errors say."""

from __future__ import annotations

import os
import subprocess
import sys

import keras
import pytest
import tensorflow as tf
from small_models import BATCH, QUICK, Subclassed, compiled, data, functional, limit

import remat


def train(model):
    return model.fit(*data(), batch_size=BATCH, shuffle=False, verbose=0)


@pytest.mark.parametrize("thing", [None, "model", keras.layers.Dense(3)])
def test_not_a_model(thing):
    with pytest.raises(TypeError, match=f"takes a keras.Model, not {type(thing).__name__}"):
        remat.keras.limit_memory(thing, "50%")


@pytest.mark.parametrize("budget", ["plenty", "-1GiB", 0, "0%"])
def test_unreadable_budget_is_refused_at_once(budget):
    with pytest.raises(remat.InvalidBudget, match=str(budget)):
        remat.keras.limit_memory(functional(), budget)


def test_auto_on_a_cpu():
    model = limit(compiled(functional), "auto")

    with pytest.raises(remat.InvalidBudget, match=r"'auto'.*CPU:0"):
        train(model)


def test_run_eagerly():
    model = limit(compiled(functional, run_eagerly=True))

    with pytest.raises(remat.UnsupportedStep, match=r"run_eagerly=True.*compile it with run_eagerly=False"):
        train(model)


def test_no_limit_no_plan():
    with pytest.raises(ValueError, match=r"has no memory limit; call remat.keras.limit_memory"):
        remat.keras.plan_of(functional())
    with pytest.raises(ValueError, match="has no memory limit"):
        remat.keras.graph_of(functional())


def test_no_plan_before_the_first_step():
    model = limit(compiled(functional))
    assert remat.keras.plan_of(model) is None
    assert remat.keras.graph_of(model) is None


def test_below_the_minimum_then_at_it():
    feed = tf.data.Dataset.from_tensor_slices(data()).batch(BATCH)
    model = limit(compiled(functional), 1000)
    before = [w.numpy() for w in model.weights]
    with pytest.raises(remat.InfeasibleBudget) as caught:
        model.fit(feed, verbose=0)

    error = caught.value
    assert error.budget_bytes == 1000
    assert str(error.minimum_bytes) in str(error)
    assert error.binding_op
    assert error.binding_op in str(error)
    assert remat.keras.plan_of(model) is None
    assert all((w.numpy() == b).all() for w, b in zip(model.weights, before, strict=True))
    # The error holds the frames of the failed call, and with them what that had allocated.
    minimum_bytes = error.minimum_bytes
    del error, caught
    limit(model, minimum_bytes)
    model.fit(feed, verbose=0)
    assert remat.keras.plan_of(model).recomputed > 0


def test_unknown_planner():
    with pytest.raises(ValueError, match="peak_greedy"):
        remat.keras.limit_memory(functional(), "50%", planner="magic")


@pytest.mark.parametrize("levers", [(), ("recompute", "offload"), "split"])
def test_unknown_levers(levers):
    with pytest.raises(ValueError, match=r"is not a tuple of some of recompute, micro_batches, split, update"):
        remat.keras.limit_memory(functional(), "50%", levers=levers)


def test_levers_without_a_budget():
    with pytest.raises(ValueError, match=r"levers=\('micro_batches',\) say how a budget is kept, and there is none"):
        remat.keras.limit_memory(functional(), micro_batches=4, levers=("micro_batches",))


def test_updates_wait_for_all_micro_batches():
    with pytest.raises(remat.UnsupportedStep, match=r"with micro_batches=2 does not have the lever 'update'"):
        remat.keras.limit_memory(functional(), "50%", micro_batches=2, levers=("recompute", "update"))


def test_something_else_replaced_the_training_function():
    model = compiled(functional)
    model.make_train_function = lambda force=False: None

    with pytest.raises(remat.UnsupportedStep, match="something else has replaced make_train_function"):
        limit(model)


def test_trace_model_of_a_model_that_does_not_say_what_it_takes():
    with pytest.raises(remat.UnsupportedStep, match=r"does not say what it takes"):
        remat.keras.trace_model(compiled(Subclassed), batch_size=8)


def test_trace_model_of_an_unknown_dimension():
    inputs = keras.Input((None, 4))
    model = keras.Model(inputs, keras.layers.Dense(3)(inputs))

    with pytest.raises(remat.UnsupportedStep, match=r"give every dimension but the first"):
        remat.keras.trace_model(model, batch_size=8)


def run_in_a_process(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


OTHER_BACKEND = """
import sys, types
import keras
# Only the name counts: no other backend is installed where this runs.
keras.backend.backend = lambda: "openvino"
import remat.keras
try:
    remat.keras.limit_memory(keras.Sequential([keras.layers.Dense(1)]), "50%")
except remat.UnsupportedStep as error:
    print(error)
"""


@pytest.mark.thorough
def test_another_backend():
    said = run_in_a_process(OTHER_BACKEND)
    assert "the active backend is 'openvino'; set KERAS_BACKEND=tensorflow, jax or torch" in said


def test_a_user_error_in_the_model_is_not_hidden():
    @keras.saving.register_keras_serializable("remat_tests")
    class Broken(keras.layers.Layer):
        def call(self, x):
            raise RuntimeError("the user's own mistake")

    model = keras.Sequential([Broken(), keras.layers.Dense(10)])
    model.compile("sgd", "mse", jit_compile=False)
    remat.keras.limit_memory(model, "50%", **QUICK)
    with pytest.raises(RuntimeError, match="the user's own mistake"):
        train(model)


def test_modes_are_known_and_for_pytorch():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    with pytest.raises(ValueError, match="mode='lazy' is unknown"):
        remat.keras.limit_memory(model, "60%", mode="lazy")
    with pytest.raises(ValueError, match="mode='graph' is for Keras on PyTorch; on tensorflow leave it out"):
        remat.keras.limit_memory(model, "60%", mode="graph")
    remat.keras.limit_memory(model, "60%", mode="auto")
    remat.keras.limit_memory(model, None)
