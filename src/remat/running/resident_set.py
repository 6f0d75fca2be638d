"""The memory that the operating system gives to this process, for steps that no counter of a framework watches.

Linux keeps the largest size of a process's resident set (``VmHWM`` in ``/proc/self/status``), and starts it anew when 5
is written to ``/proc/self/clear_refs`` (proc(5)). It counts all that the process touches: tensors, the scratch memory
of kernels, and what the C library's heap holds between them. While a peak is watched, the heap of glibc is told to take
large blocks from the system one by one and to give them back at once (mallopt(3)); else it would keep up to as much
again for later.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import re
from pathlib import Path
from typing import Any, Final

NAME: Final = "peak set size of the process"
"""What a measurement by this file is called."""

_STATUS: Final = Path("/proc/self/status")
_CLEAR_REFS: Final = Path("/proc/self/clear_refs")
_START_A_NEW_PEAK: Final = "5"

# Of glibc's malloc.h. By itself the heap raises both limits as a program frees larger blocks, up to these.
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_WATCHED_BLOCKS_FROM_BYTES: Final = 128 << 10
_USUAL_BLOCKS_FROM_BYTES: Final = 32 << 20


@functools.cache
def can_be_measured() -> bool:
    """Does the operating system keep a peak that can be started anew?"""
    try:
        _CLEAR_REFS.write_text(_START_A_NEW_PEAK)
        return _field_bytes("VmHWM") > 0
    except (OSError, LookupError):
        return False


def start_new_peak() -> int:
    """Give unused memory back to the system and start a new peak; the bytes that the process holds now.

    Raises:
        OSError: where ``can_be_measured`` says no.
    """
    gc.collect()
    _take_blocks_from_the_system(_WATCHED_BLOCKS_FROM_BYTES)
    _return_free_pages()
    _CLEAR_REFS.write_text(_START_A_NEW_PEAK)
    return _field_bytes("VmRSS")


def peak_bytes() -> int:
    """The most bytes that the process held since the peak was started; the heap is left to its usual ways again."""
    found = _field_bytes("VmHWM")
    _take_blocks_from_the_system(_USUAL_BLOCKS_FROM_BYTES)
    return found


def _field_bytes(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    if found is None:
        raise LookupError(name)
    return int(found[1]) << 10


def _return_free_pages() -> None:
    """Pages that the heap keeps for later would hide what a step takes from them."""
    if malloc_trim := _of_the_c_library("malloc_trim"):
        malloc_trim(0)


def _take_blocks_from_the_system(from_bytes: int) -> None:
    if mallopt := _of_the_c_library("mallopt"):
        mallopt(_M_MMAP_THRESHOLD, from_bytes)
        mallopt(_M_TRIM_THRESHOLD, 2 * from_bytes)


def _of_the_c_library(name: str) -> Any:
    """A function of glibc; None in a process with another C library, which gives pages back by itself or not at all."""
    return getattr(ctypes.CDLL(None), name, None)
