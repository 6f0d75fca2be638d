"""A training step of Keras that runs a batch in micro-batches and updates once, with the full batch's numbers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from remat.core.errors import UnsupportedStep
from remat.keras import _private
from remat.keras.shared.batch_statistics import BatchStatistics
from remat.keras.shared.loss_terms import LossTerm, loss_terms
from remat.keras.shared.micro_batches import CheckedStep, check_variables, groups_of, names_of, summand
from remat.tensorflow._private import FuncGraph
from remat.tensorflow.micro_batches.loop import (
    Carried,
    Size,
    added,
    batch_size_of,
    empty_accumulators,
    for_each_micro_batch,
)

# Called while a micro-batch's computation is traced, with the batch's tensors and the pieces cut from them.
OnBody = Callable[[Sequence[tf.Tensor], Sequence[tf.Tensor]], None]


@dataclass
class _Totals:
    """What the loop over the micro-batches sums up."""

    values: list[tf.Tensor]
    denominators: list[tf.Tensor]
    bounds: list[tf.Tensor]
    additional: tf.Tensor
    statistics: list[tf.Tensor]
    gradients: list[list[tf.Tensor]]

    def flat(self) -> Carried:
        return list(tf.nest.flatten(list(vars(self).values())))

    def like(self, flat: Sequence[tf.Tensor]) -> _Totals:
        return _Totals(*tf.nest.pack_sequence_as(list(vars(self).values()), list(flat)))


@dataclass(frozen=True)
class _Sums:
    """The totals, and what they are made of.

    Attributes:
        totals: over all micro-batches.
        terms: of the loss.
        counted: numbers of the terms whose denominator is counted on the way.
        has_known: is the first group of gradients that of the terms whose denominator is known beforehand?
        has_gradient: per group, which variables have a gradient.
    """

    totals: _Totals
    terms: list[LossTerm]
    counted: list[int]
    has_known: bool
    has_gradient: list[list[bool]]


class MicroBatchedStep(CheckedStep):
    """In place of ``train_step``: ``count`` micro-batches, then one update.

    Gradients of terms whose denominator is known beforehand (samples, none) share one accumulator per variable; a term
    that divides by what a mask or weights count has its own, which is divided once, at the end.
    """

    _instead = "remat.tensorflow.value_and_grad"

    def __init__(self, model: keras.Model, count: int) -> None:
        super().__init__(model, count)
        self._warned_of_sparse = False

    def __call__(self, model: keras.Model, data: Any, on_body: OnBody | None) -> dict[str, Any]:
        """One training step on a batch; returns the logs."""
        self._check(model)
        step = _Step(model, data, self._count, self._statistics(model), on_body)
        logs = step.run()
        if step.sparse and not self._warned_of_sparse and not _sums_rows(model.optimizer):
            self._warned_of_sparse = True
            warnings.warn(
                f"{type(model.optimizer).__name__} of Keras works on each row of a sparse gradient by itself, as if a "
                f"word that occurs twice were two; with micro_batches={self._count} it gets the gradients of "
                f"{', '.join(sorted(step.sparse))} summed, so these are updated as by a dense gradient",
                stacklevel=2,
            )
        return logs

    def without_update(self, model: keras.Model, data: Any, on_body: OnBody) -> list[tf.Tensor]:
        """Everything but the update: what the micro-batches sum up to."""
        self._check(model)
        return _Step(model, data, self._count, BatchStatistics(model), on_body).accumulated().totals.flat()


class _Step:
    def __init__(
        self, model: keras.Model, data: Any, count: int, statistics: BatchStatistics, on_body: OnBody | None
    ) -> None:
        self.model = model
        self.data = keras.utils.unpack_x_y_sample_weight(data)
        self.count = count
        self.statistics = statistics
        self.on_body = on_body
        self.variables = model.trainable_weights
        self.dtype = tf.as_dtype(keras.config.floatx())
        self.sparse: set[str] = set()
        flat = tf.nest.flatten(self.data)
        self.leaves = [leaf for leaf in flat if leaf is not None]
        self.batch_size = batch_size_of(self.leaves, names_of(self.data))
        check_variables(self.variables)

    def run(self) -> dict[str, Any]:
        """Compute, update, and return the logs."""
        before = self.statistics.values()
        sums = self.accumulated()
        totals = sums.totals
        self.statistics.move(before, totals.statistics)
        factors = [tf.math.divide_no_nan(b, d) for b, d in zip(totals.bounds, totals.denominators, strict=True)]
        self._update(totals.gradients, ([None] if sums.has_known else []) + factors, sums.has_gradient)
        for n, denominator in zip(sums.counted, totals.denominators, strict=True):
            totals.values[n] = tf.math.divide_no_nan(totals.values[n], denominator)
        return self._logs(sums.terms, totals.values, totals.additional)

    def accumulated(self) -> _Sums:
        """Run the micro-batches; what they sum up to."""
        model = self.model
        terms, has_additional = self._inspected()
        groups, counted = groups_of(terms, has_additional=has_additional)
        has_known = len(groups) > len(counted)
        if not groups:
            raise UnsupportedStep(f"{model.name!r} has no loss; give compile() one")
        has_gradient = [[False] * len(self.variables) for _ in groups]
        zero = tf.zeros((), self.dtype)
        empty = _Totals(
            values=[zero] * len(terms),
            denominators=[zero] * len(counted),
            bounds=[zero] * len(counted),
            additional=zero,
            statistics=self.statistics.empty(),
            gradients=[empty_accumulators(self.variables) for _ in groups],
        )

        def body(leaves: list[tf.Tensor], size: Size, carried: Carried) -> Carried:
            if self.on_body is not None:
                self.on_body(self.leaves, leaves)
            totals = empty.like(carried)
            # A replica may get no sample of an epoch's last batch.
            share = tf.math.divide_no_nan(tf.cast(size, self.dtype), tf.cast(self.batch_size, self.dtype))
            x, y, sample_weight = self._packed(leaves)
            with tf.GradientTape(persistent=len(groups) > 1) as tape:
                y_pred, found, additional = self._forward(x, y, sample_weight, size)
                values = [summand(term, share) for term in found]
                bounds = [found[n].per_sample * tf.cast(self.batch_size, self.dtype) for n in counted]
                scaled = dict(zip(counted, bounds, strict=True))
                targets = []
                for group in groups:
                    parts = [
                        term.weighted(values[n] if n not in scaled else tf.math.divide_no_nan(values[n], scaled[n]))
                        for n in group
                        for term in [found[n]]
                    ]
                    if additional is not None and group is groups[0]:
                        parts.append(additional * share)
                    targets.append(model.optimizer.scale_loss(tf.add_n(parts)))
            for number, target in enumerate(targets):
                gradients = tape.gradient(target, self.variables) if self.variables else []
                for n, gradient in enumerate(gradients):
                    has_gradient[number][n] |= gradient is not None
                    if isinstance(gradient, tf.IndexedSlices):
                        self.sparse.add(self.variables[n].path)
                    totals.gradients[number][n] = added(totals.gradients[number][n], gradient)
            totals.values = [total + value for total, value in zip(totals.values, values, strict=True)]
            totals.denominators = [
                total + found[n].denominator for total, n in zip(totals.denominators, counted, strict=True)
            ]
            totals.bounds = bounds
            if additional is not None:
                totals.additional += additional * share
            totals.statistics = self.statistics.merged(totals.statistics, share)
            model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
            return totals.flat()

        last = for_each_micro_batch(self.leaves, self.batch_size, self.count, body, empty.flat())
        return _Sums(empty.like(last), terms, counted, has_known, has_gradient)

    def _inspected(self) -> tuple[list[LossTerm], bool]:
        """What the loss is made of: found by tracing it once, aside."""
        size = self.batch_size if isinstance(self.batch_size, int) else None
        with FuncGraph("remat_loss_terms").as_default():
            x, y, sample_weight = self.data
            if size is None:
                size = tf.shape(self.leaves[0])[0]
            _, terms, additional = self._forward(x, y, sample_weight, size)
        return terms, additional is not None

    def _forward(self, x: Any, y: Any, sample_weight: Any, size: Size) -> tuple[Any, list[LossTerm], Any]:
        with self.statistics.raw():
            y_pred = _private.call_in_training(self.model, x)
        terms = loss_terms(self.model, y, y_pred, sample_weight, size)
        additional = _private.additional_loss(self.model)
        return y_pred, terms, None if additional is None else tf.cast(additional, self.dtype)

    def _packed(self, leaves: Sequence[tf.Tensor]) -> Any:
        given = iter(leaves)
        flat = [None if leaf is None else next(given) for leaf in tf.nest.flatten(self.data)]
        return tf.nest.pack_sequence_as(self.data, flat)

    def _update(
        self, gradients: list[list[tf.Tensor]], factors: list[tf.Tensor | None], has_gradient: list[list[bool]]
    ) -> None:
        if not self.variables:
            warnings.warn("The model does not have any trainable weights.", stacklevel=2)
            return
        totals: list[tf.Tensor | None] = []
        for n, variable in enumerate(self.variables):
            parts = [
                group[n] if factor is None else group[n] * tf.cast(factor, group[n].dtype)
                for group, factor, has in zip(gradients, factors, has_gradient, strict=True)
                if has[n]
            ]
            totals.append(tf.cast(tf.add_n(parts), variable.dtype) if parts else None)
        # What an update computes from its slots alone would otherwise be made early, and lie beside the activations.
        with tf.control_dependencies([total for total in totals if total is not None]):
            self.model.optimizer.apply_gradients(zip(totals, self.variables, strict=True))

    def _logs(self, terms: list[LossTerm], values: list[tf.Tensor], additional: tf.Tensor) -> dict[str, Any]:
        model = self.model
        compile_loss = _private.compile_loss_of(model)
        static_size = self.batch_size if isinstance(self.batch_size, int) else None
        if compile_loss is not None:
            for metric, value in zip(compile_loss.metrics, values, strict=False):
                # Keras counts a batch of unknown size once.
                metric.update_state(_private.of_one_replica(value), sample_weight=static_size)
        total = tf.add_n([additional, *(term.weighted(value) for term, value in zip(terms, values, strict=True))])
        _private.update_loss_tracker(model, total, self.batch_size)
        return dict(model.get_metrics_result())


def _sums_rows(optimizer: Any) -> bool:
    """Does the optimizer add up the rows of a sparse gradient before it does anything else with them?"""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    clips = (optimizer.clipnorm, optimizer.global_clipnorm, optimizer.clipvalue)
    linear = type(optimizer) in (keras.optimizers.SGD, keras.optimizers.Lion)
    return linear and all(clip is None for clip in clips)
