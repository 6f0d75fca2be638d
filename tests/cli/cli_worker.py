"""A process of one framework that runs commands, each as the ``remat`` script would."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1]))
from remat.cli import app
from worker_process import serve


def run(folder: str, *args: str) -> dict[str, object]:
    """Run a command in a folder; its exit code and what it writes."""
    os.chdir(folder)
    done = CliRunner().invoke(app, args, env={"REMAT_TRACEBACK": None})
    if keras := sys.modules.get("keras"):
        keras.backend.clear_session()
    gc.collect()  # The memory of one command must not count as resident in the next.
    return {"code": done.exit_code, "stdout": done.stdout, "stderr": done.stderr}


if __name__ == "__main__":
    serve({"run": run})
