"""Runs a job in a process of its own, where nothing is left of what ran before: memory, compiled functions, seeds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from remat.core.errors import RematError
from remat.core.files import read_json, write_json

# Files in the folder that the two processes share.
_REQUEST: Final = "request.json"
_FAILURE: Final = "failure.json"
T = TypeVar("T")


class JobFailed(RematError, RuntimeError):
    """A job failed, was killed or took too long; the message says which, with the last line that it wrote."""


def run_job(
    module: str,
    request: Mapping[str, Any],
    collect: Callable[[Path], T],
    *,
    doing: str,
    time_limit_s: float,
    show_log: bool = False,
    environment: Mapping[str, str] | None = None,
    counters_on: bool = True,
) -> T:
    """Run ``python -m module FOLDER`` in a fresh process and collect what it leaves in the folder.

    Args:
        module: a module that calls ``answer_job`` when it is run.
        request: what the job is to do, as JSON.
        collect: reads the results from the folder, which is deleted afterwards.
        doing: the job in words, for messages: "training the plain step".
        time_limit_s: wall seconds after which the job is stopped.
        show_log: does what the job writes to stderr appear? Otherwise only a failure's last line does.
        environment: variables that the job needs, whatever the user's own say.
        counters_on: are memory counters turned on that the user's environment says nothing of?

    Raises:
        JobFailed: if the job fails, is killed or takes too long.
    """
    with tempfile.TemporaryDirectory(prefix="remat-") as name:
        folder = Path(name)
        write_json(folder / _REQUEST, request)
        try:
            done = subprocess.run(
                [sys.executable, "-m", module, str(folder)],
                env={**_environment(counters_on), **(environment or {})},
                stdout=subprocess.DEVNULL,
                stderr=None if show_log else subprocess.PIPE,
                text=True,
                errors="replace",
                timeout=time_limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise JobFailed(f"{doing} took more than {time_limit_s:g} s and was stopped") from None
        if (folder / _FAILURE).exists():
            failure: Any = read_json(folder / _FAILURE)
            raise JobFailed(failure["error"])
        if done.returncode:
            raise JobFailed(f"{doing} {_ending(done.returncode, done.stderr or '')}")
        return collect(folder)


def answer_job(work: Callable[[Any, Path], None], describe: Callable[[BaseException], str] = str) -> int:
    """Do the work that ``run_job`` asked for; the module of a job calls this and exits with the code it returns.

    Args:
        work: takes the request and the folder for the results.
        describe: turns an error into one line for the user.
    """
    folder = Path(sys.argv[1])
    request = json.loads((folder / _REQUEST).read_text(encoding="utf-8"))
    try:
        work(request, folder)
    except (RematError, OSError, ModuleNotFoundError) as error:
        write_json(folder / _FAILURE, {"error": describe(error)})
        return 2
    return 0


def _ending(code: int, said: str) -> str:
    if code < 0:
        name = signal.Signals(-code).name
        hint = "; it may have run out of memory: try a smaller batch" if -code == signal.SIGKILL else ""
        return f"was ended by {name}{hint}"
    last = said.strip().splitlines()[-1:] or ["it said nothing"]
    return f"ended with exit code {code}: {last[0]}"


def _environment(counters_on: bool) -> dict[str, str]:
    # TensorFlow's counter of CPU memory works with oneDNN only, which is the default on some CPUs only.
    counters = {"TF_ENABLE_ONEDNN_OPTS": "1"} if counters_on else {}
    return {"TF_CPP_MIN_LOG_LEVEL": "3", **counters, **os.environ}
