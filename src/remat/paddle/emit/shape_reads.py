"""Reads of a shape alone, pointed at a value that is there anyhow.

The backward pass of a sum reads its operands, though only to know their shapes. In a program that is cut in two halves
Paddle keeps such an operand, bytes and all, to the end of the forward pass. Any other value of the same shape does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from remat.paddle import _private
from remat.paddle.trace import op_facts
from remat.paddle.trace.sizes import Sizes


def redirect_shape_reads(ops: Sequence[Any], backward_start: int, sizes: Sizes) -> list[Any]:
    """Let operators of the backward pass take shapes from values whose bytes they read.

    Args:
        ops: the operators of a program's main block.
        backward_start: how many of them come before the backward pass.
        sizes: the shapes of the program's values.

    Returns:
        Values of the forward pass of which only the shape is still read; nothing of the same shape was at hand.
    """
    forward = {v.id for op in ops[:backward_start] for v in op.results() if v.initialized()}
    left: dict[str, Any] = {}
    for op in ops[backward_start:]:
        if not op_facts.is_own(op):
            continue
        operands = [operand for operand in op.operands() if operand.source().initialized()]
        needed = [one.source() for one in operands if not _private.needs_no_bytes(op, one.source())]
        for operand in operands:
            value = operand.source()
            if value.id not in forward or not _private.needs_no_bytes(op, value):
                continue
            shape = sizes.shape_of(value)
            same = (v for v in needed if sizes.shape_of(v) == shape and str(v.dtype) == str(value.dtype))
            stand_in = next(same, None) if shape is not None else None
            if stand_in is None:
                left[value.id] = value
            else:
                operand.set_source(stand_in)
    return list(left.values())
