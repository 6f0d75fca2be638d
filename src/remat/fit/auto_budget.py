"""``budget="auto"``: the memory of the GPU that a step runs on, less a margin."""

from __future__ import annotations

from typing import Final

from remat.core.errors import InvalidBudget

MARGIN: Final = 0.08
"""The share of a GPU's memory that is left to the driver's context, to libraries' workspaces and to fragmentation.

A judgement, not a measurement: no GPU was at hand when it was chosen. Too small, steps run out of memory under a budget
that was kept; too large, memory stays unused.
"""


def auto_budget_bytes(device: str, memory_bytes: int | None) -> int:
    """The budget for a device.

    Args:
        device: its name, for the error: "CPU:0".
        memory_bytes: what it has; None for a CPU, whose memory belongs to everything else, too.

    Raises:
        InvalidBudget: on a CPU.
    """
    if memory_bytes is None:
        raise InvalidBudget(
            f"budget 'auto' means a GPU's memory less a margin, but the step runs on {device}; give a number of bytes "
            'such as "4GiB", or a share of the plain step such as "60%"'
        )
    return int(memory_bytes * (1 - MARGIN))
