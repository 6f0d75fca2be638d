"""``limit_memory`` on the JAX backend of Keras: ``fit`` does what plain ``fit`` does, within the budget."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest

from keras_contract import CHECKS, check
from worker_process import worker

CASES: dict[str, dict[str, Any]] = {
    "short last batch": {
        "model": "functional",
        "budget": "80%",
        "planner": "auto",
        "samples": 300,
        "weighted": True,
        "validation": True,
    },
    "micro-batches alone": {"model": "dense", "budget": None, "micro_batches": 4, "batch": 1536},
    "eager": {"model": "functional", "budget": "80%", "compile": {"run_eagerly": True}},
    "not compiled": {"model": "functional", "budget": "80%", "compile": {"jit_compile": False}},
    "not compiled by Keras": {"model": "turned", "budget": "80%"},
    "automatic": {"model": "functional", "budget": "auto"},
    "checkpoints": {"model": "functional", "budget": None, "checkpoints": ["odd_1", "odd_3"], "samples": 300},
    "no such checkpoint": {"model": "functional", "budget": None, "checkpoints": ["made/up"]},
    "checkpoints in micro-batches": {
        "model": "dense",
        "budget": None,
        "checkpoints": ["hidden_2", "hidden_5"],
        "micro_batches": 3,
        "batch": 1536,
    },
    "masked": {"model": "masked", "budget": "80%"},
    "masked, checkpoints": {"model": "masked", "budget": None, "checkpoints": ["norm_0"]},
    "subclassed": {"model": "subclassed", "budget": "80%"},
    "several steps": {"model": "functional", "budget": "80%", "steps_per_execution": 2},
    "too small": {"model": "functional", "budget": 1000},
    "retried": {"model": "functional", "budget": 1000, "retried": True},
    "chosen": {
        "model": "dense",
        "budget": "45%",
        "planner": "auto",
        "micro_batches": "auto",
        "batch": 1536,
        "samples": 3700,
    },
    "chosen, coupled": {"model": "functional", "budget": "85%", "micro_batches": "auto"},
    "chosen, coupled, tight": {"model": "normalised", "budget": "45%", "micro_batches": "auto", "batch": 512},
    "chosen, own step": {"model": "subclassed", "budget": "85%", "micro_batches": "auto"},
    "chosen, fits": {"model": "dense", "budget": "1GiB", "micro_batches": "auto"},
    "micro-batches": {"model": "dense", "budget": "35%", "micro_batches": 3, "batch": 1536, "samples": 3700},
    "split": {
        "model": "wide",
        "budget": "60%",
        "levers": ["recompute", "split", "update"],
        "batch": 512,
        "samples": 512,
    },
    "split in pieces": {
        "model": "wide",
        "budget": "25%",
        "micro_batches": 2,
        "batch": 512,
        "samples": 512 + 255,
        "levers": ["recompute", "split"],
    },
    "all levers": {
        "model": "dense",
        "budget": "45%",
        "levers": ["recompute", "micro_batches", "split", "update"],
        "batch": 1536,
        "samples": 3700,
    },
    "micro-batches only": {
        "model": "dense",
        "budget": "45%",
        "levers": ["micro_batches"],
        "batch": 1536,
        "samples": 3700,
    },
}
DISTRIBUTED: dict[str, dict[str, Any]] = {
    "batches": {"model": "functional", "budget": "80%", "batch": 1024, "distribution": "batches"},
    "units": {"model": "functional", "budget": "75%", "batch": 1024, "distribution": "units"},
    "too small on units": {"model": "functional", "budget": 1000, "distribution": "units"},
    "in micro-batches": {"model": "dense", "budget": None, "micro_batches": 2, "distribution": "batches"},
}


def process(devices=1):
    flags = f"--xla_force_host_platform_device_count={devices}"
    script = Path(__file__).with_name("worker.py")
    return worker(script, KERAS_BACKEND="jax", JAX_PLATFORMS="cpu", XLA_FLAGS=flags)


@functools.cache
def result_of(name):
    if name in DISTRIBUTED:
        return process(devices=4).ask("compare", DISTRIBUTED[name])
    return process().ask("compare", CASES[name])


def check_training(result):
    assert "error" not in result, result
    assert result["difference"] < 1e-5
    assert result["limited"].keys() == result["plain"].keys()
    for key, values in result["plain"].items():
        assert result["limited"][key] == pytest.approx(values, rel=1e-4, abs=1e-6), key
    plan = result["plan"]
    assert plan["recomputed"] > 0
    assert plan["ops"] > 20
    assert plan["peak_bytes"] <= plan["budget_bytes"] < plan["baseline_peak_bytes"]


def check_recomputed(result, kept, dropped):
    names = result["plan"]["names"]
    for layer in kept:
        assert not [name for name in names if f"({layer})" in name]
    for layer in dropped:
        assert f"jvp({layer})/dot_general" in names


def check_refusal(result, kind, message):
    assert result.get("error") == kind, result
    assert message in result["message"]


def test_fit_with_weights_validation_and_a_short_last_batch():
    check_training(result_of("short last batch"))


def test_the_front_end_of_tensorflow_is_not_loaded():
    loaded = result_of("short last batch")["loaded"]
    assert "remat.jax.api.jit" in loaded
    assert not [name for name in loaded if name.startswith("remat.tensorflow")]


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("eager", "UnsupportedStep", "was compiled with run_eagerly=True"),
        ("not compiled", "UnsupportedStep", "was compiled with jit_compile=False"),
        ("not compiled by Keras", "UnsupportedStep", "since its layer 'turning' does not support it"),
        ("automatic", "InvalidBudget", "'auto' means a GPU's memory"),
    ],
)
def test_what_is_refused(name, kind, message):
    check_refusal(result_of(name), kind, message)


@pytest.mark.slow
def test_named_layers_are_kept_and_the_rest_is_not():
    """In a smaller last batch, too."""
    check_training(result_of("checkpoints"))
    check_recomputed(result_of("checkpoints"), kept=["odd_1", "odd_3"], dropped=["even_0", "even_2", "even_4"])


@pytest.mark.slow
def test_a_checkpoint_that_the_step_lacks():
    check_refusal(result_of("no such checkpoint"), "UnsupportedStep", "the checkpoint 'made/up' names no value")


@pytest.mark.slow
def test_checkpoints_in_each_micro_batch():
    check_training(result_of("checkpoints in micro-batches"))
    dropped = ["hidden_0", "hidden_1", "hidden_3", "hidden_4"]
    check_recomputed(result_of("checkpoints in micro-batches"), kept=["hidden_2", "hidden_5"], dropped=dropped)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["masked", "masked, checkpoints"])
def test_masks_and_added_losses(name):
    check_training(result_of(name))


@pytest.mark.slow
def test_an_own_train_step_is_kept():
    check_training(result_of("subclassed"))
    limited = result_of("subclassed")["limited"]
    assert limited["doubled"] == pytest.approx([2 * loss for loss in limited["loss"]], rel=1e-5)


@pytest.mark.slow
def test_several_steps_per_execution():
    check_training(result_of("several steps"))


@pytest.mark.slow
def test_a_budget_that_nothing_fits():
    check_refusal(result_of("too small"), "InfeasibleBudget", "no schedule within 1000 bytes")


@pytest.mark.slow
def test_the_smallest_budget_after_a_refusal():
    """The refused step leaves the model as it was."""
    check_training(result_of("retried"))


@pytest.mark.slow
def test_a_budget_in_each_micro_batch():
    """The numbers of full batches, the last and smaller one of them included, in less than pieces alone need."""
    check_training(result_of("micro-batches"))


@pytest.mark.slow  # Conformance asks the same of every front end.
def test_a_percentage_is_one_of_the_whole_batch():
    plan = result_of("micro-batches")["plan"]
    whole_bytes = process().ask("plain_peak_bytes", CASES["micro-batches"])
    assert plan["baseline_peak_bytes"] == pytest.approx(whole_bytes, rel=0.01)
    assert plan["budget_bytes"] == pytest.approx(0.35 * whole_bytes, rel=0.01)


@pytest.mark.slow
def test_the_number_of_micro_batches_is_chosen():
    """The least time within the budget, whatever pair that is, with the numbers of full batches."""
    result, choice = result_of("chosen"), result_of("chosen")["choice"]
    assert result["difference"] < 1e-5
    assert result["limited"]["loss"] == pytest.approx(result["plain"]["loss"], rel=1e-4)
    whole_bytes = process().ask("plain_peak_bytes", CASES["chosen"])
    assert choice["budget_bytes"] == pytest.approx(0.45 * whole_bytes, rel=0.01)
    assert result["plan"]["peak_bytes"] <= choice["budget_bytes"] == result["plan"]["budget_bytes"]
    assert choice["counts"][:4] == [1, 2, 3, 4]
    assert choice["times_are_measured"]
    assert re.search("the least (predicted|measured) time", choice["text"])


@pytest.mark.thorough
def test_slices_and_early_updates():
    result = result_of("split")
    assert "error" not in result, result
    assert result["difference"] < 1e-5
    assert result["limited"]["loss"] == pytest.approx(result["plain"]["loss"], rel=1e-4)
    plan = result["plan"]
    assert plan["slices"] > 1
    assert plan["moved"] > 0
    assert plan["peak_bytes"] <= plan["budget_bytes"] < plan["baseline_peak_bytes"]


@pytest.mark.thorough
def test_a_micro_batch_runs_in_slices():
    """The last batch has pieces of two other sizes."""
    result = result_of("split in pieces")
    assert "error" not in result, result
    assert result["difference"] < 1e-5
    plan = result["plan"]
    assert plan["slices"] > 1
    assert plan["peak_bytes"] <= plan["budget_bytes"] <= 0.25 * plan["baseline_peak_bytes"] + 1


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["all levers", "micro-batches only"])
def test_the_number_of_micro_batches_as_a_lever(name):
    result = result_of(name)
    assert "error" not in result, result
    assert result["difference"] < 1e-5
    assert result["plan"]["peak_bytes"] <= result["choice"]["budget_bytes"] == result["plan"]["budget_bytes"]
    if name == "micro-batches only":
        assert result["choice"]["micro_batches"] > 1
        assert result["plan"]["recomputed"] == 0


@pytest.mark.thorough
def test_what_recomputes_is_timed_with_its_plan():
    """By a clock for which every planned step takes a second the whole batch is as quick as any: the fewest win."""
    choice = process().ask("choose_as_if_all_took_a_second")
    assert choice["recomputes"]
    assert (choice["micro_batches"], choice["timed_s"]) == (1, 1.0)
    assert "1 micro-batch, the least measured time" in choice["text"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "reason"),
    [("chosen, coupled", "exact, where micro-batches would change"), ("chosen, own step", "the only possibility")],
)
def test_the_batch_stays_whole_where_micro_batches_are_inexact(name, reason):
    check_training(result_of(name))
    assert result_of(name)["choice"]["micro_batches"] == 1
    assert not [said for said in result_of(name)["warnings"] if "is not the same as full batches" in said]
    assert reason in result_of(name)["choice"]["text"]


@pytest.mark.slow
def test_coupled_samples_in_micro_batches_are_warned_of_once():
    """Of the number that was chosen, not of those that were tried."""
    count = result_of("chosen, coupled, tight")["choice"]["micro_batches"]
    said = [one for one in result_of("chosen, coupled, tight")["warnings"] if "is not the same as full batches" in one]
    assert count > 1
    assert [one.partition(" ")[0] for one in said] == [f"micro_batches={count}"]


@pytest.mark.slow
def test_what_fits_is_left_alone():
    assert result_of("chosen, fits")["choice"]["counts"] == [1]
    assert result_of("chosen, fits")["plan"]["recomputed"] == 0


def test_micro_batches_without_a_budget():
    result = result_of("micro-batches alone")
    assert "error" not in result, result
    assert result["difference"] < 1e-5
    assert result["plan"] is None
    assert result["peaks"]["limited"] < 0.6 * result["peaks"]["plain"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["batches", "units"])
def test_several_devices(name):
    """Batches, or layers as well, in parts: sums over the devices are those of plain training within each's budget."""
    check_training(result_of(name))


@pytest.mark.slow
def test_the_smallest_budget_of_several_devices():
    """It is a peak that a program has, not the mark of one that was refused for what it sends."""
    check_refusal(result_of("too small on units"), "InfeasibleBudget", "no schedule within 1000 bytes")
    assert "TiB" not in result_of("too small on units")["message"]


@pytest.mark.slow
def test_micro_batches_over_several_devices_are_refused():
    check_refusal(result_of("in micro-batches"), "UnsupportedStep", "where micro_batches are not supported")


@pytest.mark.thorough
def test_checks_compare_with_plain_training():
    # Under JAX Keras refuses what draws from its own generator.
    left_out = ["test_what_draws_other_numbers_each_time_cannot_be_compared"]
    check("jax", left_out, CHECKS, JAX_PLATFORMS="cpu", XLA_FLAGS="")
