"""What Paddle's kernels allocate beside their results, on a CPU.

Found by measuring single operators of Paddle 3.3 with its own counter. A kernel that is missing here makes a step need
more than was predicted; ``tests/paddle`` compares the two on programs that hold each of these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from remat.paddle.trace import op_facts

_FLOAT_BYTES: Final = 4


def workspace_bytes(op: Any, operands: Sequence[Sequence[int] | None], results: Sequence[Sequence[int] | None]) -> int:
    """Scratch bytes of one run of an operator; 0 where nothing is known of it."""
    name = op_facts.kind(op)
    first = operands[0] if operands else None
    if first is None:
        return 0
    if name == "layer_norm_grad":
        return 2 * _FLOAT_BYTES * math.prod(first)
    if name in ("conv2d", "conv2d_grad"):
        made = results[0] if name == "conv2d" else operands[-1]
        return _unfolded_bytes(op, first, operands[1], made)
    return 0


def _unfolded_bytes(op: Any, image: Sequence[int], kernel: Sequence[int] | None, made: Sequence[int] | None) -> int:
    """One image of a convolution, unfolded into columns; a kernel of one pixel needs none."""
    attributes = op.attrs()
    if kernel is None or made is None or len(kernel) != 4 or len(image) != 4:
        return 0
    height, width = kernel[2:]
    moves = {*attributes.get("strides", (1,)), *attributes.get("dilations", (1,))} - {1}
    if height == width == 1 and not moves and not any(attributes.get("paddings", (0,))):
        return 0
    positions = made[1] * made[2] if attributes.get("data_format") == "NHWC" else made[2] * made[3]
    return _FLOAT_BYTES * kernel[1] * height * width * positions
