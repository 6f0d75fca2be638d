"""Micro-batches: the gradient of a batch as the sum over its pieces, one piece in memory at a time.

What must hold for the result to be that of the whole batch: sums are accumulated and divided once, by the denominator
that the whole batch has; a piece with fewer samples counts by its real size; the accumulator is float32 at least.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax

from remat.core.errors import UnsupportedStep
from remat.micro_batches.cut import (
    EqualPieces,
    batch_places,
    check_count,
    count_samples,
    cut,
    names_of_tensors,
)
from remat.micro_batches.reduce import MEAN, RATIO, SUM, check_reduction, sum_and_denominator, trained_denominator


@dataclass(frozen=True)
class Split:
    """How the batch of a function is cut, and what the function is.

    Attributes:
        count: how many micro-batches; 1 leaves the batch whole.
        batch_argnums: positional arguments that hold the batch; None means all that are not differentiated.
        reduction: how the loss combines samples, see ``remat.micro_batches.reduce``.
        argnums: positional arguments that are differentiated.
        has_aux: does the loss return auxiliary results?
    """

    count: int
    batch_argnums: int | Sequence[int] | None
    reduction: str
    argnums: tuple[int, ...]
    has_aux: bool

    def check(self) -> None:
        """Refuse at once what can only fail later.

        Raises:
            ValueError: for a count below 1, an unknown reduction, or an argument that is both batch and differentiated.
        """
        check_count(self.count)
        check_reduction(self.reduction)
        given = self.batch_argnums
        both = {given} if isinstance(given, int) else set(given or ())
        if both := both & set(self.argnums):
            raise ValueError(
                f"argument {min(both)} is in argnums and in batch_argnums; a gradient is not split by samples"
            )

    def places(self, args: Sequence[Any]) -> tuple[int, ...]:
        """Positions of the arguments that hold the batch."""
        differentiated = {place % len(args) for place in self.argnums}
        others = [place for place in range(len(args)) if place not in differentiated]
        return batch_places(self.batch_argnums, len(args), others)

    def pieces(self, args: Sequence[Any]) -> tuple[EqualPieces, ...]:
        """The micro-batches of these arguments.

        Raises:
            UnsupportedStep: where the arguments do not agree on the size of the batch.
        """
        leaves = {place: jax.tree.leaves(args[place]) for place in self.places(args)}
        shapes = [jnp.shape(leaf) for group in leaves.values() for leaf in group]
        names = [name for place, own in leaves.items() for name in names_of_tensors(f"argument {place}", len(own))]
        samples = count_samples(shapes, names)
        assert samples is not None, "every shape is known"
        return cut(samples, self.count)

    def piece(self, args: Sequence[Any], start: Any, size: int) -> list[Any]:
        """The arguments with ``size`` samples of the batch from ``start`` on."""
        piece = list(args)
        for place in self.places(args):
            piece[place] = jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, start, size), args[place])
        return piece


def loss_of_piece(fun: Callable[..., Any], split: Split) -> Callable[..., Any]:
    """The loss as the value to sum and, beside it, its denominator and the auxiliary results."""

    def loss(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        result = fun(*args, **kwargs)
        main, aux = result if split.has_aux else (result, ())
        value, denominator = sum_and_denominator(main, split.reduction)
        return value, (jnp.ones((), jnp.float32) if denominator is None else jnp.asarray(denominator), aux)

    return loss


def quotient(value: Any, denominator: Any) -> Any:
    """``value / denominator``, and 0 with a gradient of 0 where the denominator is 0: a batch that is all masked."""
    is_zero = denominator == 0
    return jnp.where(is_zero, 0, value / jnp.where(is_zero, 1, denominator))


def summed_value_and_grad(
    fun: Callable[..., Any], split: Split, gradient_of_piece: Callable[..., Any]
) -> Callable[..., tuple[Any, Any]]:
    """The value and gradients of a batch from those of its pieces.

    Args:
        fun: the loss; with "ratio" it returns (sum, denominator).
        split: how the batch is cut.
        gradient_of_piece: ``jax.value_and_grad`` of ``loss_of_piece``, planned or not.

    Returns:
        A function like that of ``jax.value_and_grad(fun)``; with "ratio" its value is the quotient.
    """
    loss = loss_of_piece(fun, split)

    def whole(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if split.reduction == RATIO:
            _check_denominator(loss, args, kwargs, split.argnums)
        groups = split.pieces(args)

        def of(start: Any, size: int) -> tuple[Any, Any]:
            (value, (denominator, aux)), gradients = gradient_of_piece(*split.piece(args, start, size), **kwargs)
            weight = size if split.reduction == MEAN else 1
            return jax.tree.map(lambda leaf: _wide(leaf) * weight, (value, gradients, denominator)), aux

        shapes, _ = jax.eval_shape(lambda: of(0, groups[0].size))
        total = jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), shapes)
        stacks = []
        for group in groups:

            def add(total: Any, start: Any, size: int = group.size) -> tuple[Any, Any]:
                one, aux = of(start, size)
                return jax.tree.map(jnp.add, total, one), aux

            total, stack = lax.scan(add, total, jnp.asarray(group.starts))
            stacks.append(stack)
        value, gradients, denominator = total
        divisor = denominator if split.reduction != SUM else jnp.ones((), jnp.float32)
        kind = jax.eval_shape(lambda: loss(*args, **kwargs)[0]).dtype
        value = quotient(value, divisor).astype(kind)
        chosen = tuple(args[place] for place in split.argnums)
        gradients = jax.tree.map(
            lambda wide, like: quotient(wide, divisor).astype(jnp.result_type(like)), gradients, chosen
        )
        if not split.has_aux:
            return value, gradients
        kinds = _kinds_of_aux(lambda size: loss(*split.piece(args, 0, size), **kwargs)[1][1], groups)
        return (value, _joined_aux(kinds, stacks, groups, split.reduction)), gradients

    return whole


def _wide(leaf: Any) -> Any:
    """At least float32: a sum of many pieces in half precision drifts, and stalls."""
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        return leaf
    return leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))


def _check_denominator(loss: Any, args: Sequence[Any], kwargs: Any, argnums: Sequence[int]) -> None:
    """Refuse a denominator that depends on what is differentiated: it would need a gradient of its own."""
    from remat.jax.trace.program import alive, program_of

    flat = {place: len(jax.tree.leaves(args[place])) for place in range(len(args))}
    closed = jax.make_jaxpr(lambda *a: loss(*a, **kwargs)[1][0])(*args)
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
            raise trained_denominator(f"argument {place}, which is differentiated")


_SUMMED: Final = "summed"
_JOINED: Final = "joined"


def _kinds_of_aux(aux_of: Callable[[int], Any], groups: Sequence[EqualPieces]) -> Any:
    """How each auxiliary result of the pieces becomes that of the batch.

    What has a batch axis is told by its shape, which changes with the number of samples.
    """
    size, samples = groups[0].size, groups[-1].starts[-1] + groups[-1].size
    other_size = size - 1 if size > 1 else min(2, samples)
    one, other = (jax.eval_shape(lambda some=some: aux_of(some)) for some in (size, other_size))

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


def _joined_aux(kinds: Any, stacks: Sequence[Any], groups: Sequence[EqualPieces], reduction: str) -> Any:
    """Scalars combine as the loss does (for "ratio" they are sums); what has a batch axis is put in order again.

    Args:
        kinds: of each auxiliary result.
        stacks: for each group of pieces, their auxiliary results one above the other.
        groups: the pieces.
        reduction: of the loss.
    """
    weights = jnp.asarray([group.size for group in groups for _ in group.starts], jnp.float32)

    def join(kind: str, *own: Any) -> Any:
        if kind == _JOINED:
            return jnp.concatenate([stack.reshape(-1, *stack.shape[2:]) for stack in own])
        every = _wide(jnp.concatenate(own))
        total = every.sum() if reduction != MEAN else (every * weights).sum() / weights.sum()
        return total.astype(own[0].dtype)

    return jax.tree.map(join, kinds, *stacks)
