"""``REMAT_RECOMPUTE=0`` in the environment turns every ``recompute`` of a program off, in every framework.

For a quick comparison with the plain step, without a change to the program. Plans (a budget, checkpoints) are not
concerned: they are asked for by name.
"""

from __future__ import annotations

import os
from typing import Final

ENVIRONMENT_VARIABLE: Final = "REMAT_RECOMPUTE"

_OFF: Final = frozenset({"0", "false", "no", "off"})
"""What turns ``recompute`` off, in any case of letters; everything else, and no value, leaves it on."""


def is_switched_off() -> bool:
    """Does the environment turn every ``recompute`` off? Asked at each call of a recomputed function."""
    return os.environ.get(ENVIRONMENT_VARIABLE, "1").lower() in _OFF
