"""``limit_memory`` on the PyTorch backend of Keras: ``fit`` does what plain ``fit`` does, within the budget."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SPECS: dict[str, dict[str, object]] = {
    "short last batch": {"budget": "80%", "batch": 512, "samples": 600, "at least": True},
    "its own train_step": {"budget": "80%", "model": "own train_step"},
    "compiled": {"budget": "80%", "compile": {"jit_compile": True}},
    "too small": {"budget": 1000},
    "automatic": {"budget": "auto"},
    "micro-batches": {
        "model": "dense",
        "budget": "85%",
        "micro_batches": 3,
        "batch": 900,
        "samples": 2000,
        "at least": True,
    },
    "checkpoints": {"checkpoints": ["hidden_1", "hidden_3"], "batch": 512, "samples": 600},
    "checkpoints in pieces": {
        "model": "dense",
        "checkpoints": ["hidden_1", "hidden_3"],
        "micro_batches": 3,
        "batch": 900,
        "samples": 1000,
    },
    "a tensor's name": {"checkpoints": ["hidden_1/Tanh:0"]},
    "not called": {"model": "own loss", "checkpoints": ["never_called"]},
    "update": {"model": "dense", "budget": "100%", "micro_batches": 4, "batch": 128, "samples": 128},
    "wide": {"model": "wide", "budget": "85%", "batch": 512, "samples": 512},
    "wide, in pieces": {"model": "wide", "budget": "85%", "micro_batches": 2, "batch": 512, "samples": 512},
    "chosen": {"model": "dense", "budget": "60%", "micro_batches": "auto", "batch": 900, "samples": 1000},
    "chosen, coupled": {"budget": "90%", "micro_batches": "auto", "batch": 512, "samples": 512},
    "chosen, own loss": {
        "model": "own loss",
        "budget": "90%",
        "micro_batches": "auto",
        "batch": 512,
        "samples": 512,
    },
    "chosen, fits": {"model": "dense", "budget": "1GiB", "micro_batches": "auto"},
    "chosen, at its smallest": {
        "model": "sequence",
        "budget": 1000,
        "micro_batches": "auto",
        "batch": 2,
        "samples": 2,
        "at least": True,
    },
}


def run(specs):
    worker = Path(__file__).with_name("worker.py")
    done = subprocess.run(
        [sys.executable, str(worker), json.dumps(specs)],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        env={**os.environ, "KERAS_BACKEND": "torch", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def results():
    return dict(zip(SPECS, run(list(SPECS.values())), strict=True))


def test_training_is_the_same_to_the_bit(results):
    result = results["short last batch"]
    assert "error" not in result, result
    assert result["limited"] == result["plain"]
    assert result["same weights"]
    assert result["recomputed"] > 0
    assert result["departures"] == [0, 0]
    assert result["peak_bytes"] <= result["budget_bytes"] < result["plain_bytes"]
    assert result["measured"] <= result["budget_bytes"]
    assert result["detached"]


def check_training(result, reserve=0.0):
    assert "error" not in result, result
    for name, values in result["plain"].items():
        assert result["limited"][name] == pytest.approx(values, rel=1e-4)
    assert result["difference"] < 1e-4
    assert not any(result["departures"])
    assert result["measured"] <= result["budget_bytes"] * (1 + reserve)
    assert result["detached"]


@pytest.mark.parametrize("name", ["micro-batches", "wide", "wide, in pieces"])
def test_a_budget_is_kept(results, name):
    """What a model returns counts, too: Keras holds it for the metrics until the backward pass is over."""
    result = results[name]
    check_training(result)
    assert result["recomputed"] > 0
    assert result["budget_bytes"] < result["plain_bytes"]
    assert result["measured"] == pytest.approx(result["peak_bytes"], rel=0.05)


@pytest.mark.parametrize(("name", "kind"), [("checkpoints", "tanh"), ("checkpoints in pieces", "gelu")])
def test_named_layers_are_kept_and_the_rest_is_not(results, name, kind):
    """Four of six layers, in a smaller last batch, too."""
    result = results[name]
    check_training(result, reserve=0.02)
    assert result["recomputed_kinds"][kind] == 4
    assert result["peak_bytes"] < result["plain_bytes"]
    if name == "checkpoints":
        assert result["same weights"]


def test_the_update_counts(results):
    """With so few samples a piece it is what needs most, for the optimizer's temporary copies of all parameters."""
    result = results["update"]
    check_training(result)
    assert result["measured"] == pytest.approx(result["peak_bytes"], rel=0.05)


def test_the_number_of_micro_batches_is_chosen(results):
    """The least time within the budget, whatever pair that is, with the numbers of full batches; a line per option."""
    result, joint = results["chosen"], results["chosen"]["joint"]
    check_training(result)
    assert joint["micro_batches"] > 1 or result["recomputed"] > 0
    assert result["budget_bytes"] == joint["budget_bytes"]
    assert joint["counts"][:4] == [1, 2, 3, 4]
    assert joint["times_are_measured"]
    assert result["printed"].count(joint["text"]) == 1
    marked = [line.split()[1] for line in joint["text"].splitlines() if line.startswith("*")]
    assert marked == [str(joint["micro_batches"])]
    assert re.search("the least (predicted|measured) time", joint["text"])


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("chosen, coupled", "1 micro-batch: exact, where micro-batches would change what batch_normalization"),
        ("chosen, own loss", "1 micro-batch, the only possibility"),
    ],
)
def test_the_batch_stays_whole_where_micro_batches_are_inexact(results, name, reason):
    """Dropout, statistics and metrics besides: that micro-batches were timed leaves no trace in them."""
    result = results[name]
    check_training(result)
    assert result["same weights"]
    assert result["limited"] == result["plain"]
    assert result["joint"]["micro_batches"] == 1
    assert result["recomputed"] > 0
    assert reason in result["printed"]


def test_what_fits_is_left_alone(results):
    result = results["chosen, fits"]
    assert result["joint"]["counts"] == [1]
    assert (result["recomputed"], result["same weights"]) == (0, True)
    assert "1 micro-batch: the whole batch fits as it is" in result["printed"]


def test_the_smallest_budget_of_all_choices(results):
    """What the error names is kept by the choice that is then made."""
    result = results["chosen, at its smallest"]
    check_training(result)
    assert result["joint"]["micro_batches"] > 1
    assert result["peak_bytes"] <= result["budget_bytes"] == result["joint"]["budget_bytes"]
    assert "does not fit: the smallest budget is" in result["printed"]


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("its own train_step", "UnsupportedStep", "remat.torch.apply inside of train_step"),
        ("compiled", "UnsupportedStep", "jit_compile=True"),
        ("too small", "InfeasibleBudget", "1000 bytes"),
        ("automatic", "InvalidBudget", "CPU"),
        ("a tensor's name", "UnsupportedStep", "tensors have no names on PyTorch; name layers"),
        ("not called", "UnsupportedStep", "'never_called' is a layer that this training step does not call"),
    ],
)
def test_what_is_refused(results, name, error, message):
    assert results[name]["error"] == error
    assert message in results[name]["message"]


@pytest.mark.slow
def test_check_compares_plain_and_limited_training():
    (found,) = run([{"check": "90%"}])
    assert found["verdict"].startswith("equal"), found
    assert found["recomputed"] > 0
