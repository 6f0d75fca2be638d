"""The check's verdicts, on steps made up of numbers: it must see each way in which a planned step can go wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pytest

import remat
from remat.core.plan import Plan
from remat.running.check import check_workload
from remat.running.workload import Array, Training, nudge
from remat.testing import chain

WEIGHTS = np.linspace(0.1, 1, 20, dtype=np.float32)


def a_plan() -> Plan:
    return remat.plan(chain(12, size_bytes=1000), "80%", "sqrt_n")


@dataclass
class Step:
    """A step whose planned form differs by what ``wrong`` holds, by name of the value."""

    wrong: Mapping[str, float] = field(default_factory=dict)
    peak_bytes: int = 1
    random_losses: bool = False
    framework: str = "made up"
    batch_size: int | None = None
    restored: bool = False

    def _values(self, planned: bool, nudged: bool) -> dict[str, Array]:
        weights = nudge(WEIGHTS, np.random.default_rng(1)) if nudged else WEIGHTS
        values: dict[str, Array] = {
            "gradient/w": weights * 0.3,
            "weight/w": weights * 0.9,
            "slot/m": weights * 0.1,
            "statistic/mean": weights * 2,
            "state/seed": np.array([7, 3]),
            "losses": np.array([1.5, 1.25], dtype=np.float32),
        }
        if planned:
            for name, share in self.wrong.items():
                values[name] = values[name] + np.asarray(share * np.max(values[name])).astype(values[name].dtype)
        return values

    def graph(self, device: str) -> remat.Graph:
        return chain(12)

    def train(self, budget: int | str | None, steps: int, *, nudged: bool = False) -> Training:
        values = self._values(budget is not None, nudged)
        losses = values.pop("losses") * (2 if nudged and self.random_losses else 1)
        plan = None if budget is None else a_plan()
        peak_bytes = 10_000 if plan is None else self.peak_bytes
        return Training(peak_bytes, 0.1, tuple(map(float, losses)), values, plan)

    def gradients(self, budget: int | str | None, *, nudged: bool = False) -> Mapping[str, Array]:
        values = self._values(budget is not None, nudged)
        return {"gradient/w": values["gradient/w"]}

    def restore(self) -> None:
        self.restored = True


def test_equal_steps_pass_and_the_verdict_tells_both_peaks() -> None:
    result = check_workload(Step())

    assert result.passed
    assert str(result).startswith("equal: largest difference 0.0e+00")
    assert "peak 9.77 KiB plain, 1 B planned" in result.verdict
    assert [one.what for one in result.comparisons] == [
        "gradients",
        "weights",
        "optimizer state",
        "running statistics",
        "losses",
        "random states and counters",
    ]


def test_rounding_passes() -> None:
    assert check_workload(Step({"gradient/w": 1e-7, "weight/w": 1e-7})).passed


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"gradient/w": 1e-3}, "gradients by 0.001 (w); the losses agree, so what was recomputed is not"),
        ({"gradient/w": 1e-3, "losses": 0.1}, "the losses differ, too: the planned forward pass"),
        ({"gradient/w": 1e-3, "state/seed": 1.0}, "random states and counters by 1 (seed); a seed or a counter moved"),
        ({"statistic/mean": 1e-3}, "running statistics by 0.001 (mean); the gradients agree, so a statistic"),
        ({"weight/w": 1e-3, "slot/m": 1e-3}, "weights by 0.001 (w); the gradients agree, so the update itself differs"),
        ({"gradient/w": float("nan")}, "gradients by inf (w)"),
    ],
)
def test_each_difference_is_found_and_explained(wrong: Mapping[str, float], says: str) -> None:
    result = check_workload(Step(wrong))

    assert not result.passed
    assert result.verdict.startswith("different: ")
    assert says in result.verdict


def test_exceeded_budget_does_not_pass() -> None:
    result = check_workload(Step(peak_bytes=10**6))

    assert not result.passed
    assert result.verdict.startswith("equal, but over the budget: measured 976.56 KiB of ")


def test_training_that_is_random_is_undecided() -> None:
    result = check_workload(Step(random_losses=True))

    assert not result.passed
    assert result.verdict.startswith("undecided: plain training gives other numbers each time")


def test_everything_is_set_back_also_after_an_error() -> None:
    step, failing = Step(), Step({"no such value": 1.0})

    check_workload(step)
    with pytest.raises(KeyError, match="no such value"):
        check_workload(failing)

    assert step.restored
    assert failing.restored


def test_no_step_is_refused() -> None:
    with pytest.raises(ValueError, match="steps=0 compares nothing"):
        check_workload(Step(), steps=0)


def test_nudge_moves_floats_by_half_a_rounding_and_integers_not_at_all() -> None:
    random = np.random.default_rng(0)
    moved = nudge(np.full(1000, 1.5, np.float32), random)

    assert moved.dtype == np.float32
    assert 0 < np.abs(moved - 1.5).max() <= np.finfo(np.float32).eps
    assert np.array_equal(nudge(np.arange(5), random), np.arange(5))
