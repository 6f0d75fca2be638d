"""Memory that a process fetches from the system anew at each step, and the seconds that this takes.

The C library keeps small blocks when they are freed. A block above its threshold goes back to the system, and comes as
fresh pages when it is asked for again: the system clears each page at its first touch, which takes many times as long
as to write it. A compiled step asks for all of its temporary memory in one block, so a plan whose block stays below the
threshold is spared what the plain step pays at every run.

Whether this process' C library does so is tried, not assumed: another library, or settings of glibc, may keep all.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import time
from collections.abc import Iterable
from typing import Final

KEPT_BYTES: Final = 32 << 20
"""Blocks up to this size are kept by the C library: ``DEFAULT_MMAP_THRESHOLD_MAX`` of glibc's malloc.c on 64 bits.

Its threshold begins lower and rises to the largest block that was freed, never above this. Where a release changes it,
plans between the two sizes are predicted too slow or too fast by their pages.
"""

_TRIED_BYTES: Final = KEPT_BYTES + (1 << 20)  # Just above; the trial fetches it twice, some 25 ms.

_TIMED_BYTES: Final = 64 << 20
"""What a calibration fetches in each round. From 4 to 256 MiB the seconds for a page were the same within 4 %."""

_ROUNDS: Final = 3  # Of which the quickest counts.


def fetched_bytes(blocks: Iterable[int]) -> int:
    """Bytes that a step fetches anew at each run, of the blocks that it asks the C library for and gives back."""
    large = sum(size for size in blocks if size > KEPT_BYTES)
    return large if large and gives_back() else 0


@functools.cache
def gives_back() -> bool:
    """Does this process' C library give a large block back to the system when it is freed? Tried once.

    False where the system does not say which pages were fetched.
    """
    with contextlib.suppress(ImportError, AttributeError, OSError):
        import resource

        who = resource.RUSAGE_THREAD
        library = ctypes.CDLL(None)
        library.malloc.restype = ctypes.c_void_p
        library.malloc.argtypes = [ctypes.c_size_t]
        library.free.argtypes = [ctypes.c_void_p]

        def fetched_pages() -> int:
            before = resource.getrusage(who).ru_minflt
            block = library.malloc(_TRIED_BYTES)
            if not block:
                return 0
            ctypes.memset(block, 1, _TRIED_BYTES)
            library.free(block)
            return resource.getrusage(who).ru_minflt - before

        fetched_pages()  # The first time every block is fresh.
        return fetched_pages() > _TRIED_BYTES // mmap.PAGESIZE // 2
    return False


def measured_bytes_per_s() -> float | None:
    """Bytes of fresh pages that a process gets in a second of its processor time; None where that cannot be tried."""
    if not hasattr(mmap, "MAP_ANONYMOUS"):
        return None
    seconds = min(_seconds_of_fresh_pages() for _ in range(_ROUNDS))
    return _TIMED_BYTES / max(seconds, 1e-9)


def _seconds_of_fresh_pages() -> float:
    """Seconds to fetch and give back pages, without those to write to pages that are there."""
    ones = b"\1" * (_TIMED_BYTES // mmap.PAGESIZE)
    # Pages that processes may share take twice as long; the C library asks for private ones.
    pages = mmap.mmap(-1, _TIMED_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    times = [time.thread_time()]
    for _ in range(2):
        pages[:: mmap.PAGESIZE] = ones
        times.append(time.thread_time())
    pages.close()
    times.append(time.thread_time())
    started, fetched, written, given_back = times
    return (fetched - started) - (written - fetched) + (given_back - written)
