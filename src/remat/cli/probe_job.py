"""The processes in which ``remat doctor`` asks a front end what its framework sees.

``probe_in_a_process`` starts one; ``python -m remat.cli.probe_job FOLDER`` is one. A framework that hangs or ends its
process takes nothing else with it.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from remat.cli.console import describe_error, traceback_wanted
from remat.core.files import read_json, write_json
from remat.running.examination import DeviceFacts, Probe
from remat.running.process import JobFailed, answer_job, run_job
from remat.running.supported import Framework

_RESULT_FILE: Final = "result.json"
_TIME_LIMIT_S: Final = 60.0  # A judgement: TensorFlow on a cold disk takes half of it. A probe that is cut off says so.
# A probe must not take a GPU's whole memory from what else runs there.
_ENVIRONMENT: Final = {"TF_FORCE_GPU_ALLOW_GROWTH": "true", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def probe_in_a_process(framework: Framework) -> Probe:
    """What a framework's front end says in a fresh process; a failure is part of the answer."""

    def collect(folder: Path) -> Probe:
        result: Any = read_json(folder / _RESULT_FILE)
        return Probe(tuple(DeviceFacts(**device) for device in result["devices"]), result["onednn"])

    try:
        return run_job(
            "remat.cli.probe_job",
            {"front_end": framework.imported_by},
            collect,
            doing=f"importing {framework.imported_by}",
            time_limit_s=_TIME_LIMIT_S,
            show_log=traceback_wanted(),
            environment=_ENVIRONMENT,
            # What the user's own programs see is asked.
            counters_on=False,
        )
    except JobFailed as error:
        return Probe(error=str(error))


def main() -> int:
    """Ask the front end that the folder on the command line names; returns the exit code."""
    return answer_job(_work, describe_error)


def _work(request: dict[str, Any], folder: Path) -> None:
    module: Any = importlib.import_module(f"{request['front_end']}.probe")
    write_json(folder / _RESULT_FILE, asdict(module.probe()))


if __name__ == "__main__":
    sys.exit(main())
