"""Keras on PyTorch: steps of Keras' own layers are captured by calling them, all others by Dynamo."""

from __future__ import annotations

from pathlib import Path

import pytest

from keras_versions import FOLLOWED, IS_BEFORE_3_14
from worker_process import worker


def ask(function, *args):
    script = Path(__file__).with_name("called_worker.py")
    return worker(script, KERAS_BACKEND="torch", CUDA_VISIBLE_DEVICES="").ask(function, *args)


def check_called(result, captures):
    assert result["mode"] == "graph"
    assert result["called"] > 0
    assert result["captures"] == captures
    assert result["same logs"]
    assert result["same weights"]


@pytest.mark.parametrize(
    "name",
    ["a rate changes", "a layer is frozen", "a regularizer changes", "a loss changes", "an activation changes"],
)
def test_what_a_layer_holds_may_change(name):
    """A callback may do so; the step is captured anew."""
    check_called(ask("beside_plain", name), captures=2)


def test_a_step_is_captured_once():
    """Statistics of batches are among the weights that are compared."""
    result = ask("beside_plain", "nothing changes")
    check_called(result, captures=1)
    assert result["recomputed"] > 0
    assert result["measured_peak_bytes"] == pytest.approx(result["peak_bytes"], rel=0.01)


def test_operators_belong_to_layers():
    result = ask("beside_plain", "nothing changes")
    assert len(result["layers"]) == 9, "five dense layers and four normalisations"
    assert result["phases of a layer"] == ["backward", "forward"]


@pytest.mark.parametrize(("name", "captures"), [("draws with seeds", 1), ("noise with seeds", 2)])
def test_draws_with_a_seed_are_those_of_keras(name, captures):
    """Each step draws others, from the numbers that the layers' generators hold then."""
    result = ask("beside_plain", name)
    check_called(result, captures)
    assert result["recomputed"] > 0


@pytest.mark.parametrize("name", ["a layer of one's own", "a function of one's own"])
def test_code_that_may_read_anything_is_guarded(name):
    """Dynamo captures it: it reads a global variable that changes."""
    result = ask("beside_plain", name)
    assert result["why not called"].endswith("of your own")
    assert result["mode"] == FOLLOWED
    assert result["called"] == 0
    assert result["same logs"]
    assert result["same weights"]


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_experts_that_are_picked_by_value(mode):
    """Keras' ``one_hot`` looks at them, and the layer's own loss is not that of a trace."""
    result = ask("beside_plain", "experts", mode)
    assert result["mode"] == (FOLLOWED if mode == "graph" else mode)
    assert result["recomputed"] > 0
    assert result["same logs"]
    assert result["same weights"]


def test_a_function_of_ones_own_that_comes_later():
    """The step that finds it is not captured by calling it."""
    result = ask("beside_plain", "a function comes later")
    assert result["mode"] == "eager"
    assert result["same logs"]
    assert result["same weights"]


@pytest.mark.skipif(IS_BEFORE_3_14, reason="Dynamo follows Keras from 3.14 on")
def test_both_ways_capture_the_same_operators():
    result = ask("by_both_ways")
    assert result["same operators"], result["operators"]
    called_bytes, followed_bytes = result["peaks"]
    assert abs(called_bytes - followed_bytes) < 64, "the numbers of the loss' metric are inputs of a called step"


def test_tensors_of_layers_that_are_no_variables():
    """The mean of a normalisation, say: another one in its place is no other step."""
    result = ask("that_holds_tensors")
    assert result == {"mode": "graph", "same weights": True, "captures": 1}


def test_a_capture_holds_no_batch():
    assert ask("holds_no_batch")


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_a_limited_model_goes_with_its_last_user(mode):
    assert ask("goes_with_its_last_user", mode)
