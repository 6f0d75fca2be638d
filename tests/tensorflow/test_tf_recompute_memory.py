"""``recompute``: peaks measured in processes of their own."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

MB = 1_000_000


@functools.cache
def measured(mode: str, kind: str) -> dict[str, Any]:
    worker = Path(__file__).parent / "recompute_worker.py"
    done = subprocess.run([sys.executable, worker, mode, kind], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    "mode", ["graph", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("eager", "split"))]
)
def test_ten_segments_of_ten(mode: str) -> None:
    plain, found = measured(mode, "plain"), measured(mode, "recompute")
    assert found["sum"] == pytest.approx(plain["sum"], rel=1e-6)
    assert plain["peak_bytes"] - plain["in_use_before_bytes"] >= 100 * MB
    # Twenty tensors, and what the allocator rounds up.
    assert found["peak_bytes"] - found["in_use_before_bytes"] <= 21 * MB


@pytest.mark.slow
def test_forty_thousand_operations_in_two_hundred_segments() -> None:
    found = measured("segments", "recompute")
    assert found["peak_bytes"] <= 420 * found["tensor_bytes"]
