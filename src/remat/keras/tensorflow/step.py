"""Keras on TensorFlow: a training step that runs a batch in micro-batches and updates once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from remat.keras import _private
from remat.keras.shared.batch_statistics import BatchStatistics
from remat.keras.shared.step import (
    CheckedStep,
    LossGroups,
    LossTerm,
    PieceLoss,
    check_variables,
    loss_terms,
    names_of,
    report_loss,
)
from remat.tensorflow._private import FuncGraph
from remat.tensorflow.micro_batches.gradients import GradientSums, may_be_sparse
from remat.tensorflow.micro_batches.loop import Carried, Size, batch_size_of, for_each_micro_batch

# Called while a micro-batch's computation is traced, with the batch's tensors and the pieces cut from them.
OnBody = Callable[[Sequence[tf.Tensor], Sequence[tf.Tensor]], None]


class MicroBatchedStep(CheckedStep):
    """In place of ``train_step``: ``count`` micro-batches in one loop of the graph, then one update."""

    _instead = "remat.tensorflow.value_and_grad"

    def __call__(self, model: keras.Model, data: Any, on_body: OnBody | None) -> dict[str, Any]:
        """One training step on a batch; returns the logs.

        Raises:
            UnsupportedStep: for a batch whose parts do not agree on its size, or a loss of which it cannot be known
                what it divides by.
        """
        self._check(model)
        return CutBatch(model, data, self._count, self._statistics(model), on_body).run()

    def without_update(self, model: keras.Model, data: Any, on_body: OnBody) -> list[tf.Tensor]:
        """Everything but the update: what the micro-batches sum up to.

        Raises:
            UnsupportedStep: as above.
        """
        self._check(model)
        sums, rows = CutBatch(model, data, self._count, BatchStatistics(model), on_body).accumulated()
        return [*sums.flat(), *rows]


@dataclass
class _Sums:
    """What the loop hands from one micro-batch to the next.

    Attributes:
        values: one for each term of the loss.
        denominators: one for each counted term.
        bounds: what the gradients of these are divided by meanwhile.
        additional: what layers add to the loss.
        statistics: of the layers that couple the samples of a batch.
        gradients: see ``GradientSums``.
    """

    values: list[tf.Tensor]
    denominators: list[tf.Tensor]
    bounds: list[tf.Tensor]
    additional: tf.Tensor
    statistics: list[tf.Tensor]
    gradients: list[tf.Tensor]

    def flat(self) -> Carried:
        return list(tf.nest.flatten(list(vars(self).values())))

    def like(self, flat: Sequence[tf.Tensor]) -> _Sums:
        return _Sums(*tf.nest.pack_sequence_as(list(vars(self).values()), list(flat)))


class CutBatch:
    """A batch, its micro-batches, and what they come to.

    Args:
        model: compiled and built.
        data: the batch.
        count: how many micro-batches.
        statistics: of the model's layers.
        on_body: told of the loop's body while it is traced.

    Raises:
        UnsupportedStep: for a batch whose parts do not agree on its size, or a loss of which it cannot be known what it
            divides by.
    """

    def __init__(
        self, model: keras.Model, data: Any, count: int, statistics: BatchStatistics, on_body: OnBody | None
    ) -> None:
        self._model = model
        self._data = keras.utils.unpack_x_y_sample_weight(data)
        self._count = count
        self._statistics = statistics
        self._on_body = on_body
        self._dtype = tf.as_dtype(keras.config.floatx())
        self._leaves = [leaf for leaf in tf.nest.flatten(self._data) if leaf is not None]
        self._batch_size = batch_size_of(self._leaves, names_of(self._data))
        check_variables(model.trainable_weights)
        self._terms, self._groups, self._gradients = self._inspected()

    def run(self) -> dict[str, Any]:
        """Compute, update, and return the logs."""
        before = self._statistics.values()
        sums, rows = self.accumulated()
        self._statistics.move(before, sums.statistics)
        factors = self._groups.factors(sums.bounds, sums.denominators)
        self._update(self._gradients.totals(sums.gradients, rows, factors))
        # Keras counts a batch of unknown size once.
        static_size = self._batch_size if isinstance(self._batch_size, int) else None
        return report_loss(
            self._model,
            self._terms,
            self._groups,
            sums.values,
            sums.denominators,
            sums.additional,
            (static_size, self._batch_size),
        )

    def accumulated(self) -> tuple[_Sums, list[tf.Tensor]]:
        """Run the micro-batches; what they sum up to, and the joined rows of sparse gradients."""
        zero = tf.zeros((), self._dtype)
        empty = _Sums(
            values=[zero] * len(self._terms),
            denominators=[zero] * len(self._groups.counted),
            bounds=[zero] * len(self._groups.counted),
            additional=zero,
            statistics=self._statistics.empty(),
            gradients=self._gradients.initial(),
        )

        def body(leaves: list[tf.Tensor], size: Size, carried: Carried) -> Carried:
            if self._on_body is not None:
                self._on_body(self._leaves, leaves)
            # A replica may get no sample of an epoch's last batch.
            share = tf.math.divide_no_nan(tf.cast(size, self._dtype), tf.cast(self._batch_size, self._dtype))
            data = self._packed(leaves)
            with tf.GradientTape(persistent=len(self._groups.groups) > 1) as tape:
                y_pred, terms, additional = self._forward(data, size)
                loss = PieceLoss.of(self._model, terms, additional, self._groups, share, self._batch_size)
            variables = self._model.trainable_weights
            gradients = [tape.gradient(target, variables) if variables else [] for target in loss.targets]
            sums = empty.like(carried)
            sums.gradients, rows = self._gradients.add(sums.gradients, gradients)
            sums.values = [total + value for total, value in zip(sums.values, loss.values, strict=True)]
            sums.denominators = [total + one for total, one in zip(sums.denominators, loss.denominators, strict=True)]
            sums.bounds = loss.bounds
            if loss.additional is not None:
                sums.additional += loss.additional
            sums.statistics = self._statistics.merged(sums.statistics, share)
            x, y, sample_weight = data
            self._model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
            return [*sums.flat(), *rows]

        flat = empty.flat()
        last = for_each_micro_batch(self._leaves, self._batch_size, self._count, body, flat, self._gradients.joined)
        return empty.like(last[: len(flat)]), last[len(flat) :]

    def _forward(self, data: Any, size: Size) -> tuple[Any, list[LossTerm], Any]:
        x, y, sample_weight = data
        with self._statistics.raw():
            y_pred = _private.call_in_training(self._model, x)
        terms = loss_terms(self._model, y, y_pred, sample_weight, size)
        additional = _private.additional_loss(self._model)
        return y_pred, terms, None if additional is None else tf.cast(additional, self._dtype)

    def _inspected(self) -> tuple[list[LossTerm], LossGroups, GradientSums]:
        """What the loss is made of, and how its gradients are summed: found by tracing the whole batch aside."""
        variables = self._model.trainable_weights
        with FuncGraph("remat_whole_batch").as_default() as graph:
            samples = [tf.compat.v1.placeholder(leaf.dtype, leaf.shape) for leaf in self._leaves]
            size = self._batch_size if isinstance(self._batch_size, int) else tf.shape(samples[0])[0]
            with tf.GradientTape(persistent=True) as tape:
                _, terms, additional = self._forward(self._packed(samples), size)
                groups = LossGroups.of(self._model, terms, additional)
                loss = PieceLoss.of(self._model, terms, additional, groups, tf.ones((), self._dtype), size)
            gradients = None
            if may_be_sparse(graph):
                gradients = [tape.gradient(target, variables) for target in loss.targets]
            sums = GradientSums(variables, len(groups.groups), gradients, samples)
        return terms, groups, sums

    def _packed(self, leaves: Sequence[tf.Tensor]) -> Any:
        given = iter(leaves)
        flat = [None if leaf is None else next(given) for leaf in tf.nest.flatten(self._data)]
        return tf.nest.pack_sequence_as(self._data, flat)

    def _update(self, gradients: Sequence[tf.Tensor | tf.IndexedSlices | None]) -> None:
        variables = self._model.trainable_weights
        if not variables:
            warnings.warn("The model does not have any trainable weights.", stacklevel=2)
            return
        found = [one.values if isinstance(one, tf.IndexedSlices) else one for one in gradients if one is not None]
        # What an update computes from its slots alone would otherwise be made early, and lie beside the activations.
        with tf.control_dependencies(found):
            self._model.optimizer.apply_gradients(zip(gradients, variables, strict=True))
