"""A loss over a batch, and its gradients in one piece or summed over micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from remat.core.errors import UnsupportedStep
from remat.fit.request import Request
from remat.micro_batches.cut import batch_places, names_of_tensors
from remat.micro_batches.reduce import MEAN, RATIO, sum_and_denominator
from remat.tensorflow import _private
from remat.tensorflow.api.tape import GradientTape
from remat.tensorflow.micro_batches.choose import OnBody
from remat.tensorflow.micro_batches.gradients import GradientSums, may_be_sparse
from remat.tensorflow.micro_batches.loop import (
    Carried,
    Size,
    accumulator_dtype,
    batch_size_of,
    for_each_micro_batch,
)
from remat.tensorflow.trace.func_graph import carried_inputs

Gradients = list[Any]


@dataclass(frozen=True)
class Batch:
    """The arguments of one call: the tensors to split, and how to put them back into their places."""

    args: tuple[Any, ...]
    positions: tuple[int, ...]
    leaves: list[tf.Tensor]
    names: list[str]

    @staticmethod
    def of(args: tuple[Any, ...], batch_argnums: int | Sequence[int] | None) -> Batch:
        """The batch in the arguments at some positions; None means in all.

        Raises:
            UnsupportedStep: for a position that no argument has.
        """
        positions = batch_places(batch_argnums, len(args), range(len(args)))
        args = tuple(_as_tensors(arg) if n in positions else arg for n, arg in enumerate(args))
        leaves, names = [], []
        for position in positions:
            flat = tf.nest.flatten(args[position])
            leaves += flat
            names += names_of_tensors(f"argument {position}", len(flat))
        return Batch(args, positions, leaves, names)

    @property
    def signature(self) -> tuple[Any, ...]:
        """Shapes and types of what is split."""
        return tuple((tuple(leaf.shape), leaf.dtype) for leaf in self.leaves)

    def with_leaves(self, leaves: Sequence[tf.Tensor]) -> tuple[Any, ...]:
        """The arguments with other tensors in the places of those that are split."""
        rest = list(leaves)
        args = list(self.args)
        for position in self.positions:
            length = len(tf.nest.flatten(args[position]))
            args[position] = tf.nest.pack_sequence_as(args[position], rest[:length])
            rest = rest[length:]
        return tuple(args)


def _as_tensors(structure: Any) -> Any:
    composite = (tf.RaggedTensor, tf.SparseTensor, tf.IndexedSlices)  # Refused later, by name.
    return tf.nest.map_structure(
        lambda leaf: leaf if isinstance(leaf, composite) else tf.convert_to_tensor(leaf), structure
    )


@dataclass(frozen=True)
class Objective:
    """A loss function and what to make of what it returns.

    Attributes:
        fn: the function.
        reduction: what it returns, see ``remat.micro_batches.reduce``.
        variables: what is differentiated by.
        request: how to plan; without a budget nothing is planned.
    """

    fn: Callable[..., Any]
    reduction: str
    variables: list[Any]
    request: Request

    @property
    def dtype(self) -> tf.DType:
        """The type that values are summed in."""
        wide = any(accumulator_dtype(v.dtype) in (tf.float64, tf.complex128) for v in self.variables)
        return tf.float64 if wide else tf.float32

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tf.Tensor, tf.Tensor | None]:
        """The value of ``fn``, and its denominator where it returns one."""
        value, denominator = sum_and_denominator(self.fn(*args, **kwargs), self.reduction)
        value = tf.convert_to_tensor(value)
        denominator = None if denominator is None else tf.stop_gradient(tf.cast(denominator, self.dtype))
        for part in (value, denominator):
            if part is not None and part.shape.rank != 0:
                raise UnsupportedStep(
                    f"the function returned a tensor of the shape {part.shape} where "
                    f"reduction={self.reduction!r} needs a scalar; reduce it inside the function"
                )
        return value, denominator

    def tape(self, kind: type[GradientTape] = GradientTape) -> Any:
        """A tape that plans, where there is a budget."""
        request = self.request
        if request.budget is None:
            return tf.GradientTape()
        return kind(
            budget=request.budget,
            planner=request.planner,
            time_limit_s=request.time_limit_s,
            levers=request.levers,
            **request.options,
        )

    def whole(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tf.Tensor, Gradients]:
        """Value and gradients of the batch in one piece."""
        with self.tape() as tape:
            value, denominator = self.call(args, kwargs)
            if denominator is not None:
                value = tf.math.divide_no_nan(value, tf.cast(denominator, value.dtype))
        return value, tape.gradient(value, self.variables)


class _LoopTape(GradientTape):
    """A tape in the body of a loop, whose accumulators are handed from one iteration to the next."""

    def _carried(self, graph: _private.FuncGraph) -> frozenset[str]:
        return carried_inputs(graph)


def accumulated(
    objective: Objective, batch: Batch, count: int, kwargs: dict[str, Any], on_body: OnBody | None = None
) -> tuple[tf.Tensor, Gradients]:
    """The objective's value and gradients over a batch, as one loop over ``count`` micro-batches.

    Args:
        objective: what is differentiated.
        batch: what is split.
        count: of micro-batches, 1 or more.
        kwargs: keyword arguments, the same for every micro-batch.
        on_body: is handed the batch's tensors and a micro-batch's while the loop's body is being traced.

    Raises:
        UnsupportedStep: for a batch of fewer samples than micro-batches.
    """
    batch_size = batch_size_of(batch.leaves, batch.names)
    if isinstance(batch_size, int):
        if batch_size < count:
            raise UnsupportedStep(
                f"a batch of {batch_size} samples cannot be split into {count} micro-batches; give a larger batch, or "
                f"at most micro_batches={batch_size}"
            )
    elif not _private.in_xla_context(tf.compat.v1.get_default_graph()):
        message = f"a batch of fewer samples cannot be split into {count} micro-batches"
        check = tf.debugging.assert_greater_equal(batch_size, count, message=message)
        with tf.control_dependencies([] if check is None else [check]):
            batch_size = tf.identity(batch_size)
    sums = _gradient_sums(objective, batch, kwargs)
    value_dtypes = []

    def body(leaves: list[tf.Tensor], size: Size, carried: Carried) -> Carried:
        if on_body is not None:
            on_body(batch.leaves, leaves)
        value_total, denominator_total, *totals = carried
        with objective.tape(_LoopTape) as tape:
            value, denominator = objective.call(batch.with_leaves(leaves), kwargs)
            value_dtypes.append(value.dtype)
            value = tf.cast(value, objective.dtype)
            if objective.reduction == MEAN:
                value *= tf.cast(size, value.dtype) / tf.cast(batch_size, value.dtype)
        totals, rows = sums.add(totals, [tape.gradient(value, objective.variables)])
        if denominator is not None:
            denominator_total += denominator
        return [value_total + value, denominator_total, *totals, *rows]

    zero = tf.zeros((), objective.dtype)
    initial = [zero, zero, *sums.initial()]
    last = for_each_micro_batch(batch.leaves, batch_size, count, body, initial, sums.joined)
    (value, denominator, *totals), rows = last[: len(initial)], last[len(initial) :]
    factor = None
    if objective.reduction == RATIO:
        factor = tf.math.divide_no_nan(tf.ones_like(denominator), denominator)
        value *= factor
    return tf.cast(value, value_dtypes[0]), sums.totals(totals, rows, [factor])


def _gradient_sums(objective: Objective, batch: Batch, kwargs: dict[str, Any]) -> GradientSums:
    """How the gradients are summed: the batch in one piece is traced aside to see which of them are sparse."""
    if tf.executing_eagerly():
        return GradientSums(objective.variables, 1)  # Which lookup a row belongs to is not known there.
    with _private.FuncGraph("remat_whole_batch").as_default() as graph:
        samples = [tf.compat.v1.placeholder(leaf.dtype, leaf.shape) for leaf in batch.leaves]
        with tf.GradientTape() as tape:
            value, _ = objective.call(batch.with_leaves(samples), kwargs)
        if not may_be_sparse(graph):
            return GradientSums(objective.variables, 1)
        return GradientSums(objective.variables, 1, [tape.gradient(value, objective.variables)], samples)
