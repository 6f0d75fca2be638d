"""``micro_batches="auto"`` for Keras: the choice between recomputation and micro-batches for one model and batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from remat.core.errors import UnsupportedStep
from remat.fit.request import Request
from remat.keras.shared.batch_statistics import coupling_layers
from remat.keras.tensorflow.step import MicroBatchedStep
from remat.micro_batches.options import JointPlan
from remat.tensorflow.micro_batches.choose import OnBody, Pieces, joint_plan
from remat.tensorflow.peak.candidates import FunctionCandidate
from remat.tensorflow.planned import candidate_of
from remat.tensorflow.trace.func_graph import FunctionToPlan

_PROBED = 2


def choose_micro_batches(
    model: keras.Model,
    train_step: Callable[[Any], Any],
    batch: tuple[Any, Any, Any],
    shapes: Sequence[tuple[int, ...]],
    request: Request,
) -> JointPlan:
    """The joint plan of a model's training step.

    Args:
        model: compiled and built.
        train_step: the model's own.
        batch: x, y and sample weights of one batch.
        shapes: the largest shape of each tensor of a batch.
        request: the budget.

    Raises:
        InfeasibleBudget: where no number of micro-batches fits.
    """
    data = keras.utils.pack_x_y_sample_weight(*batch)
    leaves = [leaf for leaf in tf.nest.flatten(data) if leaf is not None]
    in_xla = bool(model.jit_compile)

    def pieces() -> Pieces:
        for leaf in leaves:
            if not isinstance(leaf, tf.Tensor):
                raise UnsupportedStep(f"a {type(leaf).__name__} cannot be split into micro-batches")
        step = MicroBatchedStep(model, _PROBED)

        def run(symbols: list[tf.Tensor], on_body: OnBody) -> list[tf.Tensor]:
            return step.without_update(model, _filled(data, symbols), on_body)

        return Pieces(run, leaves, shapes, in_xla)

    whole = _whole(train_step, data, leaves, shapes, in_xla)
    return joint_plan(whole, pieces, shapes[0][0], request, coupling_layers(model))


def _whole(
    train_step: Callable[[Any], Any], data: Any, leaves: Sequence[Any], shapes: Sequence[tuple[int, ...]], in_xla: bool
) -> FunctionCandidate:
    """The step that takes the batch in one piece, the update included."""
    specs = [_with_any_size(tf.type_spec_from_value(leaf)) for leaf in leaves]
    function = tf.function(
        lambda *symbols: train_step(_filled(data, symbols)), jit_compile=in_xla, autograph=False
    ).get_concrete_function(*specs)
    given = [t for t in function.graph.inputs if t.name not in {inner.name for _, inner in function.graph.captures}]
    known = {t.name: shape for t, shape in zip(given, shapes, strict=True)}
    return candidate_of(FunctionToPlan(function.graph, known, in_xla))


def _with_any_size(spec: tf.TypeSpec) -> tf.TypeSpec:
    return tf.TensorSpec((None, *spec.shape[1:]), spec.dtype) if isinstance(spec, tf.TensorSpec) else spec


def _filled(data: Any, leaves: Sequence[Any]) -> Any:
    """``data`` with these in place of its tensors."""
    given = iter(leaves)
    return tf.nest.pack_sequence_as(data, [None if leaf is None else next(given) for leaf in tf.nest.flatten(data)])
