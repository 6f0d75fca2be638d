"""Where a table was made: the machine and what is installed on it, in one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from remat.running import machine


def here() -> str:
    """This machine."""
    return in_a_line(machine.described(), machine.versions())


def in_a_line(described: Mapping[str, Any], versions: Mapping[str, str]) -> str:
    """System, processor, cores and versions, as ``remat.running.machine`` gives them; without a full stop."""
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"{described['system']} {described['processor']}, {described['cores']} cores; {packages}"
