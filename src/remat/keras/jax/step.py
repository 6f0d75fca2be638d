"""A training step of Keras on JAX that runs a batch in micro-batches and updates once: the full batch's numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax import lax

from remat.core.errors import UnsupportedStep
from remat.jax.planned_part import Transform
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


class JaxMicroBatchedStep(CheckedStep):
    """In place of ``train_step``: ``count`` micro-batches, one after the other in ``lax.scan``, then one update.

    The pieces are those of ``numpy.array_split``: where the count does not divide the batch, the first ones have one
    sample more. Terms of the loss share accumulators as on TensorFlow, see ``groups_of``.
    """

    _instead = "remat.jax.value_and_grad"

    def __call__(self, model: keras.Model, state: Any, data: Any, transform: Transform) -> tuple[dict[str, Any], Any]:
        """One training step on a batch; returns the logs and the new state.

        Args:
            model: the model.
            state: variables as Keras on JAX passes them: trainable, others, the optimizer's, the metrics'.
            data: the batch.
            transform: each call of one micro-batch's computation goes through it.

        Raises:
            UnsupportedStep: for a batch whose parts do not agree on its size, or a loss of which it cannot be known
                what it divides by.
        """
        self._check(model)
        return _Step(model, data, self._count, self._statistics(model)).run(state, transform)


class _Step:
    def __init__(self, model: keras.Model, data: Any, count: int, statistics: BatchStatistics) -> None:
        self.model = model
        self.statistics = statistics
        self.dtype = jnp.dtype(keras.config.floatx())
        unpacked = keras.utils.unpack_x_y_sample_weight(data)
        self.leaves, self.structure = jax.tree.flatten(unpacked)
        self.batch_size = batch_size_of(self.leaves, names_of(unpacked))
        self.sizes = sizes_of_pieces(self.batch_size, count)
        check_variables(model.trainable_variables)

    def run(self, state: Any, transform: Transform) -> tuple[dict[str, Any], Any]:
        """The step."""
        trainable, others, of_optimizer, of_metrics = state
        terms, has_additional = self._inspected(trainable, others)
        groups, counted = groups_of(terms, has_additional=has_additional)
        if not groups:
            raise UnsupportedStep(f"{self.model.name!r} has no loss; give compile() one")
        one_piece = transform(_Piece(self, groups, counted))

        with self._scope(non_trainable=others):
            before, statistics = self.statistics.values(), self.statistics.empty()
        shapes = jax.eval_shape(one_piece, *state, self._piece(0, self.sizes[0][0]))
        sums = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes[0])
        carried = (sums, statistics, others, of_metrics)
        bounds: Any = ()
        for size, times, first in self.sizes:

            def add(carried: Any, number: Any, size: int = size, first: int = first) -> tuple[Any, Any]:
                sums, seen, others, of_metrics = carried
                piece = self._piece(first + number * size, size)
                added, bounds, new_others, new_metrics = one_piece(trainable, others, of_optimizer, of_metrics, piece)
                with self._scope(non_trainable=new_others):
                    seen = self.statistics.merged(seen, jnp.asarray(size / self.batch_size, self.dtype))
                sums = jax.tree.map(jnp.add, sums, added)
                return _typed_as((sums, seen, new_others, new_metrics), carried), bounds

            carried, every = lax.scan(add, carried, jnp.arange(times))
            bounds = jax.tree.map(lambda stack: stack[-1], every)
        (values, denominators, additional, gradients), seen, others, of_metrics = carried

        with self._scope(non_trainable=others) as scope:
            self.statistics.move(before, seen)
        others = _values(scope, self.model.non_trainable_variables)
        factors: list[Any] = [None] * (len(groups) - len(counted))
        factors += [_quotient(bound, total) for bound, total in zip(bounds, denominators, strict=True)]
        averaged = []
        for variable, parts in zip(trainable, zip(*gradients, strict=True), strict=True):
            pairs = zip(parts, factors, strict=True)
            total = sum(part if factor is None else part * factor.astype(part.dtype) for part, factor in pairs)
            averaged.append(total.astype(variable.dtype))
        trainable, of_optimizer = self.model.optimizer.stateless_apply(of_optimizer, averaged, trainable)
        for number, total in zip(counted, denominators, strict=True):
            values[number] = _quotient(values[number], total)
        logs, of_metrics = self._logs(terms, values, additional, of_metrics)
        return logs, (trainable, others, of_optimizer, of_metrics)

    def forward(self, trainable: Any, others: Any, leaves: Sequence[Any]) -> tuple[Any, Any, list[LossTerm], Any]:
        """What the model returns for a piece, its other variables afterwards, the loss's terms and what layers add."""
        x, y, sample_weight = jax.tree.unflatten(self.structure, leaves)
        with self.statistics.raw():
            y_pred, others, losses = _private.stateless_call_in_training(self.model, trainable, others, x)
        with self._scope(trainable, others):
            terms = loss_terms(self.model, y, y_pred, sample_weight, leaves[0].shape[0])
            additional = _private.additional_loss(self.model, losses)
        return y_pred, others, terms, None if additional is None else additional.astype(self.dtype)

    def metrics(self, of_metrics: Any, leaves: Sequence[Any], y_pred: Any) -> Any:
        """The metrics' variables after one piece."""
        x, y, sample_weight = jax.tree.unflatten(self.structure, leaves)
        with self._scope(metrics=of_metrics) as scope:
            self.model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
        return _values(scope, self.model.metrics_variables)

    def _inspected(self, trainable: Any, others: Any) -> tuple[list[LossTerm], bool]:
        """What the loss is made of: found by tracing it once, aside."""
        found: list[Any] = []

        def look(trainable: Any, others: Any, leaves: Any) -> None:
            _, _, terms, additional = self.forward(trainable, others, leaves)
            found.extend((terms, additional is not None))

        jax.eval_shape(look, trainable, others, self._piece(0, self.sizes[0][0]))
        return found[0], found[1]

    def _piece(self, start: Any, size: int) -> list[Any]:
        return [lax.dynamic_slice_in_dim(leaf, start, size) for leaf in self.leaves]

    def _scope(self, trainable: Any = (), non_trainable: Any = (), metrics: Any = ()) -> Any:
        model = self.model
        pairs = [
            *zip(model.trainable_variables if trainable else (), trainable, strict=True),
            *zip(model.non_trainable_variables if non_trainable else (), non_trainable, strict=True),
            *zip(model.metrics_variables if metrics else (), metrics, strict=True),
        ]
        return keras.StatelessScope(state_mapping=pairs)

    def _logs(self, terms: list[LossTerm], values: list[Any], additional: Any, of_metrics: Any) -> tuple[Any, Any]:
        model = self.model
        compile_loss = _private.compile_loss_of(model)
        total = sum((term.weighted(value) for term, value in zip(terms, values, strict=True)), additional)
        with self._scope(metrics=of_metrics) as scope:
            if compile_loss is not None:
                for metric, value in zip(compile_loss.metrics, values, strict=False):
                    metric.update_state(value, sample_weight=self.batch_size)
            _private.update_loss_tracker(model, total, self.batch_size)
            logs = dict(model.get_metrics_result())
        return logs, _values(scope, model.metrics_variables)


class _Piece:
    """One micro-batch: its share of all sums, and the variables that it leaves behind."""

    def __init__(self, step: _Step, groups: list[list[int]], counted: list[int]) -> None:
        self.step = step
        self.groups = groups
        self.counted = counted

    def __call__(self, trainable: Any, others: Any, of_optimizer: Any, of_metrics: Any, leaves: list[Any]) -> Any:
        step, model = self.step, self.step.model
        share = jnp.asarray(leaves[0].shape[0] / step.batch_size, step.dtype)

        def target_of(trainable: Any, number: int) -> tuple[Any, Any]:
            y_pred, after, terms, additional = step.forward(trainable, others, leaves)
            values = [summand(term, share) for term in terms]
            bounds = {n: _per_sample(terms[n]) * jnp.asarray(step.batch_size, step.dtype) for n in self.counted}
            parts = [
                terms[n].weighted(_quotient(values[n], bounds[n]) if n in bounds else values[n])
                for n in self.groups[number]
            ]
            if additional is not None and number == 0:
                parts.append(additional * share)
            with keras.StatelessScope(state_mapping=list(zip(model.optimizer.variables, of_optimizer, strict=True))):
                target = model.optimizer.scale_loss(sum(parts))
            denominators = [terms[n].denominator for n in self.counted]
            added = jnp.zeros((), step.dtype) if additional is None else additional * share
            return target, (y_pred, after, values, denominators, list(bounds.values()), added)

        gradients = []
        for number in range(len(self.groups)):
            gradient, aux = jax.grad(target_of, has_aux=True)(trainable, number)
            gradients.append([g.astype(jnp.promote_types(g.dtype, jnp.float32)) for g in gradient])
        y_pred, after, values, denominators, bounds, added = aux
        metrics = step.metrics(of_metrics, leaves, y_pred)
        return (values, denominators, added, gradients), bounds, after, metrics


def _per_sample(term: LossTerm) -> Any:
    assert term.per_sample is not None
    return term.per_sample


def _quotient(value: Any, divisor: Any) -> Any:
    """The quotient, 0 where nothing is divided by nothing."""
    return jnp.where(divisor == 0, 0, value / jnp.where(divisor == 0, 1, divisor))


def _values(scope: Any, variables: Sequence[Any]) -> list[Any]:
    return [variable.value if (new := scope.get_current_value(variable)) is None else new for variable in variables]


def _typed_as(values: Any, like: Any) -> Any:
    """What a loop carries keeps its types."""
    return jax.tree.map(lambda value, old: lax.convert_element_type(value, jnp.result_type(old)), values, like)
