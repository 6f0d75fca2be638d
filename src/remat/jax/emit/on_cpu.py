"""Equations that XLA on a CPU runs in far more memory than they need, and how a plan's function runs them instead.

The values stay the same, those of sums to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from remat.jax import _private
from remat.jax._private import JaxprEqn
from remat.jax.context import Tie
from remat.jax.emit import ties
from remat.jax.trace import op_facts


def evaluate(eqn: JaxprEqn, read: Sequence[Any], tie: Tie) -> list[Any]:
    """The results of an equation.

    Args:
        eqn: the equation.
        read: the values that it reads.
        tie: how recomputations are held back.
    """
    if eqn.primitive.name in op_facts.WITH_INDICES:
        return _evaluate_apart(eqn, read, tie)
    groups = op_facts.groups_at_once(eqn)
    return _private.evaluate(eqn, read) if groups is None else [_evaluate_in_pieces(eqn, read, groups)]


def _evaluate_apart(eqn: JaxprEqn, read: Sequence[Any], tie: Tie) -> list[Any]:
    """Run an equation in a computation of its own: what the compiler makes for it exists only while it runs."""

    def run(*values: Any) -> list[Any]:
        return _private.evaluate(eqn, values)

    made: list[Any] = [var.aval for var in eqn.outvars]

    def skip(*_values: Any) -> list[Any]:
        return [jnp.zeros(aval.shape, aval.dtype) for aval in made]

    branches: Callable[..., list[Any]] = jax.lax.cond
    return branches(ties.always(read[0], tie), run, skip, *read)


def _evaluate_in_pieces(eqn: JaxprEqn, read: Sequence[Any], groups: int) -> Any:
    """The gradient of the weights of a grouped convolution, of so many groups at once.

    The compiler has no kernel for it. It computes the products of the channels of all groups with one another, and
    takes those of each group with itself: 72 MiB and 22 times as long for 1,024 channels of 3 x 3.
    """
    numbers, count = eqn.params["dimension_numbers"], int(eqn.params["batch_group_count"])
    axes = (numbers.lhs_spec[0], numbers.rhs_spec[0])
    sizes = [int(value.shape[axis]) // count for value, axis in zip(read, axes, strict=True)]
    cut: Callable[..., Any] = jax.lax.slice_in_dim
    bind: Callable[..., Any] = eqn.primitive.bind
    made = []
    for start in range(0, count, groups):
        stop = min(count, start + groups)
        own = [
            cut(value, start * size, stop * size, axis=axis)
            for value, size, axis in zip(read, sizes, axes, strict=True)
        ]
        made.append(bind(*own, **{**eqn.params, "batch_group_count": stop - start}))
    return jnp.concatenate(made, axis=int(numbers.out_spec[1]))
