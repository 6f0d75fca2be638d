"""Keeps the start-up log of native libraries off the terminal.

TensorFlow 2.21 writes a dozen lines to file descriptor 2 while it is imported, before any setting of its log level
counts, and again when it looks for GPUs. They would bury a command's one line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, TextIO

_STDERR: Final = 2


@contextmanager
def native_log_held_back() -> Iterator[None]:
    """Drop what native code writes to file descriptor 2; Python's own ``sys.stderr`` goes on as before.

    A native crash loses its last words, so the caller should offer a way to do without.
    """
    try:
        terminal = os.dup(_STDERR)
    except OSError:
        # Started with stderr closed: there is nothing to keep clean.
        yield
        return
    python_stderr = sys.stderr
    python_stderr.flush()
    # A stream that is not on the descriptor, such as a test's, needs no way around.
    if _writes_to_descriptor(python_stderr):
        # Never closed: log handlers that a library sets up meanwhile keep this stream for good.
        sys.stderr = open(terminal, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), _STDERR)
        yield
    finally:
        os.dup2(terminal, _STDERR)
        sys.stderr = python_stderr


def _writes_to_descriptor(stream: TextIO) -> bool:
    try:
        return stream.fileno() == _STDERR
    except (OSError, ValueError):
        return False
