"""Micro-batches: the gradient of a batch as the sum over its parts, one part in memory at a time.

What must hold for the result to be that of the whole batch: sums are accumulated and divided once, by the denominator
that the whole batch has; a last part that is smaller counts by its real size; the accumulator is float32 at least.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax

from remat.core.errors import UnsupportedStep
from remat.micro_batches.cut import count_samples

REDUCTIONS: Final = ("mean", "sum", "ratio")


@dataclass(frozen=True)
class Split:
    """How a batch is split.

    Attributes:
        count: into how many parts; 1 leaves it whole.
        batch_argnums: positional arguments that hold the batch; None means all that are not differentiated.
        reduction: how the loss combines samples: "mean", "sum" or "ratio".
        argnums: positional arguments that are differentiated.
        has_aux: does the loss return auxiliary results?
    """

    count: int
    batch_argnums: tuple[int, ...] | None
    reduction: str
    argnums: tuple[int, ...]
    has_aux: bool

    def check(self) -> None:
        """Refuse at once what can only fail later.

        Raises:
            ValueError: for a count below 1, an unknown reduction, or an argument that is both batch and differentiated.
        """
        count: Any = self.count
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"micro_batches={count!r} is not a number of parts; give an int, 1 or more")
        if self.reduction not in REDUCTIONS:
            raise ValueError(f"reduction={self.reduction!r} is unknown; choose one of {', '.join(REDUCTIONS)}")
        both = sorted(set(self.batch_argnums or ()) & set(self.argnums))
        if both:
            raise ValueError(
                f"argument {both[0]} is in argnums and in batch_argnums; a gradient is not split by samples"
            )

    def batch_of(self, args: Sequence[Any]) -> tuple[int, ...]:
        """Positions of the arguments that hold the batch."""
        if self.batch_argnums is not None:
            return self.batch_argnums
        return tuple(number for number in range(len(args)) if number not in self.argnums)


def loss_in_parts(fun: Callable[..., Any], split: Split) -> Callable[..., Any]:
    """The loss as the value to sum and, beside it, its denominator and the auxiliary results."""

    def parts(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        result = fun(*args, **kwargs)
        main, aux = result if split.has_aux else (result, ())
        if split.reduction != "ratio":
            return main, (jnp.ones((), jnp.float32), aux)
        if not isinstance(main, tuple) or len(main) != 2:
            raise TypeError('with reduction="ratio" the function returns a pair (sum, denominator)')
        return main[0], (main[1], aux)

    return parts


def sizes_of_parts(split: Split, args: Sequence[Any]) -> tuple[int, int, int]:
    """Samples of a full part, the number of full parts, and the samples of a smaller last part, 0 for none.

    Raises:
        UnsupportedStep: where the arguments do not agree on the size of the batch.
    """
    shapes = [[jnp.shape(leaf) for leaf in jax.tree.leaves(argument)] for argument in args]
    samples = count_samples(shapes, split.batch_of(args))
    size = -(-samples // split.count)
    return size, samples // size, samples % size


def part_of(split: Split, args: Sequence[Any], start: Any, length: int) -> list[Any]:
    """The arguments with ``length`` samples of the batch from ``start`` on."""
    part = list(args)
    for place in split.batch_of(args):
        part[place] = jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, start, length), args[place])
    return part


def summed_value_and_grad(
    fun: Callable[..., Any], split: Split, gradient_for: Callable[[int], Callable[..., Any]]
) -> Callable[..., tuple[Any, Any]]:
    """The value and gradients of a batch from those of its parts.

    Args:
        fun: the loss; with "ratio" it returns (sum, denominator).
        split: how.
        gradient_for: for a number of samples, ``jax.value_and_grad`` of ``loss_in_parts``, planned or not.

    Returns:
        A function like that of ``jax.value_and_grad(fun)``; with "ratio" its value is the quotient.
    """
    parts = loss_in_parts(fun, split)

    def whole(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if split.reduction == "ratio":
            _check_denominator(parts, args, kwargs, split.argnums)
        size, full, rest = sizes_of_parts(split, args)

        def of(start: Any, length: int) -> tuple[Any, Any]:
            part = part_of(split, args, start, length)
            (value, (denominator, aux)), gradients = gradient_for(length)(*part, **kwargs)
            weight = length if split.reduction == "mean" else 1
            scaled = jax.tree.map(lambda leaf: _wide(leaf) * weight, (value, gradients, denominator))
            return scaled, aux

        kinds = _kinds_of_aux(lambda length: parts(*part_of(split, args, 0, length), **kwargs)[1][1], size, rest, full)

        def add(total: Any, start: Any) -> tuple[Any, Any]:
            one, aux = of(start, size)
            return jax.tree.map(jnp.add, total, one), aux

        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(lambda: of(0, size)[0]))
        total, stacked = lax.scan(add, zeros, jnp.arange(full) * size)
        last = None
        if rest:
            one, last = of(full * size, rest)
            total = jax.tree.map(jnp.add, total, one)
        value, gradients, denominator = total
        divisor = denominator if split.reduction != "sum" else jnp.ones((), jnp.float32)
        value, gradients = value / divisor, jax.tree.map(lambda leaf: leaf / divisor, gradients)
        kind = jax.eval_shape(lambda: parts(*args, **kwargs)[0]).dtype
        chosen = tuple(args[place] for place in split.argnums)
        value = value.astype(kind)
        gradients = jax.tree.map(lambda wide, like: wide.astype(jnp.result_type(like)), gradients, chosen)
        weights = [size] * full + [rest] * bool(rest)
        aux = _joined_aux(kinds, stacked, last, jnp.array(weights, jnp.float32), split.reduction)
        return ((value, aux) if split.has_aux else value), gradients

    return whole


def _wide(leaf: Any) -> Any:
    """At least float32: a sum of many parts in half precision drifts, and stalls."""
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        return leaf
    return leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))


def _check_denominator(parts: Any, args: Sequence[Any], kwargs: Any, argnums: Sequence[int]) -> None:
    """A denominator that depends on what is differentiated would need a gradient of its own."""
    from remat.jax.trace.program import alive, program_of

    flat = {place: len(jax.tree.leaves(args[place])) for place in range(len(args))}
    closed = jax.make_jaxpr(lambda *a: parts(*a, **kwargs)[1][0])(*args)
    program = program_of(closed)
    equations = alive([one for i in program.instructions for one in i.equations], program.outputs)
    read = {value for equation in equations for value in equation.reads} | {
        o for o in program.outputs if isinstance(o, int)
    }
    first = 0
    for place in range(len(args)):
        own = program.inputs[first : first + flat[place]]
        first += flat[place]
        if place in argnums and any(value in read for value in own):
            raise UnsupportedStep(
                f'with reduction="ratio" the denominator depends on argument {place}, which is differentiated; it must '
                "count samples or tokens only. Compute it from the batch alone, or leave micro_batches at 1"
            )


_SUMMED, _JOINED = "summed", "joined"


def _kinds_of_aux(aux_of: Callable[[int], Any], size: int, rest: int, full: int) -> Any:
    """For each auxiliary result, how those of the parts combine; what has a batch axis changes shape with the part."""
    other_size = rest or (size - 1 if size > 1 else (2 if full > 1 else 1))
    one, other = (jax.eval_shape(lambda length=length: aux_of(length)) for length in (size, other_size))

    def kind(a: Any, b: Any) -> str:
        if a.shape == () and jnp.issubdtype(a.dtype, jnp.inexact):
            return _SUMMED
        if a.shape != b.shape and a.shape[1:] == b.shape[1:] and a.shape[0] == size:
            return _JOINED
        raise UnsupportedStep(
            f"an auxiliary result of shape {a.shape} and type {a.dtype} has no batch axis, and is no scalar: it cannot "
            "be put together from micro-batches (running statistics of a normalisation are such a result, which "
            "micro-batches would change). Leave it out, or leave micro_batches at 1"
        )

    return jax.tree.map(kind, one, other)


def _joined_aux(kinds: Any, stacked: Any, last: Any, weights: Any, reduction: str) -> Any:
    """Scalars combine as the loss does (for "ratio" they are sums); what has a batch axis is put in order again."""

    def join(kind: str, stack: Any, *more: Any) -> Any:
        if kind == _JOINED:
            flat = stack.reshape(-1, *stack.shape[2:])
            return jnp.concatenate([flat, *more]) if more else flat
        every = jnp.concatenate([stack, jnp.stack(more)]) if more else stack
        wide = _wide(every)
        total = wide.sum() if reduction != "mean" else (wide * weights).sum() / weights.sum()
        return total.astype(stack.dtype)

    return jax.tree.map(join, kinds, stacked, *(() if last is None else (last,)))
