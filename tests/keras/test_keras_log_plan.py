"""``LogPlan``: the plan of a model and its peaks where TensorBoard shows them."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import remat.keras


def small_model():
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def test_plan_and_peaks_are_logged_once(tmp_path):
    model = small_model()
    remat.keras.limit_memory(model, budget="1GiB")
    x = np.random.rand(32, 16)
    model.fit(x, x[:, :1], batch_size=8, epochs=2, verbose=0, callbacks=[remat.keras.LogPlan(tmp_path)])

    (file,) = tmp_path.iterdir()
    logged = {}
    for event in tf.compat.v1.train.summary_iterator(str(file)):
        for value in event.summary.value:
            logged.setdefault(value.tag, []).append(tf.make_ndarray(value.tensor))
    plan = remat.keras.plan_of(model)
    assert plan.planner in logged["remat/plan"][-1][0].decode()
    assert logged["remat/predicted_peak_bytes"] == [plan.peak_bytes]
    assert logged["remat/budget_bytes"] == [1 << 30]
    if plan.measured_peak_bytes is not None:
        assert logged["remat/measured_peak_bytes"][-1] == plan.measured_peak_bytes


def test_plan_and_peaks_go_to_a_run_of_weights_and_biases():
    class Run:
        def __init__(self):
            self.said = []

        def log(self, data, commit):
            assert not commit
            self.said.append(data)

    run = Run()
    model = small_model()
    remat.keras.limit_memory(model, budget="1GiB")
    x = np.random.rand(32, 16)
    model.fit(x, x[:, :1], batch_size=8, epochs=2, verbose=0, callbacks=[remat.keras.LogPlan(run)])
    plan = remat.keras.plan_of(model)
    assert run.said[-1]["remat/plan"] == str(plan)
    assert run.said[-1]["remat/predicted_peak_bytes"] == plan.peak_bytes
    assert run.said[-1].get("remat/measured_peak_bytes") == plan.measured_peak_bytes
    assert len(run.said) <= 2
    with pytest.raises(TypeError, match="a run of Weights & Biases"):
        remat.keras.LogPlan(3)


def test_a_model_without_a_limit_is_refused(tmp_path):
    model = small_model()
    x = np.random.rand(8, 16)
    with pytest.raises(ValueError, match="has no memory limit"):
        model.fit(x, x[:, :1], verbose=0, callbacks=[remat.keras.LogPlan(tmp_path)])
