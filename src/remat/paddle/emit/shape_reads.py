"""Reads of a shape alone, pointed at a value of the backward pass.

The backward pass of a sum reads its operands, though only to know their shapes. In a program that is cut in two halves
Paddle keeps such an operand, bytes and all, to the end of the forward pass. Any other value of the same shape does,
also one whose bytes are gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from remat.paddle import _private
from remat.paddle.trace import op_facts
from remat.paddle.trace.sizes import Sizes


def redirect_shape_reads(ops: Sequence[Any], backward_start: int, sizes: Sizes) -> list[Any]:
    """Let operators of the backward pass take shapes from values of the backward pass.

    Args:
        ops: the operators of a program's main block.
        backward_start: how many of them come before the backward pass.
        sizes: the shapes of the program's values.

    Returns:
        Values of the forward pass of which only the shape is still read; nothing of the same shape was at hand.
    """
    forward = {v.id for op in ops[:backward_start] for v in op.results() if v.initialized()}
    left: dict[str, Any] = {}
    first_of: dict[tuple[Any, str], Any] = {}
    for op in ops[backward_start:]:
        operands = [operand for operand in op.operands() if operand.source().initialized()]
        if op_facts.is_own(op):
            needed = {o.source().id for o in operands if not _private.needs_no_bytes(op, o.source())}
            for operand in operands:
                value = operand.source()
                if value.id not in forward or value.id in needed:
                    continue
                stand_in = first_of.get((sizes.shape_of(value), str(value.dtype)))
                # What the operator reads itself would count as not needed there, and be freed before.
                if stand_in is None or stand_in.id in needed:
                    left[value.id] = value
                else:
                    operand.set_source(stand_in)
        for value in op.results():
            if value.initialized() and (shape := sizes.shape_of(value)) is not None:
                first_of.setdefault((shape, str(value.dtype)), value)
    return list(left.values())
