"""A budget on two replicas of one process: the numbers of plain training under the same strategy, on each device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

WORKER = Path(__file__).parent / "mirrored_worker.py"


@pytest.fixture(scope="module")
def trained():
    """Logical devices have to be made before TensorFlow starts, so in a process of its own."""
    done = subprocess.run([sys.executable, WORKER, "budgets"], capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("case", ["budget", "pieces"])
def test_the_numbers_of_plain_training(trained, case):
    """To rounding: oneDNN fuses other operations where some run again; without it a budget changes no bit."""
    rounding = 1e-5
    plain, found = trained["plain"], trained[case]
    for name, values in plain["history"].items():
        np.testing.assert_allclose(found["history"][name], values, rtol=rounding, err_msg=name)
    for one, other in zip(found["variables"], plain["variables"], strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=rounding * np.max(np.abs(other)))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["budget", "pieces"])
def test_replicas_reduce_once(trained, case):
    assert trained[case]["reductions"] == trained["plain"]["reductions"] > 0


@pytest.mark.slow
def test_each_device_keeps_its_budget(trained):
    recomputed, peak_bytes, budget_bytes, plain_bytes, measured_bytes = trained["budget"]["plan"]
    assert recomputed > 0
    assert peak_bytes <= budget_bytes < plain_bytes
    assert 0 < measured_bytes <= budget_bytes


@pytest.mark.slow
def test_each_device_keeps_its_budget_in_pieces(trained):
    _, peak_bytes, budget_bytes, _, measured_bytes = trained["pieces"]["plan"]
    assert peak_bytes <= budget_bytes
    assert 0 < measured_bytes <= budget_bytes


@pytest.mark.slow
def test_what_is_refused(trained):
    assert trained["refused"]
    for what, said in trained["refused"].items():
        assert f"trains on 2 replicas, for which limit_memory does not have {what}" in said
