"""A training step in micro-batches: what is checked, how the loss is taken apart, and how it is put together again.

Every loss of Keras is a sum over a denominator. The full batch's loss is the sum of the sums over the sum of the
denominators, which is not the mean of the micro-batches' losses unless their denominators are equal.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import keras
from keras import ops

from remat.core.errors import UnsupportedStep
from remat.keras import _private
from remat.keras.shared.batch_statistics import BatchStatistics, coupling_layers
from remat.micro_batches.cut import count_samples, names_of_tensors


class CheckedStep:
    """What every backend's ``MicroBatchedStep`` begins with.

    Args:
        model: the model.
        count: how many micro-batches.
        warns: is a warning due for layers that couple the samples of a batch? A step that is one of several
            possibilities does not warn; ``warn`` is called when it has been chosen.

    Raises:
        UnsupportedStep: for a model with its own ``train_step``, ``compute_loss`` or ``compute_metrics``, and for
            activity regularisers where Keras sums them over the batch.
    """

    _instead: ClassVar[str]
    """What a ``train_step`` of one's own can use."""

    def __init__(self, model: keras.Model, count: int, *, warns: bool = True) -> None:
        self._count = count
        self._warns = warns
        self._check(model)

    def _check(self, model: keras.Model) -> None:
        """Refuse what a training step of our own would silently leave out. The model may have been given it since."""
        for name, advice in (
            ("train_step", f"use {self._instead} inside it"),
            ("compute_loss", "give the loss to compile() or add_loss()"),
            ("compute_metrics", "give the metrics to compile()"),
        ):
            if getattr(type(model), name) is not getattr(keras.Model, name) or name in vars(model):
                raise UnsupportedStep(
                    f"{model.name!r} has its own {name}, of which micro_batches={self._count} cannot know what it does "
                    f"to a part of a batch; {advice}, or leave micro_batches at 1"
                )
        regularised = [layer.name for layer in _private.all_layers(model) if layer.activity_regularizer is not None]
        if regularised and _private.sums_activity_losses():
            raise UnsupportedStep(
                f"Keras {keras.__version__} sums the activity_regularizer of {regularised[0]!r} over the samples of a "
                f"batch, so that micro_batches={self._count} would weigh it otherwise; Keras 3.14 takes the mean: "
                "pip install 'keras>=3.14', or leave micro_batches at 1"
            )

    def _statistics(self, model: keras.Model) -> BatchStatistics:
        """The layers that couple the samples of a batch. The first call warns of them."""
        statistics = BatchStatistics(model)
        if self._warns:
            self._warns = False
            self.warn(model)
        return statistics

    def warn(self, model: keras.Model) -> None:
        """Say which layers make micro-batches differ from full batches, if there are any."""
        if names := ", ".join(coupling_layers(model)):
            warnings.warn(
                f"micro_batches={self._count} is not the same as full batches for the BatchNormalization layers "
                f"{names}: each micro-batch is normalised by its own statistics; their moving statistics move once per "
                "update, by those of the whole batch. Recomputation (a budget with micro_batches=1) changes nothing",
                stacklevel=3,
            )


def check_variables(variables: Sequence[Any]) -> None:
    """Refuse gradients that do not add up.

    Raises:
        UnsupportedStep: for a variable that its gradient overwrites.
    """
    for variable in variables:
        if getattr(variable, "overwrite_with_gradient", False):
            raise UnsupportedStep(
                f"{variable.path!r} is overwritten by its gradient (float8), which cannot be accumulated; leave "
                "micro_batches at 1"
            )


def names_of(data: Any) -> list[str]:
    """What each tensor of a batch (x, y, sample_weight) is called in an error."""
    names = []
    for part, name in zip(data, ("x", "y", "sample_weight"), strict=True):
        names += names_of_tensors(name, sum(leaf is not None for leaf in keras.tree.flatten(part)))
    return names


def batch_size_of(leaves: Sequence[Any], names: Sequence[str]) -> int:
    """Samples of a batch whose shapes are known.

    Raises:
        UnsupportedStep: where its tensors have no first axis, or do not agree.
    """
    samples = count_samples([leaf.shape for leaf in leaves], names)
    assert samples is not None, "the shapes are known"
    return samples


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


@dataclass(frozen=True)
class LossGroups:
    """Which terms of the loss are differentiated together.

    Terms whose denominator is known beforehand (samples, none) are one group, and what layers add belongs to it. Each
    term that divides by what a mask or weights count is a group of its own, whose gradients are divided once, at the
    end.

    Attributes:
        groups: numbers of the terms of each group, the one with known denominators first.
        counted: numbers of the terms whose denominator is counted.
    """

    groups: tuple[tuple[int, ...], ...]
    counted: tuple[int, ...]

    @classmethod
    def of(cls, model: keras.Model, terms: Sequence[LossTerm], additional: Any) -> LossGroups:
        """The groups of a loss of these terms, and of what layers add to it (None for nothing).

        Raises:
            UnsupportedStep: for a model with no loss.
        """
        counted = tuple(number for number, term in enumerate(terms) if term.denominator is not None)
        known = tuple(number for number in range(len(terms)) if number not in counted)
        first = (known,) if known or additional is not None else ()
        if not first and not counted:
            raise UnsupportedStep(f"{model.name!r} has no loss; give compile() one")
        return cls((*first, *((number,) for number in counted)), counted)

    def factors(self, bounds: Sequence[Any], denominators: Sequence[Any]) -> list[Any]:
        """What the summed gradients of each group are multiplied by at the end; None for 1.

        Args:
            bounds: what the gradients of each counted term were divided by meanwhile.
            denominators: of the whole batch, for each counted term.
        """
        known = [None] * (len(self.groups) - len(self.counted))
        return known + [ops.divide_no_nan(b, d) for b, d in zip(bounds, denominators, strict=True)]


@dataclass(frozen=True)
class PieceLoss:
    """What one micro-batch adds to the loss.

    Attributes:
        values: what each term adds to its sum over the micro-batches.
        denominators: what each counted term adds to its denominator.
        bounds: what the gradient of each counted term is divided by meanwhile, so that float16 holds it.
        additional: what layers add, times the share of the batch; None where they add nothing.
        targets: what is differentiated, one for each group.
    """

    values: list[Any]
    denominators: list[Any]
    bounds: list[Any]
    additional: Any
    targets: list[Any]

    @classmethod
    def of(
        cls,
        model: keras.Model,
        terms: Sequence[LossTerm],
        additional: Any,
        groups: LossGroups,
        share: Any,
        batch_size: Any,
    ) -> PieceLoss:
        """The loss of a micro-batch.

        Args:
            model: compiled.
            terms: of the micro-batch.
            additional: what layers add, None for nothing.
            groups: of the terms.
            share: of the micro-batch in the samples of the batch.
            batch_size: samples of the batch, an int or a tensor.
        """
        additional = None if additional is None else additional * share
        values = [_summand(term, share) for term in terms]
        bounds = {n: terms[n].per_sample * ops.cast(batch_size, values[n].dtype) for n in groups.counted}
        targets = []
        for number, group in enumerate(groups.groups):
            parts = [
                terms[n].weighted(ops.divide_no_nan(values[n], bounds[n]) if n in bounds else values[n]) for n in group
            ]
            if additional is not None and number == 0:
                parts.append(additional)
            total = sum(parts[1:], start=parts[0])
            targets.append(total if model.optimizer is None else model.optimizer.scale_loss(total))
        return cls(values, [terms[n].denominator for n in groups.counted], list(bounds.values()), additional, targets)


def report_loss(
    model: keras.Model,
    terms: Sequence[LossTerm],
    groups: LossGroups,
    values: Sequence[Any],
    denominators: Sequence[Any],
    additional: Any,
    sizes: tuple[Any, Any],
) -> dict[str, Any]:
    """Count a batch's loss in what ``fit`` reports, and return the logs.

    Args:
        model: the model.
        terms: of any micro-batch.
        groups: of the terms.
        values: of the terms, summed over the micro-batches.
        denominators: of the counted terms, summed likewise.
        additional: what layers add, summed likewise.
        sizes: of the batch, as a weight of each output's loss (None where Keras counts a batch once) and of the whole
            loss.
    """
    averaged = list(values)
    for number, denominator in zip(groups.counted, denominators, strict=True):
        averaged[number] = ops.divide_no_nan(averaged[number], denominator)
    compile_loss = _private.compile_loss_of(model)
    if compile_loss is not None:
        for metric, value in zip(compile_loss.metrics, averaged, strict=False):
            metric.update_state(_private.of_one_replica(value), sample_weight=sizes[0])
    weighted = [term.weighted(value) for term, value in zip(terms, averaged, strict=True)]
    _private.update_loss_tracker(model, sum(weighted, start=additional), sizes[1])
    return dict(model.get_metrics_result())


def _summand(term: LossTerm, share: Any) -> Any:
    """What a term adds to the sum over the micro-batches; ``share`` is that of its samples."""
    if term.is_sum:
        return term.value
    return term.value * (share if term.denominator is None else term.denominator)


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
