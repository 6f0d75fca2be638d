"""What every test runs under: quiet frameworks on the CPU, with counters that work."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# TensorFlow counts CPU memory only while oneDNN is on, which is the default on some CPUs only.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

SEARCHED = ("benchmarks", "core", "planners")  # Folders whose tests are about what planners find.


@pytest.fixture(autouse=True)
def smallest_peaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """No test waits for a search that it is not about."""
    from smallest_peaks import quickly_for_a_while

    if request.path.parent.name in SEARCHED:
        yield
    else:
        yield from quickly_for_a_while()


@pytest.fixture(autouse=True, scope="module")
def garbage_of_this_file_only() -> None:
    """What frameworks and earlier files left is not looked through again by every collection of garbage.

    remat collects garbage before it reads a counter. With TensorFlow alone in the process that takes .4 s.
    """
    gc.collect()
    gc.freeze()
