"""What ``remat measure`` and ``remat check`` do in processes of their own: ``python -m remat.cli.job FOLDER``."""

from __future__ import annotations

import importlib
import os
import random
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from remat.cli.console import describe_error
from remat.cli.options import Source
from remat.cli.source import workload_from_source
from remat.core.files import write_json
from remat.running.calibration import op_samples
from remat.running.check import check_workload
from remat.running.cost_model import DEVICE_VARIABLE, MEASURED, calibrate, save_measured
from remat.running.machine import memory_bytes
from remat.running.process import answer_job
from remat.running.workload import Workload

RESULT_FILE = "result.json"
PLAN_FILE = "plan.json.gz"
_SEED = 11
# Which front end's operations are timed for a step of each framework.
_KERNELS = {"jax": "jax", "tensorflow": "tensorflow", "torch": "torch"}


def main() -> int:
    """Do one job."""
    return answer_job(_work, describe_error)


def _work(request: dict[str, Any], folder: Path) -> None:
    # Keras draws its default seeds here: the plain and the planned process then begin with the same weights.
    random.seed(_SEED)
    np.random.seed(_SEED)
    source = Source(**request["source"])
    if source.device is not None:
        os.environ[DEVICE_VARIABLE] = source.device
    workload = workload_from_source(source)
    jobs = {"train": _train, "check": _check, "calibrate": _calibrate}
    write_json(folder / RESULT_FILE, jobs[request["job"]](request, workload, folder))


def _train(request: dict[str, Any], workload: Workload, folder: Path) -> dict[str, Any]:
    training = workload.train(request["budget"], request["steps"])
    if training.plan is not None:
        training.plan.save(folder / PLAN_FILE)
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
    framework = _computing_framework(workload)
    kernels: Any = importlib.import_module(f"remat.{_KERNELS[framework]}.kernels").Kernels()
    samples = op_samples(kernels)
    profile = calibrate(samples, f"measured by {framework}", memory_bytes=memory_bytes())
    path = save_measured(profile)
    graph = workload.graph(MEASURED)
    return {
        "path": str(path),
        "samples": [asdict(sample) for sample in samples],
        "flops_per_s": profile.flops_per_s["float32"],
        "bytes_per_s": profile.bytes_per_s,
        "overhead_s": profile.overhead_s,
        "plain_time_s": graph.time_s,
    }


def _computing_framework(workload: Workload) -> str:
    if workload.framework != "keras":
        return workload.framework
    import keras

    return str(keras.backend.backend())


if __name__ == "__main__":
    sys.exit(main())
