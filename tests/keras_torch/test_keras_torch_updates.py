"""The lever "update" on the PyTorch backend of Keras: each variable is updated inside of the backward pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from keras_versions import IS_BEFORE_3_14
from worker_process import worker


def updated_early(name):
    script = Path(__file__).with_name("worker.py")
    return worker(script, KERAS_BACKEND="torch", CUDA_VISIBLE_DEVICES="").ask("updated_early", name)


def check(result):
    assert "error" not in result, result
    assert result["mode"] == "graph"
    assert result["same weights"]
    assert result["same state"], "the number of iterations among it"


@pytest.mark.parametrize(
    "name",
    [
        "AdamW on a schedule",
        "some without decay",
        *(
            pytest.param(name, marks=pytest.mark.thorough)
            for name in ("SGD, each clipped", "Adam, amsgrad", "RMSprop", "Lion", "Adagrad", "Adadelta", "Adamax")
        ),
    ],
)
def test_gradients_are_used_as_they_come(name):
    """The peak falls by nearly the gradients' bytes, and by the scratch memory of an update of all weights."""
    result = updated_early(name)
    check(result)
    assert result["moved"] > 0
    assert result["bound by"] == ""
    assert result["measured"] < result["plain"] - 0.5 * result["weights"]
    assert result["predicted"] == pytest.approx(result["measured"], rel=0.02)


@pytest.mark.parametrize(
    ("name", "bound_by"),
    [
        ("all clipped together", "global_clipnorm of the optimizer"),
        pytest.param("moving average", "use_ema of the optimizer", marks=pytest.mark.thorough),
        pytest.param(
            "loss scale", "the loss scale, which looks for infinities in all gradients", marks=pytest.mark.thorough
        ),
    ],
)
def test_what_needs_all_gradients_is_named(name, bound_by):
    result = updated_early(name)
    check(result)
    assert result["moved"] == 0
    assert result["bound by"] == bound_by
    # Earlier Keras leaves each operation's arguments in cycles: steps hold them until Python collects these.
    assert result["measured"] == pytest.approx(result["plain"], rel=0.05 if IS_BEFORE_3_14 else 0.01)
    if name != "loss scale":  # It asks for a value, and what comes after that is not traced.
        # A trace collects them at its end only.
        most = result["measured"] + result["weights"] * IS_BEFORE_3_14
        assert 0.98 * result["measured"] <= result["predicted"] <= 1.02 * most


def test_an_optimizer_that_counts_its_calls_is_refused():
    result = updated_early("Nadam")
    assert result["error"] == "UnsupportedStep"
    assert "of Nadam it is not known that it updates each variable by itself" in result["message"]
