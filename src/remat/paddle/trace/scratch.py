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
    """Scratch bytes of one run of an operator; 0 where nothing is known of it."""
    name = op_facts.kind(op)
    first = operands[0] if operands else None
    if first is None:
        return 0
    if name == "layer_norm_grad":
        return 2 * _FLOAT_BYTES * math.prod(first)
    return 0
