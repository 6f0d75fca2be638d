"""Runs the tests of ``limit_memory(micro_batches=k)``, written for the TensorFlow backend of Keras, on another one.

The backend of Keras is fixed when it is imported, so they run in a process of their own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent / "keras"
FILES = (
    "test_keras_micro_batches.py",
    "test_keras_micro_batch_losses.py",
    "test_keras_micro_batch_statistics.py",
    "test_keras_micro_batch_errors.py",
)


def run(backend: str, name: str, left_out: str, **environment: str) -> int:
    """How many tests of a file passed, none having failed.

    Args:
        backend: of Keras.
        name: one of ``FILES``.
        left_out: what pytest's ``-k`` leaves out.
        environment: further variables.
    """
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-m",
            "not slow",
            "-k",
            left_out,
            FOLDER / name,
        ],
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
        env={**os.environ, "KERAS_BACKEND": backend, **environment},
    )
    assert done.returncode == 0, done.stdout[-4000:]
    (passed,) = re.findall(r"(\d+) passed", done.stdout)
    return int(passed)
