"""What a container or a batch job leaves this process of the machine's memory: the limits of its control groups.

Docker, Kubernetes and Slurm run a process in a control group of Linux, and end it once the group holds more than its
limit, however much the machine has. Both versions of control groups are read (cgroups(7); the kernel's
admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst); a group's limit binds all groups below it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

_PROCESS: Final = Path("/proc/self")
_NO_LIMIT_BYTES: Final = 1 << 62
"""Version 1 says 2^63 less a page where there is no limit; version 2 says a word."""


@dataclass(frozen=True)
class _Files:
    """Names of what a version of control groups says in a group's folder."""

    limit: str
    used: str
    cached: str  # The field of memory.stat: pages of files that the group gives back when it needs them.


_FILES: Final = {
    "cgroup2": _Files("memory.max", "memory.current", "inactive_file"),
    "cgroup": _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def limit_bytes(process: Path = _PROCESS) -> int | None:
    """The least limit of the process' group and of those above it; None where there is none.

    Args:
        process: the folder in which the system describes the process.
    """
    return min((limit for _, _, limit in _limited_groups(process)), default=None)


def left_bytes(process: Path = _PROCESS) -> int | None:
    """What these groups may take in addition, of which each counts all that its processes hold; None without limit.

    Args:
        process: the folder in which the system describes the process.
    """
    return min((_left(folder, files, limit) for folder, files, limit in _limited_groups(process)), default=None)


def _left(folder: Path, files: _Files, limit: int) -> int:
    used = _number(folder / files.used) or 0
    cached = re.search(rf"^{files.cached} (\d+)$", _text(folder / "memory.stat"), re.MULTILINE)
    return max(0, limit - max(0, used - (int(cached[1]) if cached else 0)))


def _limited_groups(process: Path) -> Iterator[tuple[Path, _Files, int]]:
    """The folders of the process' groups that have a limit, with the names of their files."""
    paths = dict(_paths(_text(process / "cgroup")))
    for root, mount, kind in _mounts(_text(process / "mountinfo")):
        path = paths.get(kind)
        if path is None:
            continue
        # In a container with a view of its own the path may lie outside of what is mounted there: then the mounted
        # group is the nearest that can be seen.
        inner = path.relative_to(root) if path.is_relative_to(root) and ".." not in path.parts else PurePosixPath()
        for group in (inner, *inner.parents):
            limit = _number(mount / group / _FILES[kind].limit)
            if limit is not None and limit < _NO_LIMIT_BYTES:
                yield mount / group, _FILES[kind], limit


def _paths(text: str) -> Iterator[tuple[str, PurePosixPath]]:
    """The process' group of each version, of lines "number:controllers:path"; version 2 names no controllers."""
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield "cgroup2", PurePosixPath(path)
        elif "memory" in controllers.split(","):
            yield "cgroup", PurePosixPath(path)


def _mounts(text: str) -> Iterator[tuple[PurePosixPath, Path, str]]:
    """Where groups of memory are mounted: the group at the root, the folder, the version (proc(5), mountinfo)."""
    for line in text.splitlines():
        before, _, behind = line.partition(" - ")
        fields, (kind, _, options) = before.split(), behind.split(" ", 2)
        if kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split(",")):
            yield PurePosixPath(_unescaped(fields[3])), Path(_unescaped(fields[4])), kind


def _unescaped(path: str) -> str:
    """A path of mountinfo, in which spaces and the like stand as three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), path)


def _number(path: Path) -> int | None:
    """The number in a file; None where there is no such file, or no number but the word for no limit."""
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    try:
        # Names of folders may be any bytes.
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""
