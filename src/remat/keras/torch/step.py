"""Keras on PyTorch: a training step that runs a batch in micro-batches and updates once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import torch

from remat.keras import _private
from remat.keras.shared.batch_statistics import BatchStatistics
from remat.keras.shared.step import (
    CheckedStep,
    LossGroups,
    LossTerm,
    PieceLoss,
    batch_size_of,
    check_variables,
    loss_terms,
    names_of,
    report_loss,
)
from remat.keras.torch.trace import holding
from remat.micro_batches.cut import cut

# (the batch, tensors of a micro-batch) -> what its forward pass leaves.
Forward = Callable[["CutBatch", Sequence[Any]], "Piece"]


class MicroBatchedStep(CheckedStep):
    """In place of ``train_step``: ``count`` micro-batches, one after the other, then one update.

    A gradient is added up where autograd puts it, in float32 where the variable's type is narrower.
    """

    _instead = "remat.torch.micro_batches"

    def __call__(self, model: keras.Model, data: Any, forward: Forward) -> dict[str, Any]:
        """One training step on a batch; returns the logs.

        Args:
            model: compiled.
            data: the batch.
            forward: runs the forward pass of a micro-batch.

        Raises:
            UnsupportedStep: for a batch whose parts do not agree on its size, or a loss of which it cannot be known
                what it divides by.
        """
        self._check(model)
        return CutBatch(model, data, self._statistics(model)).run(self._count, forward)

    def cut(self, model: keras.Model, data: Any) -> CutBatch:
        """A batch of which single micro-batches are to be run, to plan and to time them.

        Raises:
            UnsupportedStep: as above.
        """
        self._check(model)
        return CutBatch(model, data, BatchStatistics(model))


@dataclass(frozen=True)
class Piece:
    """What the forward pass of a micro-batch leaves.

    Attributes:
        y_pred: what the model returned.
        terms: of the loss.
        groups: of the terms.
        loss: what it adds to the loss.
    """

    y_pred: Any
    terms: list[LossTerm]
    groups: LossGroups
    loss: PieceLoss


@dataclass
class Sums:
    """Sums over the micro-batches, and of the newest of them what the end needs; nothing that holds activations.

    Attributes:
        terms: of the loss, of the newest micro-batch.
        groups: of the terms; None before the first micro-batch.
        bounds: what the gradients of counted terms are divided by meanwhile.
        values: one for each term.
        denominators: one for each counted term.
        additional: what layers add to the loss.
        gradients: one for each group of terms and variable, None where there is none.
    """

    terms: list[LossTerm] = field(default_factory=list)
    groups: LossGroups | None = None
    bounds: list[Any] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    denominators: list[Any] = field(default_factory=list)
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
        targets: how many numbers are differentiated for a micro-batch; None before ``loss_of_piece`` was called.

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
        self.targets: int | None = None

    def run(self, count: int, forward: Forward) -> dict[str, Any]:
        """Compute, update, and return the logs."""
        before, seen, sums = self.statistics.values(), self.statistics.empty(), Sums()
        self.model.zero_grad()
        for pieces in cut(self.batch_size, count):
            for start in pieces.starts:
                self.run_piece(self.piece(pieces.size, start), sums, forward)
                seen = self.statistics.merged(seen, pieces.size / self.batch_size)
        self.statistics.move(before, seen)
        assert sums.groups is not None
        with torch.no_grad():
            self._update(sums.gradients, sums.groups.factors(sums.bounds, sums.denominators))
            sizes = (self.batch_size, self.batch_size)
            return report_loss(
                self.model, sums.terms, sums.groups, sums.values, sums.denominators, sums.additional, sizes
            )

    def piece(self, size: int, start: int = 0) -> list[Any]:
        """The tensors of the micro-batch of so many samples that begins with a sample."""
        return [leaf[start : start + size] for leaf in self.leaves]

    def loss_of_piece(self, *leaves: Any) -> Any:
        """What is differentiated for a micro-batch, as one number, for its plan."""
        piece = self.forward(leaves)
        self.targets = len(piece.loss.targets)
        return holding(sum(piece.loss.targets), piece.y_pred)

    def forward(self, leaves: Sequence[Any]) -> Piece:
        """The forward pass of a micro-batch."""
        x, y, sample_weight = self.packed(leaves)
        with self.statistics.raw():
            return piece_of(self.model, x, y, sample_weight, self.batch_size)

    def run_piece(self, leaves: Sequence[Any], sums: Sums, forward: Forward) -> None:
        """Forward and backward pass and metrics of a micro-batch. Nothing of it lives on but what it adds to sums."""
        piece = forward(self, leaves)
        loss = piece.loss
        self._differentiate(loss.targets, sums)
        with torch.no_grad():
            sums.terms, sums.groups, sums.bounds = piece.terms, piece.groups, loss.bounds
            sums.values = _added(sums.values, [value.detach() for value in loss.values])
            sums.denominators = _added(sums.denominators, loss.denominators)
            if loss.additional is not None:
                sums.additional = sums.additional + loss.additional.detach()
            x, y, sample_weight = self.packed(leaves)
            self.model.compute_metrics(x, y, piece.y_pred, sample_weight=sample_weight)

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

    def packed(self, leaves: Sequence[Any]) -> Any:
        """Inputs, targets and sample weights of a micro-batch, given its tensors."""
        given = iter(leaves)
        flat = [None if leaf is None else next(given) for leaf in keras.tree.flatten(self.data)]
        return keras.tree.pack_sequence_as(self.data, flat)

    def _update(self, gradients: list[list[Any]], factors: Sequence[Any]) -> None:
        if not self.variables:
            warnings.warn("The model does not have any trainable weights.", stacklevel=2)
            return
        averaged: list[Any] = []
        for n, variable in enumerate(self.variables):
            parts = [
                group[n] if factor is None else group[n] * factor.to(group[n].dtype)
                for group, factor in zip(gradients, factors, strict=True)
                if group[n] is not None
            ]
            total = sum(parts[1:], start=parts[0]) if parts else None
            averaged.append(None if total is None else total.to(variable.value.dtype))
        gradients.clear()
        self.model.optimizer.apply(averaged, self.variables)


def piece_of(model: keras.Model, x: Any, y: Any, sample_weight: Any, batch_size: int) -> Piece:
    """What the forward pass of a micro-batch leaves, of a batch of so many samples."""
    # Where there is a mask Keras multiplies the weights by it in place, on PyTorch.
    sample_weight = keras.tree.map_structure(lambda one: None if one is None else one.clone(), sample_weight)
    size = next(leaf for leaf in keras.tree.flatten((x, y)) if leaf is not None).shape[0]
    y_pred = _private.call_in_training(model, x)
    terms = loss_terms(model, y, y_pred, sample_weight, size)
    additional = _private.additional_loss(model)
    groups = LossGroups.of(model, terms, additional)
    loss = PieceLoss.of(model, terms, additional, groups, size / batch_size, batch_size)
    return Piece(y_pred, terms, groups, loss)


def _added(totals: list[Any], values: Sequence[Any]) -> list[Any]:
    return [total + value for total, value in zip(totals, values, strict=True)] if totals else list(values)
