"""What Paddle's kernels allocate beside their results, on a CPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from remat.paddle.trace import op_facts

_FLOAT_BYTES: Final = 4


def workspace_bytes(
    op: Any, operands: Sequence[Sequence[int] | None], results: Sequence[Sequence[int] | None]
) -> int:
    """Scratch bytes of one run of an operator."""
    return 0
