"""A training step of Keras on PyTorch that runs a batch in micro-batches and updates once: the full batch's numbers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import keras
import torch

from remat.core.errors import UnsupportedStep
from remat.keras import _private
from remat.keras.shared.batch_statistics import BatchStatistics
from remat.keras.shared.loss_terms import LossTerm, loss_terms
from remat.keras.shared.micro_batches import (
    CheckedStep,
    batch_size_of,
    check_variables,
    groups_of,
    names_of,
    sizes_of_pieces,
    summand,
)
from remat.keras.torch.training_step import holding

# (loss function, tensors of a micro-batch) -> what its forward pass runs in.
Planned = Callable[[Callable[..., Any], Sequence[Any]], AbstractContextManager[Any]]


class TorchMicroBatchedStep(CheckedStep):
    """In place of ``train_step``: ``count`` micro-batches, one after the other, then one update.

    Terms of the loss share accumulators as on TensorFlow, see ``groups_of``. A gradient is added up where autograd puts
    it, in float32 where the variable's type is narrower.
    """

    _instead = "remat.torch.micro_batches"

    def __call__(self, model: keras.Model, data: Any, planned: Planned) -> dict[str, Any]:
        """One training step on a batch; returns the logs.

        Raises:
            UnsupportedStep: for a batch whose parts do not agree on its size, or a loss of which it cannot be known
                what it divides by.
        """
        self._check(model)
        return CutBatch(model, data, self._statistics(model)).run(self._count, planned)

    def cut(self, model: keras.Model, data: Any) -> CutBatch:
        """A batch of which single micro-batches are to be run, to plan and to time them.

        Raises:
            UnsupportedStep: as above.
        """
        self._check(model)
        return CutBatch(model, data, BatchStatistics(model))


@dataclass
class _Piece:
    """What the forward pass of a micro-batch leaves.

    Attributes:
        y_pred: what the model returned.
        terms: of the loss.
        values: what each adds to its sum.
        counted: numbers of the terms whose denominator is counted.
        bounds: for each of them, what its gradient is divided by meanwhile.
        additional: what layers add to the loss, times the share of the batch; None where they add nothing.
        targets: what is differentiated, one for each group of terms.
    """

    y_pred: Any
    terms: list[LossTerm]
    values: list[Any]
    counted: list[int]
    bounds: list[Any]
    additional: Any
    targets: list[Any]


@dataclass
class Sums:
    """Sums over the micro-batches.

    Attributes:
        terms: of the loss, of the newest micro-batch.
        counted: numbers of the terms whose denominator is counted.
        values: one for each term.
        denominators: one for each number in ``counted``.
        bounds: what the gradients of these are divided by meanwhile.
        additional: what layers add to the loss.
        gradients: one for each group of terms and variable, None where there is none.
    """

    terms: list[LossTerm] = field(default_factory=list)
    counted: list[int] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    denominators: list[Any] = field(default_factory=list)
    bounds: list[Any] = field(default_factory=list)
    additional: Any = 0.0
    gradients: list[list[Any]] = field(default_factory=list)


class CutBatch:
    """A batch, its micro-batches, and what they come to.

    Args:
        model: compiled and built.
        data: the batch.
        statistics: of the model's layers.

    Attributes:
        batch_size: samples.
        leaves: the tensors of the batch.

    Raises:
        UnsupportedStep: for a batch whose parts do not agree on its size.
    """

    def __init__(self, model: keras.Model, data: Any, statistics: BatchStatistics) -> None:
        self.model = model
        self.statistics = statistics
        self.data = keras.utils.unpack_x_y_sample_weight(data)
        flat = keras.tree.flatten(self.data)
        self.leaves = [keras.ops.convert_to_tensor(leaf) for leaf in flat if leaf is not None]
        self.batch_size = batch_size_of(self.leaves, names_of(self.data))
        self.variables = model.trainable_weights
        check_variables(self.variables)

    def run(self, count: int, planned: Planned) -> dict[str, Any]:
        """Compute, update, and return the logs."""
        before, seen, sums = self.statistics.values(), self.statistics.empty(), Sums()
        self.model.zero_grad()
        for size, times, first in sizes_of_pieces(self.batch_size, count):
            for start in range(first, first + times * size, size):
                self.run_piece(self.piece(size, start), sums, planned)
                seen = self.statistics.merged(seen, size / self.batch_size)
        self.statistics.move(before, seen)
        self._update(sums)
        for number, denominator in zip(sums.counted, sums.denominators, strict=True):
            sums.values[number] = _quotient(sums.values[number], denominator)
        return self._logs(sums)

    def piece(self, size: int, start: int = 0) -> list[Any]:
        """The tensors of the micro-batch of so many samples that begins with a sample."""
        return [leaf[start : start + size] for leaf in self.leaves]

    def loss_of_piece(self, *leaves: Any) -> Any:
        """What is differentiated for a micro-batch, as one number, for its plan."""
        piece = self._forward(leaves)
        return holding(sum(piece.targets), piece.y_pred)

    def run_piece(self, leaves: Sequence[Any], sums: Sums, planned: Planned) -> None:
        """Forward and backward pass and metrics of a micro-batch. Nothing of it lives on but what it adds to sums."""
        with planned(self.loss_of_piece, leaves):
            piece = self._forward(leaves)
        self._differentiate(piece.targets, sums)
        with torch.no_grad():
            detached = [value.detach() for value in piece.values]
            denominators = [piece.terms[n].denominator for n in piece.counted]
            sums.terms, sums.counted = piece.terms, piece.counted
            sums.values = _added(sums.values, detached)
            sums.denominators = _added(sums.denominators, denominators)
            sums.bounds = piece.bounds
            if piece.additional is not None:
                sums.additional = sums.additional + piece.additional.detach()
            x, y, sample_weight = self._packed(leaves)
            self.model.compute_metrics(x, y, piece.y_pred, sample_weight=sample_weight)

    def _forward(self, leaves: Sequence[Any]) -> _Piece:
        model = self.model
        x, y, sample_weight = self._packed(leaves)
        # Where there is a mask Keras multiplies the weights by it in place, on PyTorch.
        sample_weight = keras.tree.map_structure(lambda one: None if one is None else one.clone(), sample_weight)
        share = leaves[0].shape[0] / self.batch_size
        with self.statistics.raw():
            y_pred = _private.call_in_training(model, x)
        terms = loss_terms(model, y, y_pred, sample_weight, leaves[0].shape[0])
        additional = _private.additional_loss(model)
        additional = None if additional is None else additional * share
        groups, counted = groups_of(terms, has_additional=additional is not None)
        if not groups:
            raise UnsupportedStep(f"{model.name!r} has no loss; give compile() one")
        values = [summand(term, share) for term in terms]
        bounds = {n: _per_sample(terms[n]) * self.batch_size for n in counted}
        targets = []
        for group in groups:
            parts = [terms[n].weighted(_quotient(values[n], bounds[n]) if n in bounds else values[n]) for n in group]
            if additional is not None and group is groups[0]:
                parts.append(additional)
            total = sum(parts[1:], start=parts[0])
            targets.append(total if model.optimizer is None else model.optimizer.scale_loss(total))
        return _Piece(y_pred, terms, values, counted, list(bounds.values()), additional, targets)

    def _differentiate(self, targets: Sequence[Any], sums: Sums) -> None:
        """Add the gradients of each group of terms to its sums."""
        if not self.variables:
            return
        if not sums.gradients:
            sums.gradients = [[None] * len(self.variables) for _ in targets]
        for number, target in enumerate(targets):
            totals = sums.gradients[number]
            for variable, total in zip(self.variables, totals, strict=True):
                # Autograd adds to what it finds.
                variable.value.grad = total if total is not None and total.dtype == variable.value.dtype else None
            target.backward(retain_graph=number + 1 < len(targets))
            for n, variable in enumerate(self.variables):
                gradient, variable.value.grad = variable.value.grad, None
                if gradient is not None and gradient.dtype in (torch.float16, torch.bfloat16):
                    wide = gradient.float()
                    gradient = wide if totals[n] is None else totals[n].add_(wide)
                totals[n] = totals[n] if gradient is None else gradient

    def _packed(self, leaves: Sequence[Any]) -> Any:
        given = iter(leaves)
        flat = [None if leaf is None else next(given) for leaf in keras.tree.flatten(self.data)]
        return keras.tree.pack_sequence_as(self.data, flat)

    def _update(self, sums: Sums) -> None:
        if not self.variables:
            warnings.warn("The model does not have any trainable weights.", stacklevel=2)
            return
        known = len(sums.gradients) - len(sums.denominators)
        factors = [_quotient(bound, total) for bound, total in zip(sums.bounds, sums.denominators, strict=True)]
        averaged: list[Any] = []
        with torch.no_grad():
            for n, variable in enumerate(self.variables):
                parts = [
                    group[n] if number < known else group[n] * factors[number - known].to(group[n].dtype)
                    for number, group in enumerate(sums.gradients)
                    if group[n] is not None
                ]
                total = sum(parts[1:], start=parts[0]) if parts else None
                averaged.append(None if total is None else total.to(variable.value.dtype))
            sums.gradients.clear()
            self.model.optimizer.apply(averaged, self.variables)

    def _logs(self, sums: Sums) -> dict[str, Any]:
        model = self.model
        compile_loss = _private.compile_loss_of(model)
        with torch.no_grad():
            if compile_loss is not None:
                for metric, value in zip(compile_loss.metrics, sums.values, strict=False):
                    metric.update_state(value, sample_weight=self.batch_size)
            weighted = [term.weighted(value) for term, value in zip(sums.terms, sums.values, strict=True)]
            _private.update_loss_tracker(model, sum(weighted, start=sums.additional), self.batch_size)
        return dict(model.get_metrics_result())


def _per_sample(term: LossTerm) -> Any:
    assert term.per_sample is not None
    return term.per_sample


def _quotient(value: Any, divisor: Any) -> Any:
    """The quotient, 0 where nothing is divided by nothing."""
    return keras.ops.divide_no_nan(value, divisor)


def _added(totals: list[Any], values: Sequence[Any]) -> list[Any]:
    return [total + value for total, value in zip(totals, values, strict=True)] if totals else list(values)
