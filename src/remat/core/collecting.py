"""Python's collector of garbage while a step is traced and planned: called rarely, or not at all."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_NEW_OBJECTS: Final = 200_000
"""The collector looks for cycles each time that so many objects more are alive than before. Tracing makes hundreds of
thousands that live until the plan is made, and the usual 700 or 2,000 cost a plan of four models of JAX's zoo 7 to 27 %
of its processor time, and one of an LSTM over 512 steps in PyTorch 10 s of 54. Objects of cycles may wait a little
longer for it: some tens of MB at most."""


_lock = threading.Lock()
_inside = 0  # Blocks of all threads: replicas are traced in threads of their own.
_before: tuple[int, int, int] = gc.get_threshold()


@contextmanager
def collecting_rarely() -> Iterator[None]:
    """Inside, Python looks for garbage less often; a collector that is switched off stays so."""
    global _inside, _before
    with _lock:
        if not _inside:
            _before = gc.get_threshold()
            if 0 < _before[0] < _NEW_OBJECTS:
                gc.set_threshold(_NEW_OBJECTS, *_before[1:])
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                gc.set_threshold(*_before)


@contextmanager
def without_collections() -> Iterator[None]:
    """Inside, Python does not look for circles of objects.

    When it looks depends on what else the process has done: a tensor in a circle would be released at any place of a
    traced step, and two traces of one step would differ. And a capture makes millions of objects and hardly any that
    can go: of a GPT-2 of 24 layers, 1.6 s of 20 are spent on collections.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
