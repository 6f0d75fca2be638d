"""A tape inside of ``strategy.run`` on two replicas of one process: each device's budget, the plain run's numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from worker_process import worker

WORKER = Path(__file__).parent / "mirrored_worker.py"
GREEDY = {"planner": "peak_greedy"}

pytestmark = pytest.mark.thorough  # The process that all tests ask takes 10 s to start.


@pytest.fixture(scope="module")
def replicas():
    """Logical devices have to be made before TensorFlow starts, so in a process of its own."""
    return worker(WORKER)


@pytest.fixture(scope="module")
def plain(replicas):
    return replicas.ask("trained")


@pytest.fixture(scope="module")
def planned(replicas):
    return replicas.ask("trained_by_a_plan", {"budget": "78%", **GREEDY})


def test_numbers_are_those_of_the_plain_run_to_the_bit(plain, planned):
    for found in planned:
        assert found["losses"] == plain["losses"]
        assert found["weights"] == plain["weights"]


def test_each_replica_recomputes_on_its_own_device(planned):
    for found in planned:
        first, second = found["plans"]
        assert first["recomputed"] > 0
        assert first["schedule"] == second["schedule"]
        assert [len(one["devices"]) for one in (first, second)] == [1, 1]
        assert first["devices"] != second["devices"]


def test_collectives_are_those_of_the_plain_run(plain, planned):
    """As many, of the same kind and size, in the same order on each device: none is ever repeated."""
    assert plain["collectives"]
    for found in planned:
        assert found["collectives"] == plain["collectives"]


def test_each_device_keeps_its_budget(planned):
    """Logical CPU devices share one allocator: what is measured is each one's share of it."""
    for found in planned[:1]:
        for plan in found["plans"]:
            assert plan["peak_bytes"] <= plan["budget_bytes"] < plan["plain_bytes"]
            assert 0 < plan["measured_peak_bytes"] <= plan["budget_bytes"]


def test_checkpoints(replicas, plain):
    found = replicas.ask("trained", names_kept=True)
    assert found["weights"] == plain["weights"]
    assert all(plan["recomputed"] > 0 for plan in found["plans"])


@pytest.mark.parametrize(
    ("asked", "how", "said"),
    [
        ({"budget": "60%"}, {"in_xla": True}, "GradientTape plans for 2 replicas, and their step is compiled with XLA"),
        (
            {"budget": "60%", "levers": ["recompute", "split"]},
            {},
            "GradientTape plans for 2 replicas, which do not have the lever 'split'",
        ),
        (
            {"budget": "60%", "levers": ["recompute", "update"]},
            {},
            "GradientTape plans for 2 replicas, which do not have the lever 'update'",
        ),
        (
            {"budget": "60%"},
            {"where": "gradients"},
            "remat.tensorflow.gradients plans for one device, and the step runs on 2 replicas",
        ),
        ({"budget": "60%"}, {"where": "outside"}, "under MirroredStrategy with 2 replicas, outside of strategy.run"),
        ({"budget": 1000, **GREEDY}, {}, "InfeasibleBudget no schedule within 1000 bytes"),
    ],
)
def test_what_is_refused(replicas, asked, how, said):
    assert said in replicas.ask("refused", asked, **how)


def test_a_trace_that_fails_in_a_replica(replicas):
    """The user's own error comes out, and what is planned while it is handled is planned."""
    assert replicas.ask("failing") == [True, 2]
