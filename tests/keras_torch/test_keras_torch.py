"""``limit_memory`` on the PyTorch backend of Keras: ``fit`` does what plain ``fit`` does, within the budget."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SPECS: dict[str, dict[str, object]] = {
    "short last batch": {"budget": "80%", "samples": 300, "at least": True},
    "its own train_step": {"budget": "80%", "own": True},
    "compiled": {"budget": "80%", "compile": {"jit_compile": True}},
    "too small": {"budget": 1000},
    "automatic": {"budget": "auto"},
    "micro-batches": {"budget": "85%", "micro_batches": 3, "batch": 900, "samples": 2000, "at least": True},
    "chosen": {"budget": "80%", "micro_batches": "auto"},
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
    assert result["detached"]


def test_micro_batches_within_a_budget(results):
    result = results["micro-batches"]
    assert "error" not in result, result
    for name, values in result["plain"].items():
        assert result["limited"][name] == pytest.approx(values, rel=1e-4)
    assert result["difference"] < 1e-4
    assert result["recomputed"] > 0
    assert not any(result["departures"])
    assert result["measured"] <= result["budget_bytes"] < result["plain_bytes"]
    assert result["measured"] == pytest.approx(result["peak_bytes"], rel=0.05)
    assert result["detached"]


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("its own train_step", "UnsupportedStep", "remat.torch.apply inside of train_step"),
        ("compiled", "UnsupportedStep", "jit_compile=True"),
        ("too small", "InfeasibleBudget", "1000 bytes"),
        ("automatic", "InvalidBudget", "CPU"),
        ("chosen", "UnsupportedStep", "give a budget, a number of micro-batches, or both"),
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
