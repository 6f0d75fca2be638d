"""Runs tests of ``limit_memory`` that are written for the TensorFlow backend of Keras on another one.

The backend of Keras is fixed when it is imported, so they run in a process of their own: one for all files.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

FOLDER = Path(__file__).parent / "keras"
CHECKS = ("test_keras_check.py", "test_keras_check_first_step.py", "test_keras_masks.py")
MICRO_BATCHES = (
    "test_keras_micro_batches.py",
    "test_keras_micro_batch_losses.py",
    "test_keras_micro_batch_statistics.py",
    "test_keras_micro_batch_errors.py",
)


def check(backend: str, left_out: Collection[str], files: Collection[str] = MICRO_BATCHES, **environment: str) -> None:
    """Run every quick test of the files but those left out, and see that each has run and passed.

    Args:
        backend: of Keras.
        left_out: names of tests, or parts of their names, that do not exist on this backend.
        files: those with the tests.
        environment: further variables.
    """
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-v",
            "-p",
            "no:cacheprovider",
            "-m",
            "not slow",
            *(["-k", " and ".join(f"not {name}" for name in left_out)] if left_out else []),
            *(FOLDER / name for name in files),
        ],
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
        env={**os.environ, "KERAS_BACKEND": backend, **environment},
    )
    assert done.returncode == 0, done.stdout[-4000:]
    passed = set(re.findall(r"::(test_\w+).* PASSED", done.stdout))  # Names of cases may have spaces in them.
    assert passed == {name for file in files for name in _quick_tests(file)} - set(left_out)


def _quick_tests(file: str) -> list[str]:
    text = (FOLDER / file).read_text()
    found = re.findall(r"^((?:@.*\n(?:[ )\]].*\n)*)*)def (test_\w+)", text, re.MULTILINE)
    return [name for decorators, name in found if not decorators.startswith("@pytest.mark.slow\n")]
