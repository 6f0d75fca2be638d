"""Python's collector of garbage while a step is traced and planned."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_NEW_OBJECTS: Final = 200_000
"""The collector looks for cycles each time that so many objects more are alive than before. Tracing makes hundreds of
thousands that live until the plan is made, and the usual 700 or 2,000 cost a plan of four models of JAX's zoo 7 to 27 %
of its processor time. Objects of cycles may wait a little longer for it: some tens of MB at most."""


@contextmanager
def collecting_rarely() -> Iterator[None]:
    """Inside, Python looks for garbage less often; a collector that is switched off stays so."""
    before = gc.get_threshold()
    if 0 < before[0] < _NEW_OBJECTS:
        gc.set_threshold(_NEW_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
