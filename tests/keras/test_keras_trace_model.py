"""A model's training step as a graph, from Python and from the command line, with nothing allocated."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import keras
import pytest
from keras import layers
from small_models import WIDTH, functional, sequential

import remat
from remat.tensorflow.peak.device import current_device


def test_sizes_follow_the_batch_and_nothing_is_allocated():
    model = functional()
    device = current_device()
    before = device.in_use_bytes
    device.reset_peak()

    small = remat.keras.trace_model(model, batch_size=1000)
    large = remat.keras.trace_model(model, batch_size=100_000)

    # Optimizer slots are made; activations of 100,000 samples would be 100 MB each.
    assert device.peak_bytes - before < 8 * sum(w.numpy().nbytes for w in model.weights)
    peaks = [remat.simulate(graph, graph.plain_schedule).peak_bytes for graph in (small, large)]
    assert peaks[1] > 50 * peaks[0]
    assert len(small.ops) == len(large.ops)


@pytest.mark.parametrize("build", [functional, sequential])
def test_the_step_has_forward_backward_and_update(build):
    kinds = [op.kind for op in remat.keras.trace_model(build(), batch_size=64).ops]

    assert kinds.count("MatMul") >= 3 * 4 - 1
    assert "AssignSubVariableOp" in kinds or "AssignVariableOp" in kinds


def test_every_activation_and_variable_is_there():
    model = functional()
    graph = remat.keras.trace_model(model, batch_size=64)

    shapes = {tensor.shape for tensor in graph.tensors}
    assert (64, 2 * WIDTH) in shapes
    # Adam: the weights, and two slots for each trainable one.
    expected = sum(w.numpy().nbytes for w in model.weights) + 2 * sum(w.numpy().nbytes for w in model.trainable_weights)
    batch = 64 * WIDTH * 4
    assert expected <= graph.pinned_bytes <= 1.05 * (expected + batch) + 1000


def test_loss_and_optimizer_may_be_named():
    adam = remat.keras.trace_model(functional(), batch_size=64, loss="mse")
    sgd = remat.keras.trace_model(functional(), batch_size=64, loss="mse", optimizer="sgd")

    assert sgd.pinned_bytes < adam.pinned_bytes


def test_the_models_own_loss_and_optimizer_stay():
    model = functional()
    model.compile(keras.optimizers.SGD(0.125), "mae", jit_compile=False)
    optimizer = model.optimizer
    remat.keras.trace_model(model, batch_size=64)

    assert model.optimizer is optimizer
    assert model.loss == "mae"


def test_several_inputs_and_outputs():
    left, right = keras.Input((WIDTH,), name="left"), keras.Input((3,), name="right")
    x = layers.Dense(WIDTH, activation="relu")(layers.Concatenate()([left, right]))
    model = keras.Model({"left": left, "right": right}, [layers.Dense(2)(x), layers.Dense(5)(x)])

    graph = remat.keras.trace_model(model, batch_size=32)

    assert {(32, 2), (32, 5)} <= {tensor.shape for tensor in graph.tensors}


def test_weights_and_state_are_untouched():
    model = functional()
    before = [w.numpy() for w in model.weights]
    remat.keras.trace_model(model, batch_size=64)

    assert all((w.numpy() == b).all() for w, b in zip(model.weights, before, strict=True))


@pytest.mark.thorough
def test_command_line_plans_a_real_model(tmp_path):
    script = Path(sys.executable).with_name("remat")
    command = ["plan", "keras.applications:MobileNetV2", "--kwargs", json.dumps({"weights": None})]
    command += [
        "--batch-size",
        "8",
        "--budget",
        "60%",
        "--json",
        "--planner",
        "peak_greedy",
        "--out",
        str(tmp_path / "p.json"),
    ]
    environment = {name: value for name, value in os.environ.items() if name != "REMAT_TRACEBACK"}
    done = subprocess.run([script, *command], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr

    said = json.loads(done.stdout)
    keys = "peak_bytes baseline_peak_bytes budget_bytes overhead overhead_lower_bound planner plan_seconds schedule"
    assert set(keys.split()) <= set(said)
    assert said["peak_bytes"] <= said["budget_bytes"] == pytest.approx(0.6 * said["baseline_peak_bytes"], rel=1e-6)
    assert 0 <= said["overhead_lower_bound"] <= said["overhead"] < 0.5
    assert len(said["schedule"]) > len(set(said["schedule"])) > 1000
    assert list(remat.load_plan(tmp_path / "p.json").schedule) == said["schedule"]
