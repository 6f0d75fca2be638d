"""Processes: two that train together through the Fleet-shaped entry, and what may be imported in which order."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import remat

SCRIPT = Path(__file__).with_name("two_processes.py")
ROOT = str(Path(remat.__file__).parents[1])


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def run_two(kind, how, folder):
    """What the two say. They write to files: a full pipe that nobody reads would stop both."""
    ends = [f"127.0.0.1:{port}" for port in free_ports(2)]
    paths = [folder / f"{kind} {how} {rank}" for rank in range(2)]
    with contextlib.ExitStack() as files:
        processes = [
            subprocess.Popen(
                [sys.executable, str(SCRIPT), kind, how],
                env={
                    **os.environ,
                    "PYTHONPATH": ROOT,
                    "PADDLE_TRAINER_ID": str(rank),
                    "PADDLE_TRAINERS_NUM": "2",
                    "PADDLE_TRAINER_ENDPOINTS": ",".join(ends),
                    "PADDLE_CURRENT_ENDPOINT": ends[rank],
                    "PADDLE_DISTRI_BACKEND": "gloo",
                },
                stdout=files.enter_context(paths[rank].open("w")),
                stderr=subprocess.STDOUT,
            )
            for rank in range(2)
        ]
    found = []
    try:
        for process, path in zip(processes, paths, strict=True):
            process.wait(timeout=120)
            said = path.read_text()
            assert process.returncode == 0, said[-3000:]
            found.append(json.loads(said.partition("RESULT ")[2].splitlines()[0]))
    finally:
        for process in processes:
            process.kill()
    return found


@pytest.mark.thorough  # Four processes each, all of which import Paddle.
@pytest.mark.parametrize("kind", ["fleet", "amp", "layers"])
def test_two_processes_train_alike_and_to_the_bit(kind, tmp_path):
    plain, planned = (run_two(kind, how, tmp_path) for how in ("plain", "planned"))
    assert [one["extra"] for one in plain] == [0, 0]
    assert all(one["extra"] > 0 for one in planned)
    assert plain[0]["losses"] != plain[1]["losses"]
    assert len({one["digest"] for one in (*plain, *planned)}) == 1
    assert [one["losses"] for one in planned] == [one["losses"] for one in plain]
    for before, after in zip(plain, planned, strict=True):
        assert after["peak_bytes"] < before["peak_bytes"]


# A module of TensorFlow's name stands for it: what counts is who was imported first, and the real one takes seconds.
FAKE = "import sys, types; sys.modules['tensorflow'] = types.ModuleType('tensorflow'); "


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (FAKE + "import remat.paddle", "WrongImportOrder"),
        (
            FAKE + "import remat; remat.paddle",
            "put `import paddle` (or `import remat.paddle`) above `import tensorflow`",
        ),
        ("import paddle; " + FAKE + "import remat.paddle; print('imported')", "imported"),
        pytest.param(
            "import remat.paddle; " + FAKE + "import remat.paddle.recompute; print('imported')",
            "imported",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_order_of_imports(code, said):
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": ROOT},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert said in done.stdout + done.stderr
    assert done.returncode == (0 if said == "imported" else 1)
