"""Runs the demo's training runs, each in a fresh process, one at a time."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np

from remat.core.errors import RematError
from remat.core.files import read_json, write_json
from remat.core.graph import load_graph
from remat.core.plan import load_plan
from remat.demo.results import FAILURE_FILE, GRAPH_FILE, PLAN_FILE, RESULT_FILE, WEIGHTS_FILE, Run, RunResult

_TIME_LIMIT_S: Final = 900


class DemoFailed(RematError, RuntimeError):
    """A training run of the demo did not come to its end."""


def train(model: str, budget: str | None, *, quick: bool) -> Run:
    """Train one model in a fresh process.

    Args:
        model: "residual" or "transformer".
        budget: as ``remat.keras.limit_memory`` takes it, or None for plain training.
        quick: a small model and few steps.

    Raises:
        DemoFailed: if the process fails or takes too long; the message ends with what it said last.
    """
    what = f"training {model} {'plainly' if budget is None else f'under {budget}'}"
    with tempfile.TemporaryDirectory(prefix="remat-demo-") as name:
        folder = Path(name)
        request = folder / "request.json"
        write_json(request, {"model": model, "budget": budget, "quick": quick})
        try:
            done = subprocess.run(
                [sys.executable, "-m", "remat.demo.worker", str(request), str(folder)],
                env=_environment(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                timeout=_TIME_LIMIT_S,
            )
        except subprocess.TimeoutExpired:
            raise DemoFailed(f"{what} took more than {_TIME_LIMIT_S} s and was stopped") from None
        if (folder / FAILURE_FILE).exists():
            failure: Any = read_json(folder / FAILURE_FILE)
            raise DemoFailed(f"{what}: {failure['error']}")
        if done.returncode or not (folder / RESULT_FILE).exists():
            last = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
            raise DemoFailed(f"{what} ended with exit code {done.returncode}: {last[0]}")
        return _collect(folder)


def _environment() -> dict[str, str]:
    # The counter of CPU memory works with oneDNN only, which is the default on most machines but not on all.
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "1", "KERAS_BACKEND": "tensorflow"}
    return {**os.environ, **quiet}


def _collect(folder: Path) -> Run:
    fields: Any = read_json(folder / RESULT_FILE)
    result = RunResult(**{**fields, "losses": tuple(fields["losses"])})
    with np.load(folder / WEIGHTS_FILE) as archive:
        weights = {name: archive[name] for name in archive.files}
    planned = result.budget is not None
    return Run(
        result,
        weights,
        load_plan(folder / PLAN_FILE) if planned else None,
        load_graph(folder / GRAPH_FILE) if planned else None,
    )
