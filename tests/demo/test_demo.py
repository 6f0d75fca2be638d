"""A quick run of the whole demo, through the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from remat import demo
from remat.cli import app
from remat.demo.results import TOLERANCE, Run, weight_difference
from remat.demo.training import of_the_middle_ratio, train
from remat.running.process import JobFailed

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def runs() -> dict[str | None, Run]:
    """A plain and a planned training run of the small model, each in a process of its own."""
    return {budget: train("residual", budget, quick=True) for budget in (None, "60%")}


@pytest.fixture
def trained(runs: dict[str | None, Run], monkeypatch: pytest.MonkeyPatch) -> dict[str | None, Run]:
    """Lets the demo find these runs; a test may put others in their place."""
    found = dict(runs)
    monkeypatch.setattr(demo, "train", lambda model, budget, *, quick: found[budget])
    return found


def quick_demo(out: Path) -> tuple[int, dict[str, object], str]:
    result = CliRunner().invoke(app, ["demo", "--quick", "--out", str(out), "--json"])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, json.loads(result.stdout), result.stderr


@pytest.mark.thorough
def test_the_quick_demo_keeps_its_budget_and_its_numbers(tmp_path: Path, trained: dict[str | None, Run]) -> None:
    out = tmp_path / "a" / "b"
    code, report, _ = quick_demo(out)
    assert code == 0, report
    assert report["passed"] is True
    assert report["failures"] == []
    assert json.loads((out / "demo.json").read_text()) == report
    (model,) = report["models"]  # type: ignore[misc]
    plain, planned = model["runs"]
    assert plain["budget"] is None
    assert planned["budget"] == "60%"
    for line in (plain, planned):
        assert set(line) == {
            "budget", "budget_bytes", "predicted_peak_bytes", "measured_peak_bytes", "prediction_error",
            "step_time_s", "plain_step_time_s", "relative_step_time", "first_step_s", "recomputed_ops",
            "recomputed_runs", "predicted_overhead", "plan_seconds", "final_loss", "final_accuracy",
            "largest_weight_difference", "largest_relative_weight_difference", "losses", "failures",
        }  # fmt: skip
        assert len(line["losses"]) == 4
        assert line["step_time_s"] > 0
        # What the allocator adds is predicted for a typical heap; this step's own may add less.
        assert abs(line["prediction_error"]) < 0.1
    # The budget binds: plain training is far over it, so the check is no formality.
    assert planned["measured_peak_bytes"] <= planned["budget_bytes"] < 0.65 * plain["measured_peak_bytes"]
    assert planned["recomputed_ops"] > 0
    assert plain["recomputed_ops"] == 0
    assert planned["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert planned["largest_weight_difference"] <= 1e-5


def test_every_picture_is_a_png_and_nothing_else_is_left(tmp_path: Path, trained: dict[str | None, Run]) -> None:
    quick_demo(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "demo.json", "residual-loss.png", "residual-memory-60pc.png",
    ]  # fmt: skip
    for path in tmp_path.glob("*.png"):
        assert path.read_bytes().startswith(PNG)
        assert path.stat().st_size < 150_000


def test_the_training_runs_did_train(runs: dict[str | None, Run]) -> None:
    for name, trained in runs[None].weights.items():
        if name.endswith(("moving_mean", "kernel")):
            assert np.any(trained != 0), name
    moved = [v for name, v in runs[None].weights.items() if name.endswith("moving_variance")]
    assert moved
    assert all(np.any(values != 1) for values in moved)


def test_a_measured_peak_over_the_budget_fails_the_demo(tmp_path: Path, trained: dict[str | None, Run]) -> None:
    planned = trained["60%"]
    assert planned.plan is not None
    over = replace(planned.result, measured_peak_bytes=planned.plan.budget_bytes + 1)
    trained["60%"] = replace(planned, result=over)
    code, report, stderr = quick_demo(tmp_path)
    assert code == 1
    assert report["passed"] is False
    assert "residual under 60%" in stderr
    assert "over the budget" in stderr


def test_a_step_is_compared_with_plain_steps_of_the_same_process(
    tmp_path: Path, trained: dict[str | None, Run]
) -> None:
    assert trained["60%"].result.plain_time_s > 0
    result = replace(trained["60%"].result, step_time_s=0.3, plain_time_s=0.2)
    trained["60%"] = replace(trained["60%"], result=result)
    _, report, _ = quick_demo(tmp_path)
    (model,) = report["models"]  # type: ignore[misc]
    assert [line["relative_step_time"] for line in model["runs"]] == [1.0, pytest.approx(1.5)]


@pytest.mark.parametrize("change", [1e-3, np.nan], ids=["moved", "not a number"])
def test_weights_that_differ_fail_the_demo(tmp_path: Path, trained: dict[str | None, Run], change: float) -> None:
    planned = trained["60%"]
    name = next(name for name in planned.weights if name.endswith("moving_variance"))
    weights = {key: values.copy() for key, values in planned.weights.items()}
    weights[name][0] += change
    trained["60%"] = replace(planned, weights=weights)
    code, report, stderr = quick_demo(tmp_path)
    assert code == 1
    assert report["passed"] is False
    assert name in stderr
    assert "float rounding" in stderr


def test_training_with_one_step_more_is_more_than_rounding(runs: dict[str | None, Run]) -> None:
    # A BatchNormalization that was updated once more than it should be, as a careless recomputation would do.
    name = next(name for name in runs[None].weights if name.endswith("moving_variance"))
    after_more = dict(runs[None].weights)
    after_more[name] = 0.9 * after_more[name] + 0.1 * np.mean(after_more[name])
    assert weight_difference(runs[None].weights, after_more).relative > 10 * TOLERANCE


def test_a_change_of_a_few_units_in_the_last_place_is_rounding(runs: dict[str | None, Run]) -> None:
    rounded = {name: values * np.float32(1 + 5e-7) for name, values in runs[None].weights.items()}
    assert 0 < weight_difference(runs[None].weights, rounded).relative < TOLERANCE


def test_runs_of_different_models_cannot_be_compared(runs: dict[str | None, Run]) -> None:
    with pytest.raises(ValueError, match="different models"):
        weight_difference(runs[None].weights, {"other": np.zeros(3)})


@pytest.mark.slow
def test_a_budget_that_no_schedule_keeps_is_named_with_the_smallest_that_does() -> None:
    with pytest.raises(JobFailed, match=r"training residual under 1MiB: .*smallest budget that can be kept is \d+"):
        train("residual", "1MiB", quick=True)


def test_a_process_that_dies_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHOME", "nowhere")
    with pytest.raises(JobFailed, match="training residual plainly ended with exit code"):
        train("residual", None, quick=True)


def test_an_unreadable_budget_ends_with_one_line_and_no_folder(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["demo", "--quick", "--out", str(tmp_path / "x"), "--budget", "0%"])
    assert result.exit_code == 2
    assert "0%" in result.stderr
    assert not (tmp_path / "x").exists()


def test_a_machine_that_changes_its_speed_between_turns_changes_no_ratio() -> None:
    """The medians over all turns would be .12 and .09, as one turn of three shows."""
    turns = [(0.10, 0.09), (0.12, 0.11), (0.12, 0.09)]
    assert of_the_middle_ratio(turns) == (0.10, 0.09)
