"""``limit_memory(micro_batches=k)`` on JAX: the tests of the TensorFlow backend, run once more on this one.

The backend of Keras is fixed when it is imported, so they run in a process of their own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "keras"
FILES = (
    "test_keras_micro_batches.py",
    "test_keras_micro_batch_losses.py",
    "test_keras_micro_batch_statistics.py",
    "test_keras_micro_batch_errors.py",
)
# Sparse gradients, missing ones and batches of an unknown size do not exist on JAX; XLA is always on.
NOT_HERE = (
    "not xla and not test_an_embedding and not test_variables_without_a_gradient_stay and not "
    "test_an_unknown_size_that_differs"
)


def run(names, *arguments):
    environment = {**os.environ, "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, *(str(FOLDER / n) for n in names)],
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    (passed,) = re.findall(r"(\d+) passed", done.stdout)
    return int(passed)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_the_whole_contract(name):
    assert run([name], "-m", "not slow", "-k", NOT_HERE) >= 5
