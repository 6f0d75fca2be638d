"""Runs ``step_worker.py`` in a process of its own, each request once per test session."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent


@functools.cache
def outcomes(case: str, how: str, *budgets: str, jit: bool = False) -> list[dict[str, Any]]:
    """What training came to, one entry per budget.

    Args:
        case: a name in ``models.CASES``.
        how: "tape" for ``remat.tensorflow.GradientTape``, "fit" for ``limit_memory``.
        budgets: as the worker takes them.
        jit: compile with XLA?
    """
    command = [sys.executable, _HERE / "step_worker.py", case, how, *budgets, *(["--jit"] if jit else [])]
    environment = {**os.environ, "KERAS_BACKEND": "tensorflow"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=3000, env=environment)
    assert done.returncode == 0, f"{case} {how} {budgets}:\n{done.stderr[-4000:]}"
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def shown(outcome: dict[str, Any]) -> str:
    """One line for failure messages."""
    mb = {name.removesuffix("_bytes"): f"{v / 1e6:.1f} MB" for name, v in outcome.items() if name.endswith("_bytes")}
    return f"{outcome['budget']}: {mb}"
