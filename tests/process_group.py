"""Several processes of one script on this machine, which find each other at a port that was free."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any


def free_port() -> int:
    """A port that nobody listened at just now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def started(
    script: Path, count: int, arguments: Sequence[str], environment: Mapping[str, str] | None = None
) -> list[subprocess.Popen[str]]:
    """Processes ``script PORT COUNT NUMBER ARGUMENTS...``, running."""
    port = str(free_port())
    return [
        subprocess.Popen(
            [sys.executable, str(script), port, str(count), str(number), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        for number in range(count)
    ]


def ended(processes: Sequence[subprocess.Popen[str]], timeout_s: float) -> list[tuple[int, str, str]]:
    """For each process its exit code and what it printed; those that are too slow are ended."""

    def result(process: subprocess.Popen[str]) -> tuple[int, str, str]:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            err += f"\nended by the test after {timeout_s} s"
        return process.returncode, out, err

    # All at once: one that cannot write on is waited for by the others.
    with ThreadPoolExecutor(len(processes)) as threads:
        return list(threads.map(result, processes))


def answers(
    script: Path,
    count: int,
    arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 300,
) -> list[Any]:
    """The JSON in the last line that each process prints.

    Raises:
        AssertionError: if one fails, with what all of them printed.
    """
    results = ended(started(script, count, arguments, environment), timeout_s)
    said = "\n".join(f"process {n}: exit code {code}\n{err[-3000:]}" for n, (code, _, err) in enumerate(results))
    assert all(code == 0 for code, _, _ in results), said
    return [json.loads(out.splitlines()[-1]) for _, out, _ in results]
