"""The heap of this process, counted from outside of the framework by ``heap.c``."""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path


def environment() -> dict[str, str]:
    """What a process that measures needs: one thread, since processor time is compared, and the counter of its heap.

    Raises:
        FileNotFoundError: where there is no C compiler called cc.
    """
    threads = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
    return {**dict.fromkeys(threads, "1"), "LD_PRELOAD": str(_library())}


def most_in(step: Callable[[], None]) -> int:
    """The most bytes that the heap had at once while ``step`` ran, less what it had before.

    Before, what Python finds in circles is freed: Keras leaves tensors of the step before there, and one that frees
    these in the middle would seem to take that much less.
    """
    gc.collect()
    counter = _counter()
    before: int = counter.heap_in_use()
    counter.heap_start_again()
    step()
    most: int = counter.heap_most()
    return most - before


def most_in_small_blocks(step: Callable[[], None]) -> int:
    """As ``most_in``, of blocks below 256 KiB alone."""
    gc.collect()
    counter = _counter()
    before: int = counter.heap_small_in_use()
    counter.heap_start_again()
    step()
    most: int = counter.heap_small_most()
    return most - before


@functools.cache
def _library() -> Path:
    target = Path(tempfile.mkdtemp()) / "heap.so"
    source = Path(__file__).with_name("heap.c")
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", str(source), "-o", str(target), "-ldl"], check=True)
    return target


@functools.cache
def _counter() -> ctypes.CDLL:
    library = ctypes.CDLL(os.environ["LD_PRELOAD"])
    for name in ("heap_in_use", "heap_most", "heap_small_in_use", "heap_small_most"):
        getattr(library, name).restype = ctypes.c_long
    return library
