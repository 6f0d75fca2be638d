"""Holds a recomputation back: what it reads becomes available only after a value of the backward pass.

A compiler merges equal computations and moves what is ready. Two ties prevent that:

- *barrier*: ``optimization_barrier``, which costs nothing. XLA on a CPU takes barriers out before it merges equal
  computations, unless that pass is disabled, as ``remat.jax.jit`` does.
- *data*: a zero computed from the late value is added to the bits of what is read, in a way that the compiler does not
  see through. The tensor stays the same bit for bit. It holds on every platform under a plain ``jax.jit``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from remat.jax.context import Tie

# The integers of as many bytes as a value has.
_BITS = {1: jnp.int8, 2: jnp.int16, 4: jnp.int32, 8: jnp.int64}


def can_trigger(aval: Any) -> bool:
    """Can others be tied to a value of this shape and dtype?"""
    dtype = getattr(aval, "dtype", None)
    if dtype is None or 0 in aval.shape or jnp.issubdtype(dtype, jax.dtypes.extended):
        return False
    return bool(dtype == jnp.bool_ or (dtype.kind != "c" and dtype.itemsize in _BITS))


def can_tie(aval: Any) -> bool:
    """Can a value of this shape and dtype be tied?"""
    dtype = getattr(aval, "dtype", None)
    if dtype is None or 0 in aval.shape:
        return False
    is_key = bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))
    return is_key or can_trigger(aval) or getattr(dtype, "kind", "") == "c"


@jax.custom_batching.custom_vmap
def _late_zero(trigger: Any) -> Any:
    first = lax.slice(trigger, (0,) * trigger.ndim, (1,) * trigger.ndim).reshape(())
    if first.dtype == jnp.bool_:
        sign = -first.astype(jnp.int32)
    else:
        width = first.dtype.itemsize
        bits = lax.bitcast_convert_type(first, _BITS[width]) if width < 8 else _high_word(first)
        last = jnp.array(bits.dtype.itemsize * 8 - 1, bits.dtype)
        sign = lax.shift_right_arithmetic(bits, last).astype(jnp.int32)
    # A loop that never runs: left to itself the compiler fuses this computation into every reader of the zero, and
    # keeps all that it is computed from until then.
    return lax.while_loop(lambda zero: zero != 0, lambda zero: zero // 2, sign * sign + sign)


@_late_zero.def_vmap
def _late_zero_of_batch(axis_size: int, in_batched: list[bool], trigger: Any) -> tuple[Any, bool]:
    # One zero for the whole batch: a zero per example would make everything that is tied as large as the batch.
    del axis_size, in_batched
    return _late_zero(trigger), False


def _high_word(value: Any) -> Any:
    return lax.bitcast_convert_type(value, jnp.int32)[-1]


def late_zero(trigger: Any) -> Any:
    """An int32 scalar that is 0 and cannot be known before ``trigger`` exists.

    For the sign s of one value, -1 or 0, it is s * s + s.
    """
    return _late_zero(lax.stop_gradient(trigger))


def always(value: Any, tie: Tie) -> Any:
    """True, which the compiler does not know before a value exists."""
    if tie == "data" and can_trigger(value):
        return late_zero(value) == 0
    barrier: Callable[[Any], Any] = lax.optimization_barrier
    return barrier(jnp.array(True))


@jax.custom_jvp
def _tied(value: Any, zero: Any) -> Any:
    if value.dtype == jnp.bool_:
        return value ^ (zero != 0)
    bits_type = _BITS[value.dtype.itemsize]
    bits = lax.bitcast_convert_type(value, bits_type) + zero.astype(bits_type)
    return lax.bitcast_convert_type(bits, value.dtype)


@_tied.defjvp
def _tied_jvp(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
    return _tied(*primals), tangents[0]


def _tie_one(value: Any, zero: Any) -> Any:
    if jnp.iscomplexobj(value):
        return lax.complex(_tied(lax.real(value), zero), _tied(lax.imag(value), zero))
    return _tied(value, zero)


def _as_numbers(value: Any) -> Any:
    """A random key as the integers that it consists of."""
    return jax.random.key_data(value) if jnp.issubdtype(value.dtype, jax.dtypes.prng_key) else value


def _as_before(tied: Any, value: Any) -> Any:
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(tied, impl=jax.random.key_impl(value))
    return tied


def tie_by_data(values: Sequence[Any], triggers: Sequence[Any]) -> list[Any]:
    """The values bit for bit, available no sooner than all of ``triggers``."""
    zero = sum(map(late_zero, triggers))
    return [_as_before(_tie_one(_as_numbers(value), zero), value) for value in values]


def tie_by_barrier(values: Sequence[Any], triggers: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The values and the triggers, none available before all of them are, where the compiler keeps barriers."""
    barrier: Callable[[Any], Any] = lax.optimization_barrier
    results = barrier((*map(_as_numbers, values), *triggers))
    tied, held = results[: len(values)], results[len(values) :]
    return [_as_before(one, value) for one, value in zip(tied, values, strict=True)], list(held)
