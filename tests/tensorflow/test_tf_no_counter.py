"""Where TensorFlow does not count a CPU's memory remat plans all the same, and measures the process instead."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import json, logging, sys
import numpy as np
import tensorflow as tf
sys.path.append("..")
from smallest_peaks import quickly
from small_steps import PLANNING, Chain, inputs, run
import remat
from remat.running import resident_set
from remat.tensorflow import GradientTape, gradients, last_plan, measure
from remat.tensorflow.peak.device import current_device

quickly()
logged, ran = [], []
keeper = logging.Handler()
keeper.emit = lambda record: logged.append(record.getMessage())
logging.getLogger("remat").addHandler(keeper)

def loss(x):
    return tf.reduce_mean(tf.square(chain(x)))

def by_function(take):
    @tf.function(autograph=False)
    def step(x):
        weights = [weight.read_value() for weight in chain.weights]
        h = x
        for weight in weights:
            h = tf.tanh(h @ weight) * tf.sigmoid(h)
        return take(tf.reduce_mean(tf.square(h)), weights)
    return step(x)

def difference(found, plain):
    pairs = [(one.numpy(), other.numpy()) for one, other in zip(found, plain, strict=True)]
    return max(float(np.abs(one - other).max() / np.abs(other).max()) for one, other in pairs)

# First of all: whatever Python holds then counts in the peak, the gradients below, too.
large = tf.random.stateless_normal([16384, 256], [1, 2])
factors = [tf.Variable(tf.random.stateless_normal([256, 256], [3, n]) / 16) for n in range(8)]

def eight_layers(tape_of):
    @tf.function(autograph=False)
    def step(x):
        with tape_of() as tape:
            h = x
            for factor in factors:
                h = tf.tanh(h @ factor)
            y = tf.reduce_mean(tf.square(h))
        step.tape = tape
        return tape.gradient(y, factors)
    return step

plain_step = eight_layers(tf.GradientTape)
limited = eight_layers(lambda: GradientTape(budget="80%", **PLANNING))
measured = [measure(one, large) for one in (plain_step, limited)]
answer = {
    "measured": [one.peak_bytes for one in measured] + [one.counter for one in measured],
    "predicted": [limited.tape.plan.baseline_peak_bytes, limited.tape.plan.peak_bytes],
}

chain, x = Chain(), inputs()
plain, planned = (run(loss, chain.weights, x, budget=budget) for budget in (None, "70%"))
answer["has_counter"] = current_device().has_counter
answer["tape"] = [difference(planned.gradients, plain.gradients), planned.tape.plan.recomputed]
found = by_function(lambda y, xs: gradients(y, xs, budget="70%", **PLANNING))
answer["gradients"] = [difference(found, by_function(tf.gradients)), last_plan().recomputed]

checked = remat.tensorflow.check(loss, x, budget="70%")
answer["check"] = [checked.passed, checked.recomputed, checked.verdict]

resident_set.can_be_measured = lambda: False
try:
    measure(lambda: ran.append(1))
except remat.UnsupportedStep as error:
    answer["refusal"] = str(error)
print(json.dumps(answer | {"logged": logged, "ran": len(ran)}))
"""


SCRATCH_BYTES = 16 << 20
"""What the process may hold beside the step: one tensor of it was seen, on one machine, and here 1 MB."""


@pytest.fixture(scope="module")
def uncounted() -> dict[str, Any]:
    environment = {**os.environ, "TF_ENABLE_ONEDNN_OPTS": "0"}
    folder = Path(__file__).parent
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert not found["has_counter"]
    return found


@pytest.mark.parametrize("how", ["tape", "gradients"])
def test_a_budget_is_planned_with_the_plain_numbers(uncounted: dict[str, Any], how: str) -> None:
    difference, recomputed = uncounted[how]
    assert recomputed > 0
    assert difference <= 1e-5


def test_a_check_compares_the_numbers_and_says_that_no_peak_was_measured(uncounted: dict[str, Any]) -> None:
    passed, recomputed, verdict = uncounted["check"]
    assert passed
    assert recomputed > 0
    assert verdict.startswith("equal: ")
    assert "no peak was measured" in verdict


def test_what_is_not_counted_is_said_once(uncounted: dict[str, Any]) -> None:
    (said,) = [line for line in uncounted["logged"] if "beside a step is not counted" in line]
    assert "TF_ENABLE_ONEDNN_OPTS=1" in said


def test_the_peak_set_size_stands_in_for_the_counter(uncounted: dict[str, Any]) -> None:
    """The kernels' scratch memory is in it. The plain step's order is TensorFlow's own: it may hold more."""
    plain, planned, *names = uncounted["measured"]
    predicted_plain, predicted_planned = uncounted["predicted"]
    assert names == ["peak set size of the process"] * 2
    assert 0.9 * predicted_plain <= plain
    assert 0.9 * predicted_planned <= planned <= predicted_planned + SCRATCH_BYTES
    assert planned <= 0.9 * plain


def test_where_nothing_can_be_measured_it_is_refused_in_one_line_before_anything_runs(
    uncounted: dict[str, Any],
) -> None:
    assert "no peak can be measured on CPU:0" in uncounted["refusal"]
    assert "TF_ENABLE_ONEDNN_OPTS=1" in uncounted["refusal"]
    assert "\n" not in uncounted["refusal"]
    assert uncounted["ran"] == 0
