"""The machine that remat runs on: its memory, and what belongs beside figures that were measured on it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Final

from remat.running import memory_limit

_PACKAGES: Final = (
    "remat",
    "tensorflow",
    "tensorflow-cpu",
    "keras",
    "jax",
    "torch",
    "paddlepaddle",
    "numpy",
    "highspy",
)
"""The packages whose version may change a measured figure."""


def memory_bytes() -> int | None:
    """Main memory of the machine, or what a container or a batch job may have of it; None where nothing says."""
    return _least(_physical_bytes(), memory_limit.limit_bytes())


def available_bytes() -> int | None:
    """Main memory that a new process can have; where only the size of all memory is known, half of that."""
    return _least(_free_bytes(), memory_limit.left_bytes())


def _least(*known: int | None) -> int | None:
    return min((size for size in known if size is not None), default=None)


def _physical_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def _free_bytes() -> int | None:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    total = _physical_bytes()
    return None if total is None else total // 2


def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages that may change a measured figure."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def described() -> dict[str, str | int | None]:
    """System, processor, cores and memory."""
    return {
        "system": platform.system(),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "memory_bytes": memory_bytes(),
    }
