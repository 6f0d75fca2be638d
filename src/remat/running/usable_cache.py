"""How much of the last-level cache a process has: other processes of a machine, or other guests of it, fill the rest.

What the system says is the whole cache. On a guest with two cores of a larger machine that says 32 MiB, sums over up to
12 MiB ran at the speed of caches and those over 16 at that of main memory; a plan's steps took what 12 MiB predict. So
a vector is multiplied where it lies, in a few lengths, which takes .1 s once in a process.
"""

from __future__ import annotations

import functools
import math
import time
from typing import Any, Final

import numpy as np

from remat.running.step_time import cache_bytes

_SHARES: Final = (3 / 4, 1 / 2, 3 / 8, 1 / 4, 3 / 16, 1 / 8)
"""Of what is looked at, the part that a process may have where it has not all of it."""

_SURELY_CACHED: Final = 1 / 16
_SURELY_NOT: Final = 2.0
"""Of what is looked at, a part that is there in any case, and a length that is not."""

_MOST_BYTES: Final = 64 << 20
"""Of a larger cache so much is looked at, with a vector of twice that: a judgement, .1 s and 128 MiB for a moment.
Where all of that is there, all of the cache is."""

_PASSES: Final = 4
"""Over each length, of which the first fills the cache and the quickest counts. A judgement: what disturbs one makes it
slower. Too few, a cache looks smaller than it is."""

_CLEAR: Final = 1.2
"""Caches are that much quicker than main memory at least; otherwise the machine is too busy to tell."""


@functools.cache
def usable_cache_bytes() -> int:
    """Bytes of the last-level cache that work for this process, as it was first asked."""
    whole = cache_bytes()
    seen = min(whole, _MOST_BYTES)
    vector = np.ones(int(_SURELY_NOT * seen) // 4, dtype=np.float32)
    cached, uncached = (_bytes_per_s(vector, int(share * seen)) for share in (_SURELY_CACHED, _SURELY_NOT))
    between = math.sqrt(cached * uncached)
    if cached < _CLEAR * uncached or _bytes_per_s(vector, seen) >= between:
        return whole
    for share in _SHARES:
        if _bytes_per_s(vector, int(share * seen)) >= between:
            return int(share * seen)
    return int(_SURELY_CACHED * seen)


def _bytes_per_s(vector: np.ndarray[Any, Any], length_bytes: int) -> float:
    """Bytes in a second at which the beginning of a vector is multiplied where it lies."""
    part = vector[: length_bytes // vector.itemsize]
    least_s = math.inf
    for _ in range(_PASSES):
        started = time.perf_counter()
        np.multiply(part, np.float32(1), out=part)
        least_s = min(least_s, time.perf_counter() - started)
    return length_bytes / max(least_s, 1e-9)
