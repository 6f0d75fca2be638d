"""What a micro-batch's loss is made of: for each output a value, and what Keras divided it by.

Every loss of Keras is a sum over a denominator. The full batch's loss is the sum of the sums over the sum of the
denominators, which is not the mean of the micro-batches' losses unless their denominators are equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import keras
from keras import ops

from remat.core.errors import UnsupportedStep
from remat.keras import _private


@dataclass(frozen=True)
class LossTerm:
    """One output's loss over one micro-batch.

    Attributes:
        value: the loss as Keras computed it, without its loss weight; a scalar.
        weight: the loss weight, or None for 1.
        is_sum: the value is a sum over the samples: it has no denominator.
        denominator: what the value was divided by, up to a factor that is the same for each micro-batch; None where
            that is the number of samples.
        per_sample: with a denominator, the number of values per sample: a bound for the denominator per sample where
            weights are at most 1.
    """

    value: Any
    weight: Any
    is_sum: bool = False
    denominator: Any = None
    per_sample: Any = None

    def weighted(self, value: Any) -> Any:
        """``value`` times the loss weight."""
        return value if self.weight is None else value * ops.cast(self.weight, value.dtype)


def loss_terms(model: keras.Model, y: Any, y_pred: Any, sample_weight: Any, size: Any) -> list[LossTerm]:
    """The terms of ``compile(loss=...)`` for one micro-batch, in Keras' order.

    Args:
        model: compiled, with its losses built.
        y: the targets.
        y_pred: the outputs.
        sample_weight: the weights, or None.
        size: samples of the micro-batch, an int or a tensor.

    Raises:
        UnsupportedStep: for a loss of which it cannot be known what it divides by.
    """
    compile_loss = _private.compile_loss_of(model)
    if compile_loss is None:
        return []
    terms: list[LossTerm] = []

    def wrap(entry: Any) -> Any:
        def measured(y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            if isinstance(entry.loss, keras.losses.Circle):
                raise UnsupportedStep(
                    f"the loss {entry.loss.name!r} compares the samples of a batch with one another, so micro-batches "
                    "would change it; leave micro_batches at 1 and give a budget"
                )
            with _private.reductions_recorded() as reductions:
                value = entry.loss(y_true, y_pred, sample_weight)
            terms.append(_term(entry, value, reductions, size))
            return value

        return measured

    with _private.losses_replaced(compile_loss, wrap):
        compile_loss(y, y_pred, sample_weight)
    if not keras.tree.is_nested(y) and not keras.tree.is_nested(y_pred):
        return terms[:1]  # Keras counts one loss of a single output.
    return terms


def _term(entry: Any, value: Any, reductions: list[_private.Reduction], size: Any) -> LossTerm:
    name = getattr(entry.loss, "name", entry.name)
    if len(reductions) != 1:
        raise UnsupportedStep(
            f"it cannot be known what the loss {name!r} divides by, since it does not leave the reduction to "
            "keras.losses.Loss; return one value per sample from its call(), or leave micro_batches at 1"
        )
    (reduction,) = reductions
    if reduction.kind in (None, "none"):
        raise UnsupportedStep(
            f"the loss {name!r} has reduction={reduction.kind!r}; give it 'sum_over_batch_size' or 'sum', or leave "
            "micro_batches at 1"
        )
    _check_one_value_per_sample(name, reduction.values, size)
    if reduction.kind == "sum":
        return LossTerm(value, entry.loss_weights, is_sum=True)
    if reduction.kind == "mean_with_sample_weight":
        weights = reduction.weights()
        if weights is not None:
            return _counted(value, entry.loss_weights, weights, size)
    elif reduction.mask is not None:
        return _counted(value, entry.loss_weights, reduction.mask, size)
    return LossTerm(value, entry.loss_weights)


def _counted(value: Any, loss_weight: Any, counts: Any, size: Any) -> LossTerm:
    denominator = ops.stop_gradient(ops.sum(ops.cast(counts, value.dtype)))
    per_sample = ops.cast(ops.size(counts) // size, value.dtype)
    return LossTerm(value, loss_weight, denominator=denominator, per_sample=per_sample)


def _check_one_value_per_sample(name: str, values: Any, size: Any) -> None:
    """A loss that mixes the samples has another first dimension than the batch."""
    rank = values.shape.rank if hasattr(values.shape, "rank") else len(values.shape)
    first = values.shape[0] if rank else None
    known = isinstance(size, int)
    if rank == 0 or (first is not None and (not known or first % size)):
        shape = tuple(values.shape) if isinstance(values.shape, tuple) else values.shape  # PyTorch writes its own kind.
        raise UnsupportedStep(
            f"the loss {name!r} returns values of the shape {shape} for one micro-batch, not one per sample, so "
            "it cannot be known what it divides by; return one value per sample, or leave micro_batches at 1"
        )
