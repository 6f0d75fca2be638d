"""``gradients``: the peaks of networks that its predecessors made claims about, measured in processes of their own."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from worker_process import WorkerProcess, worker

MIB = 1 << 20
KINDS = ["function", pytest.param("session", marks=pytest.mark.slow)]
SLOWLY = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("function", "session")]


WORKER = Path(__file__).parent / "gradients_worker.py"
WAYS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "memory": {"checkpoints": "memory"},
    "collection": {"checkpoints": "collection"},
    "speed": {"checkpoints": "speed"},
    "13%": {"budget": "13%", "planner": "peak_greedy"},
    "30%": {"budget": "30%", "planner": "peak_greedy"},
    "45%": {"budget": "45%", "planner": "peak_greedy"},
    "45% in 30 s": {"budget": "45%", "time_limit_s": 30.0},
}


@functools.cache
def measured(network: str, kind: str, *ways: str) -> dict[str, dict[str, Any]]:
    asked = {way: WAYS[way] for way in ways}
    if network == "two_devices":
        own = WorkerProcess(WORKER)
        found: dict[str, dict[str, Any]] = own.ask("measured_on_two_devices", network, kind, asked)
        own.close()
        return found
    found = worker(WORKER).ask("measured", network, kind, asked)
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_chain_of_a_hundred(kind: str) -> None:
    found = measured("chain", kind, "plain", "memory", "13%", "collection", "speed")
    assert found["plain"]["peak_bytes"] >= 100 * MIB
    assert found["memory"]["peak_bytes"] <= 19 * MIB
    # The rule holds 16 or 17 tensors of a MiB; a budget goes below it.
    assert found["13%"]["peak_bytes"] <= found["13%"]["budget_bytes"] < 0.9 * found["memory"]["peak_bytes"]
    # Ten checkpoints and the ten tensors between two of them, with what a step always needs.
    assert found["collection"]["peak_bytes"] <= 25 * MIB
    assert found["speed"]["recomputed"] > 0
    assert max(outcome["difference"] for outcome in found.values()) == 0.0


@pytest.mark.parametrize("kind", SLOWLY)
def test_residual_chain_of_a_hundred(kind: str) -> None:
    found = measured("residual_chain", kind, "plain", "memory")
    assert found["plain"]["peak_bytes"] >= 100 * MIB
    assert found["memory"]["peak_bytes"] <= 19 * MIB
    assert found["memory"]["difference"] <= 1e-6


@pytest.mark.parametrize("network", ["u_net", pytest.param("dense_net", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_networks_without_articulation_points(network: str, kind: str) -> None:
    found = measured(network, kind, "plain", "45%")
    assert found["45%"]["peak_bytes"] <= 0.5 * found["plain"]["peak_bytes"]
    assert found["45%"]["difference"] <= 1e-6


@pytest.mark.parametrize("kind", SLOWLY)
def test_half_of_a_thin_u_net(kind: str) -> None:
    """One activation per level: gradients of the skips are as many as the skips, and are themselves made again."""
    found = measured("thin_u_net", kind, "plain", "45% in 30 s")
    assert found["45% in 30 s"]["peak_bytes"] <= 0.5 * found["plain"]["peak_bytes"]
    assert found["45% in 30 s"]["difference"] <= 1e-6


@pytest.mark.parametrize("kind", SLOWLY)
def test_two_towers(kind: str) -> None:
    found = measured("two_towers", kind, "plain", "memory")
    assert found["memory"]["peak_bytes"] <= 0.25 * found["plain"]["peak_bytes"]
    assert found["memory"]["difference"] <= 1e-6


@pytest.mark.parametrize("kind", SLOWLY)
def test_operations_on_two_devices_are_recomputed_where_they_ran(kind: str) -> None:
    found = measured("two_devices", kind, "plain", "memory", "30%")
    assert found["plain"]["peak_bytes"] >= 100 * MIB
    for way in ("memory", "30%"):
        copies = found[way]["copies_by_device"]
        assert set(copies) == {"CPU:0", "CPU:1"}
        assert sum(copies.values()) == found[way]["recomputed"]
        assert found[way]["peak_bytes"] <= 0.3 * found["plain"]["peak_bytes"]
        assert found[way]["difference"] == 0.0
