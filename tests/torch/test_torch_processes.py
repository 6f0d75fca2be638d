"""Two processes with gloo: DistributedDataParallel and fully_shard under a plan."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def run(scenario, folder):
    """What each of two processes found."""
    command = [sys.executable, str(HERE / "two_processes.py")]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(folder / "store"), scenario],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=HERE,
        )
        for rank in (0, 1)
    ]
    found = []
    for process in processes:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err[-3000:]
        found.append(json.loads(out.splitlines()[-1]))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["ddp", "ddp_graph", "fsdp", "fsdp_reshard"])
def test_a_plan_over_two_processes(scenario, tmp_path):
    for found in run(scenario, tmp_path):
        assert found["same"]
        assert found["recomputed"] > 0
        assert found.get("departures", 0) == 0
        assert found.get("mode", "eager") == ("graph" if scenario == "ddp_graph" else "eager")
        plain_calls, planned_calls = found["calls"]
        assert planned_calls == plain_calls
        assert plain_calls
        predicted, measured, budget = found["peak"]
        assert measured <= budget
        assert measured == pytest.approx(predicted, rel=0.05)


@pytest.mark.slow
def test_micro_batches_reduce_once(tmp_path):
    for found in run("ddp_micro_batches", tmp_path):
        assert found["difference"] < 1e-5
        assert found["calls"] == [1, 1]
