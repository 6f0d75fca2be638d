"""Products of a slice, written as products of two matrices where that needs no copy.

A slice of logits has two axes of rows, samples and tokens. The gradient of the head's weights is a product that sums
over both, for which XLA on a CPU makes a transposed copy of its operand. For a product of two matrices it makes none.
All products of a slice are written so, not only those: a value that one product reads with two axes and another one
with a single axis would be computed once for each of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from remat.jax import _private
from remat.jax._private import JaxprEqn


def of_matrices(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any] | None:
    """The result of a product by one of two matrices; None where an operand has no such form.

    Args:
        eqn: a ``dot_general`` equation.
        operands: its two operands.
    """
    (left_summed, right_summed), batches = eqn.params["dimension_numbers"]
    left, right = operands
    if batches[0] or max(left.ndim, right.ndim) == 2:
        return None
    left_free = [axis for axis in range(left.ndim) if axis not in left_summed]
    right_free = [axis for axis in range(right.ndim) if axis not in right_summed]
    parts = (left_free, list(left_summed), right_free, list(right_summed))
    if not all(part and _is_one_axis(part) for part in parts):
        return None
    merged_left, merged_right = _matrix(left, left_free), _matrix(right, right_free)
    summed = ((1 if left_free[0] == 0 else 0,), (1 if right_free[0] == 0 else 0,))
    product = eqn.replace(params={**eqn.params, "dimension_numbers": (summed, ((), ()))})
    (made,) = _private.evaluate(product, [merged_left, merged_right])
    shape = [*(left.shape[axis] for axis in left_free), *(right.shape[axis] for axis in right_free)]
    return [lax.reshape(made, shape)]


def _is_one_axis(axes: Sequence[int]) -> bool:
    """Do they stand one behind the other, in their order?"""
    return list(axes) == list(range(axes[0], axes[0] + len(axes)))


def _matrix(operand: jax.Array, free: Sequence[int]) -> jax.Array:
    """An operand with its free axes as one, and those that are summed over as the other; both stay where they are.

    The barrier keeps the new shape out of the kernel that makes the operand. With it inside, XLA does not write that
    kernel's result over what it reads: a masked loss in two slices took 8.85 MiB in place of 6.9.
    """
    rows = math.prod(operand.shape[axis] for axis in free)
    others = operand.size // rows
    shape = (rows, others) if free[0] == 0 else (others, rows)
    barrier: Callable[[Any], jax.Array] = lax.optimization_barrier
    return operand if operand.shape == shape else lax.reshape(barrier(operand), shape)
