"""Keras on JAX: a training step that runs a batch in micro-batches and updates once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax import lax

from remat.jax.planned_part import Transform
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
from remat.micro_batches.cut import cut


class MicroBatchedStep(CheckedStep):
    """In place of ``train_step``: ``count`` micro-batches, one after the other in ``lax.scan``, then one update."""

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
        return CutBatch(model, data, self._count, self._statistics(model)).run(state, transform)


class CutBatch:
    """A batch, its micro-batches, and what they come to.

    Args:
        model: compiled and built.
        data: the batch.
        count: how many micro-batches.
        statistics: of the model's layers.

    Attributes:
        leaves: the arrays of the batch.
        batch_size: samples.

    Raises:
        UnsupportedStep: for a batch whose parts do not agree on its size.
    """

    def __init__(self, model: keras.Model, data: Any, count: int, statistics: BatchStatistics) -> None:
        self._model = model
        self._statistics = statistics
        self._dtype = jnp.dtype(keras.config.floatx())
        unpacked = keras.utils.unpack_x_y_sample_weight(data)
        self.leaves, self._structure = jax.tree.flatten(unpacked)
        self.batch_size = batch_size_of(self.leaves, names_of(unpacked))
        self._pieces = cut(self.batch_size, count)
        check_variables(model.trainable_variables)

    def run(self, state: Any, transform: Transform) -> tuple[dict[str, Any], Any]:
        """Compute, update, and return the logs and the new state."""
        trainable, others, of_optimizer, of_metrics = state
        terms, groups = self._inspected(trainable, others)
        one_piece = transform(self.piece_of(groups))

        with self._scope(non_trainable=others):
            before, statistics = self._statistics.values(), self._statistics.empty()
        shapes = jax.eval_shape(one_piece, *state, self._cut(0, self._pieces[0].size))
        sums = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes[0])
        carried = (sums, statistics, others, of_metrics)
        bounds: Any = ()
        for pieces in self._pieces:

            def add(carried: Any, number: Any, size: int = pieces.size, first: int = pieces.first) -> tuple[Any, Any]:
                sums, seen, others, of_metrics = carried
                leaves = self._cut(first + number * size, size)
                added, bounds, others, of_metrics = one_piece(trainable, others, of_optimizer, of_metrics, leaves)
                with self._scope(non_trainable=others):
                    seen = self._statistics.merged(seen, jnp.asarray(size / self.batch_size, self._dtype))
                sums = jax.tree.map(jnp.add, sums, added)
                return _typed_as((sums, seen, others, of_metrics), carried), bounds

            carried, every = lax.scan(add, carried, jnp.arange(pieces.times))
            bounds = jax.tree.map(lambda stack: stack[-1], every)
        (values, denominators, additional, gradients), seen, others, of_metrics = carried

        with self._scope(non_trainable=others) as scope:
            self._statistics.move(before, seen)
        others = _values(scope, self._model.non_trainable_variables)
        averaged = _averaged(trainable, gradients, groups.factors(bounds, denominators))
        trainable, of_optimizer = self._model.optimizer.stateless_apply(of_optimizer, averaged, trainable)
        with self._scope(metrics=of_metrics) as scope:
            sizes = (self.batch_size, self.batch_size)
            logs = report_loss(self._model, terms, groups, values, denominators, additional, sizes)
        return logs, (trainable, others, of_optimizer, _values(scope, self._model.metrics_variables))

    def piece_of(self, groups: LossGroups) -> Any:
        """The computation of one micro-batch, of the state and the micro-batch's arrays.

        It returns what the micro-batch adds to the sums, what the gradients of counted terms are divided by meanwhile,
        and the variables that it leaves behind.
        """

        def piece(trainable: Any, others: Any, of_optimizer: Any, of_metrics: Any, leaves: list[Any]) -> Any:
            optimizer = self._model.optimizer
            share = jnp.asarray(leaves[0].shape[0] / self.batch_size, self._dtype)

            def target_of(trainable: Any, number: int) -> tuple[Any, Any]:
                y_pred, after, terms, additional = self._forward(trainable, others, leaves)
                with keras.StatelessScope(state_mapping=list(zip(optimizer.variables, of_optimizer, strict=True))):
                    loss = PieceLoss.of(self._model, terms, additional, groups, share, self.batch_size)
                added = jnp.zeros((), self._dtype) if loss.additional is None else loss.additional
                return loss.targets[number], (y_pred, after, loss.values, loss.denominators, loss.bounds, added)

            gradients = []
            for number in range(len(groups.groups)):
                gradient, aux = jax.grad(target_of, has_aux=True)(trainable, number)
                gradients.append([g.astype(jnp.promote_types(g.dtype, jnp.float32)) for g in gradient])
            y_pred, after, values, denominators, bounds, added = aux
            metrics = self._metrics(of_metrics, leaves, y_pred)
            return (values, denominators, added, gradients), bounds, after, metrics

        return piece

    def _forward(self, trainable: Any, others: Any, leaves: Sequence[Any]) -> tuple[Any, Any, list[LossTerm], Any]:
        """What the model returns for a piece, its other variables afterwards, the loss's terms and what layers add."""
        x, y, sample_weight = jax.tree.unflatten(self._structure, leaves)
        with self._statistics.raw():
            y_pred, others, losses = _private.stateless_call_in_training(self._model, trainable, others, x)
        with self._scope(trainable, others):
            terms = loss_terms(self._model, y, y_pred, sample_weight, leaves[0].shape[0])
            additional = _private.additional_loss(self._model, losses)
        return y_pred, others, terms, None if additional is None else additional.astype(self._dtype)

    def _metrics(self, of_metrics: Any, leaves: Sequence[Any], y_pred: Any) -> Any:
        """The metrics' variables after one piece."""
        x, y, sample_weight = jax.tree.unflatten(self._structure, leaves)
        with self._scope(metrics=of_metrics) as scope:
            self._model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
        return _values(scope, self._model.metrics_variables)

    def _inspected(self, trainable: Any, others: Any) -> tuple[list[LossTerm], LossGroups]:
        """What the loss is made of: found by tracing it once, aside."""
        found: list[Any] = []

        def look(trainable: Any, others: Any, leaves: Any) -> None:
            _, _, terms, additional = self._forward(trainable, others, leaves)
            found.extend((terms, LossGroups.of(self._model, terms, additional)))

        jax.eval_shape(look, trainable, others, self._cut(0, self._pieces[0].size))
        return found[0], found[1]

    def _cut(self, start: Any, size: int) -> list[Any]:
        return [lax.dynamic_slice_in_dim(leaf, start, size) for leaf in self.leaves]

    def _scope(self, trainable: Any = (), non_trainable: Any = (), metrics: Any = ()) -> Any:
        model = self._model
        pairs = [
            *zip(model.trainable_variables if trainable else (), trainable, strict=True),
            *zip(model.non_trainable_variables if non_trainable else (), non_trainable, strict=True),
            *zip(model.metrics_variables if metrics else (), metrics, strict=True),
        ]
        return keras.StatelessScope(state_mapping=pairs)


def _averaged(variables: Sequence[Any], gradients: Sequence[Sequence[Any]], factors: Sequence[Any]) -> list[Any]:
    """One gradient per variable, from the sums of each group."""
    averaged = []
    for variable, parts in zip(variables, zip(*gradients, strict=True), strict=True):
        pairs = zip(parts, factors, strict=True)
        total = sum(part if factor is None else part * factor.astype(part.dtype) for part, factor in pairs)
        averaged.append(total.astype(variable.dtype))
    return averaged


def _values(scope: Any, variables: Sequence[Any]) -> list[Any]:
    return [variable.value if (new := scope.get_current_value(variable)) is None else new for variable in variables]


def _typed_as(values: Any, like: Any) -> Any:
    """What a loop carries keeps its types."""
    return jax.tree.map(lambda value, old: lax.convert_element_type(value, jnp.result_type(old)), values, like)
