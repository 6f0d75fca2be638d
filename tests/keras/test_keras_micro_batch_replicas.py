"""Micro-batches on two replicas: the numbers of plain training under the same strategy, one reduction per update."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from accumulation import SMALLEST_SCALE

WORKER = Path(__file__).parent / "mirrored_worker.py"


@pytest.fixture(scope="module")
def trained():
    """Logical devices have to be made before TensorFlow starts, so in a process of its own."""
    done = subprocess.run(
        [sys.executable, str(WORKER)],
        capture_output=True,
        text=True,
        timeout=3000,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("count", ["3", "7"])
@pytest.mark.parametrize("case", ["classes", "masked", "uneven"])
def test_the_numbers_of_plain_training(trained, case, count):
    plain, found = trained[case]["1"], trained[case][count]
    assert found["history"].keys() == plain["history"].keys()
    for name, values in plain["history"].items():
        np.testing.assert_allclose(found["history"][name], values, rtol=1e-5, err_msg=name)
    for one, other in zip(found["variables"], plain["variables"], strict=True):
        scale = max(SMALLEST_SCALE, np.max(np.abs(other)))
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * scale)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["classes", "masked"])
def test_replicas_reduce_once(trained, case):
    """As often, and as many tensors each time, as without micro-batches."""
    assert trained[case]["1"]["reductions"]
    assert trained[case]["3"]["reductions"] == trained[case]["1"]["reductions"]
    assert trained[case]["7"]["reductions"] == trained[case]["1"]["reductions"]
