"""The switch in the environment that turns every ``recompute`` of a program off, whatever the framework."""

from __future__ import annotations

import os

ENVIRONMENT_VARIABLE = "REMAT_RECOMPUTE"
"""Set it to 0 to switch every ``recompute`` of a program off; it is read at each call."""

_OFF = frozenset({"0", "false", "no", "off"})


def is_switched_off() -> bool:
    """Does the environment switch every ``recompute`` off?"""
    return os.environ.get(ENVIRONMENT_VARIABLE, "1").lower() in _OFF
