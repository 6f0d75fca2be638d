"""Steps over several processes of ``MultiWorkerMirroredStrategy``: one plan, each process' budget, same collectives."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from process_group import answers, ended, started

WORKER = Path(__file__).parent / "ranks_worker.py"
PLANNED = ("planned", "pieces", "planned_pieces")


@pytest.fixture(scope="module")
def two():
    return answers(WORKER, 2, ["plain", "again", *PLANNED, "refused:budget", "refused:step", "refused:infeasible"])


@pytest.fixture(scope="module")
def one():
    """The whole batch in one process."""
    return answers(WORKER, 1, ["plain"])[0]["plain"]


def apart(one, other):
    return max(float(np.abs(np.subtract(a, b)).max()) for a, b in zip(one["weights"], other["weights"], strict=True))


@pytest.mark.thorough
def test_one_plan_for_all(two):
    first, second = (answer["planned"]["plan"] for answer in two)
    assert first["recomputed"] > 0
    assert first["schedule"] == second["schedule"]


@pytest.mark.thorough
def test_each_process_keeps_its_budget(two):
    for answer in two:
        plan = answer["planned"]["plan"]
        assert plan["measured_peak_bytes"] <= plan["budget_bytes"] < plan["plain_bytes"]
        assert plan["measured_peak_bytes"] == pytest.approx(plan["peak_bytes"], rel=0.03)


@pytest.mark.thorough
@pytest.mark.parametrize("case", PLANNED)
def test_weights_after_five_updates(two, one, case):
    """Within what plain runs differ by among themselves, or rounding of sums where the batch is cut."""
    for answer in two:
        noise = max(apart(answer["plain"], answer["again"]), 1e-8)
        assert apart(answer["plain"], answer[case]) <= (4 * noise if case == "planned" else 1e-6)
        assert apart(one, answer[case]) <= 1e-6


@pytest.mark.thorough
@pytest.mark.parametrize("case", PLANNED)
def test_collectives_are_those_of_the_plain_run(two, case):
    """As many, of the same kind and size in the same order: one reduction per update, with micro-batches, too."""
    for answer in two:
        assert answer["plain"]["collectives"]
        assert answer[case]["collectives"] == answer["plain"]["collectives"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("case", "parts"),
    [
        ("refused:budget", ["PlanMismatch ranks 0 and 1", "budget 70%", "budget 80%"]),
        ("refused:step", ["PlanMismatch ranks 0 and 1", "on rank 0, operations", "on rank 1. All processes need"]),
        ("refused:infeasible", ["InfeasibleBudget no schedule within 1000 bytes"]),
    ],
)
def test_one_error_in_all(two, case, parts):
    first, second = (answer[case] for answer in two)
    assert first == second
    assert all(part in first for part in parts), first


@pytest.mark.thorough
def test_a_budget_that_one_process_breaks_is_an_error_in_all():
    first, second = (answer["refused:strict"] for answer in answers(WORKER, 2, ["refused:strict"]))
    assert first == second
    assert "PlanMismatch A step under this plan took 1 TiB" in first


@pytest.mark.slow
def test_a_process_that_plans_nothing_is_named():
    first, second = (answer["refused:silent"] for answer in answers(WORKER, 2, ["refused:silent"]))
    assert second == "planned nothing"
    assert "rank 0 is about to run a planned step, and ranks [1] have planned none in 2 s" in first


@pytest.mark.slow
def test_a_process_that_dies(tmp_path):
    """The survivor ends by the engine's own error; from the user's checkpoint the weights are those unbroken."""
    broken, unbroken = tmp_path / "broken", tmp_path / "unbroken"
    broken.mkdir()
    unbroken.mkdir()
    whole = answers(WORKER, 1, [f"killed:{unbroken}"])[0][f"killed:{unbroken}"]
    case = f"killed:{broken}"
    processes = started(WORKER, 2, [case])
    ready = broken / "ready"
    until = time.monotonic() + 120
    while not ready.exists() and time.monotonic() < until and processes[1].poll() is None:
        time.sleep(0.2)
    os.kill(int(ready.read_text()), signal.SIGKILL)
    (survivor, _, said), (dead, _, _) = ended(processes, 180)
    print(survivor, said[-3000:])
    assert dead == -signal.SIGKILL
    assert survivor != 0
    assert "ended by the test" not in said
    with np.load(broken / "weights.npz") as saved:
        assert int(saved["done"]) == 3
    for answer in answers(WORKER, 2, [case]):
        np.testing.assert_allclose(answer[case], whole, rtol=0, atol=1e-6)
