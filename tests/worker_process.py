"""One process of its own for many cases of one framework: importing and starting it is paid for once.

A worker script ends with ``serve({"name": function, ...})``. The tests hold one :class:`WorkerProcess` per script for
the whole session and ask it; arguments and answers are JSON.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from smallest_peaks import quickly


class WorkerProcess:
    """A running worker script.

    Args:
        script: the file that is run.
        environment: variables that differ from those of the tests.
    """

    def __init__(self, script: Path, environment: Mapping[str, str] | None = None) -> None:
        self._script = script
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process lives
        self._process = subprocess.Popen(
            [sys.executable, script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        atexit.register(self.close)

    def ask(self, function: str, *args: Any, **kwargs: Any) -> Any:
        """What a function of the worker answers.

        Raises:
            AssertionError: if it raised, with its traceback, or if the process ended.
        """
        request, answers = self._process.stdin, self._process.stdout
        assert request is not None
        assert answers is not None
        if self._process.poll() is None:
            print(json.dumps([function, args, kwargs]), file=request, flush=True)
        line = answers.readline()
        if not line:
            self._log.seek(0)
            raise AssertionError(f"{self._script.name} ended at {function}{args}:\n{self._log.read()[-4000:]}")
        answer = json.loads(line)
        assert "error" not in answer, f"{self._script.name}, {function}{args}:\n{answer['error']}"
        return answer["value"]

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


@functools.cache
def worker(script: Path, **environment: str) -> WorkerProcess:
    """The one process of a script in this session of tests."""
    return WorkerProcess(script, environment)


def serve(functions: Mapping[str, Callable[..., Any]], *, as_users: bool = False) -> None:
    """Answer requests until the tests end. What the functions print goes to the log, not into the answers.

    Args:
        functions: by name.
        as_users: are smallest peaks searched for as hard as users have them? See ``smallest_peaks``.
    """
    if not as_users:
        quickly()
    gc.freeze()  # A collection of garbage then leaves out the framework, which is most of its time.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        name, args, kwargs = json.loads(line)
        try:
            answer = {"value": functions[name](*args, **kwargs)}
        except Exception:
            answer = {"error": traceback.format_exc()[-4000:]}
        print(json.dumps(answer), file=answers, flush=True)
