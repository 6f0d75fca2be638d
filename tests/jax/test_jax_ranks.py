"""Steps over several processes of ``jax.distributed``: one plan, the budget of each device, no collective repeated."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from process_group import answers, ended, started

WORKER = Path(__file__).parent / "ranks_worker.py"
ONE_DEVICE = {"XLA_FLAGS": ""}
KINDS = ("data", "tensor", "full")
DISAGREEMENTS = ("differ:budget", "differ:step", "differ:infeasible")


@pytest.fixture(scope="module")
def two():
    return answers(WORKER, 2, [*KINDS, *DISAGREEMENTS], ONE_DEVICE)


@pytest.fixture(scope="module")
def one():
    """The whole batch in one process."""
    return answers(WORKER, 1, ["data"], ONE_DEVICE)[0]["data"]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_one_plan_for_all(two, kind):
    first, second = (answer[kind] for answer in two)
    assert first["recomputed"] > 0
    assert first["schedule"] == second["schedule"]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_each_device_keeps_its_budget(two, kind):
    for answer in two:
        plain_bytes, planned_bytes = answer[kind]["peaks"]
        assert planned_bytes <= answer[kind]["budget_bytes"] < plain_bytes
        assert planned_bytes == pytest.approx(answer[kind]["predicted_bytes"], rel=0.03)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_collectives_are_those_of_the_plain_step(two, kind):
    for answer in two:
        plain, planned = answer[kind]["sent"]
        assert 0 < planned == plain


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_weights_after_five_updates(two, one, kind):
    for answer in two:
        assert answer[kind]["difference"] <= 1e-6
        np.testing.assert_allclose(answer[kind]["weights"], one["weights"], rtol=0, atol=2e-6)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("case", "parts"),
    [
        ("differ:budget", ["PlanMismatch ranks 0 and 1", "budget 75%", "budget 80%"]),
        ("differ:step", ["PlanMismatch ranks 0 and 1", "on rank 0, operations", "on rank 1. All processes need"]),
        ("differ:infeasible", ["InfeasibleBudget no schedule within 1000 bytes"]),
    ],
)
def test_one_error_in_all(two, case, parts):
    first, second = (answer[case] for answer in two)
    assert first == second
    assert all(part in first for part in parts), first


@pytest.mark.thorough
def test_a_process_that_plans_nothing_is_named():
    first, second = answers(WORKER, 2, ["differ:silent"], ONE_DEVICE)
    assert second["differ:silent"] == "planned nothing"
    assert "rank 0 is about to run a planned step, and ranks [1] have planned none in 2 s" in first["differ:silent"]


@pytest.mark.slow
def test_four_processes(one):
    for answer in answers(WORKER, 4, ["data", "full"], ONE_DEVICE):
        for kind in ("data", "full"):
            assert answer[kind]["recomputed"] > 0
            assert answer[kind]["sent"][0] == answer[kind]["sent"][1]
            np.testing.assert_allclose(answer[kind]["weights"], one["weights"], rtol=0, atol=2e-6)


@pytest.mark.slow
def test_a_process_that_dies(tmp_path):
    """The survivor ends by the engine's own error; from the user's checkpoint the weights are those unbroken."""
    broken, unbroken = tmp_path / "broken", tmp_path / "unbroken"
    broken.mkdir()
    unbroken.mkdir()
    whole = answers(WORKER, 1, [f"killed:{unbroken}"], ONE_DEVICE)[0][f"killed:{unbroken}"]
    case = f"killed:{broken}"
    processes = started(WORKER, 2, [case], ONE_DEVICE)
    ready = broken / "ready"
    until = time.monotonic() + 120
    while not ready.exists() and time.monotonic() < until and processes[1].poll() is None:
        time.sleep(0.2)
    os.kill(int(ready.read_text()), signal.SIGKILL)
    (survivor, _, said), (dead, _, _) = ended(processes, 120)
    print(survivor, said[-2000:])
    assert dead == -signal.SIGKILL
    assert survivor != 0
    assert "ended by the test" not in said
    with np.load(broken / "weights.npz") as saved:
        assert int(saved["done"]) == 3
    restarted = answers(WORKER, 2, [case], ONE_DEVICE)
    for answer in restarted:
        np.testing.assert_allclose(answer[case], whole, rtol=0, atol=2e-6)
    assert json.dumps(restarted[0][case]) == json.dumps(restarted[1][case])
