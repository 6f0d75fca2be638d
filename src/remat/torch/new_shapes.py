"""Says once that a limit meets ever other shapes, each of which is traced and planned."""

from __future__ import annotations

import logging
from typing import Final

_log = logging.getLogger("remat")

_MANY: Final = 16
"""A judgement: buckets of lengths are fewer, texts padded to their longest come to more within an epoch."""


class NewShapes:
    """What one limit has met.

    Args:
        before: combinations that were planned before this, in another way.
    """

    def __init__(self, before: int = 0) -> None:
        self._is_said = before >= _MANY

    def count(self, combinations: int) -> None:
        """Take note of how many combinations of shapes were planned so far."""
        if combinations >= _MANY and not self._is_said:
            self._is_said = True
            _log.warning(
                "%d combinations of shapes were planned by now, and each takes seconds to trace and plan: pad batches "
                "to a few lengths, to multiples of 64 say. This is said once.",
                combinations,
            )
