"""The processes in which ``remat measure`` and ``remat check`` run a user's step.

``run_step_job`` starts one; ``python -m remat.cli.step_job FOLDER`` is one.
"""

from __future__ import annotations

import importlib
import os
import random
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from remat.cli.console import describe_error, traceback_wanted
from remat.cli.options import Source
from remat.cli.source import computing_framework, workload_from_source
from remat.core.files import read_json, write_json
from remat.core.plan import Plan, load_plan
from remat.running.calibration import cached_bytes_per_s, op_samples
from remat.running.check import check_workload
from remat.running.cost_model import DEVICE_VARIABLE, MEASURED, calibrate, save_measured
from remat.running.fresh_memory import measured_bytes_per_s
from remat.running.machine import memory_bytes
from remat.running.process import answer_job, run_job
from remat.running.step_time import cache_bytes
from remat.running.workload import Workload

_RESULT_FILE: Final = "result.json"
_PLAN_FILE: Final = "plan.json.gz"
_TIME_LIMIT_S: Final = 3600.0  # Nobody waits an hour for a check: a process that runs so long hangs.
_SEED: Final = 11  # Any number does, as long as the plain and the planned process begin with the same.


def run_step_job(job: str, source: Source, *, doing: str, **wanted: Any) -> tuple[dict[str, Any], Plan | None]:
    """Do a job with the step of a source in a fresh process.

    Args:
        job: "train", "check" or "calibrate".
        source: a callable that returns a step.
        doing: the job in words, for error messages.
        wanted: ``budget`` and ``steps``, where the job needs them.

    Returns:
        The job's result, and the plan that it trained by; None for plain training and the other jobs.

    Raises:
        JobFailed: if the process fails, is killed or takes more than an hour.
    """

    def collect(folder: Path) -> tuple[dict[str, Any], Plan | None]:
        result: Any = read_json(folder / _RESULT_FILE)
        plan = load_plan(folder / _PLAN_FILE) if (folder / _PLAN_FILE).exists() else None
        return result, plan

    return run_job(
        "remat.cli.step_job",
        {"job": job, "source": asdict(source), **wanted},
        collect,
        doing=doing,
        time_limit_s=_TIME_LIMIT_S,
        show_log=traceback_wanted(),
    )


def main() -> int:
    """Do the job that the folder on the command line asks for; returns the exit code."""
    return answer_job(_work, describe_error)


def _work(request: dict[str, Any], folder: Path) -> None:
    # Keras draws its default seeds from these: the plain and the planned process then begin with the same weights.
    random.seed(_SEED)
    np.random.seed(_SEED)
    source = Source(**request["source"])
    if source.device is not None:
        os.environ[DEVICE_VARIABLE] = source.device
    workload = workload_from_source(source)
    jobs = {"train": _train, "check": _check, "calibrate": _calibrate}
    write_json(folder / _RESULT_FILE, jobs[request["job"]](request, workload, folder))


def _train(request: dict[str, Any], workload: Workload, folder: Path) -> dict[str, Any]:
    training = workload.train(request["budget"], request["steps"])
    if training.plan is not None:
        training.plan.save(folder / _PLAN_FILE)
    return {
        "framework": workload.framework,
        "peak_bytes": training.peak_bytes,
        "step_time_s": training.step_time_s,
        "losses": list(training.losses),
    }


def _check(request: dict[str, Any], workload: Workload, folder: Path) -> dict[str, Any]:
    result = check_workload(workload, request["budget"], request["steps"])
    return {**asdict(result), "passed": result.passed, "verdict": result.verdict, "framework": workload.framework}


def _calibrate(request: dict[str, Any], workload: Workload, folder: Path) -> dict[str, Any]:
    framework = computing_framework(workload)
    ops: Any = importlib.import_module(f"remat.{framework}.timed_ops").TimedOps()
    samples = op_samples(ops)
    profile = calibrate(samples, f"measured by {framework}", memory_bytes=memory_bytes())
    cached = cached_bytes_per_s(samples, cache_bytes())
    profile = replace(profile, fresh_bytes_per_s=measured_bytes_per_s(), cached_bytes_per_s=cached)
    path = save_measured(profile)
    graph = workload.graph(MEASURED)
    return {
        "path": str(path),
        "samples": [asdict(sample) for sample in samples],
        "flops_per_s": profile.flops_per_s["float32"],
        "bytes_per_s": profile.bytes_per_s,
        "overhead_s": profile.overhead_s,
        "fresh_bytes_per_s": profile.fresh_bytes_per_s,
        "cached_bytes_per_s": profile.cached_bytes_per_s,
        "plain_time_s": graph.time_s,
    }


if __name__ == "__main__":
    sys.exit(main())
