"""A process of one framework that runs the snippets of the documentation, each in a namespace of its own."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from worker_process import serve


def run(script: str, *arguments: str) -> str:
    """What a script prints."""
    printed = io.StringIO()
    os.chdir(Path(script).parent)
    sys.argv = [script, *arguments]
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(script, run_name="__main__")
    finally:
        # The memory of one snippet must not count as resident in the next.
        if keras := sys.modules.get("keras"):
            keras.backend.clear_session()
        if paddle := sys.modules.get("paddle"):
            paddle.disable_static()  # What a snippet enables must not be in force in the next.
        gc.collect()
    return printed.getvalue()


if __name__ == "__main__":
    serve({"run": run}, as_users=True)
