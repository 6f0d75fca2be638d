"""Keras on TensorFlow: ``micro_batches="auto"`` chooses between recomputation and micro-batches for one batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from remat.core.errors import UnsupportedStep
from remat.fit.request import Request
from remat.keras.shared.batch_statistics import coupling_layers
from remat.keras.tensorflow.step import MicroBatchedStep
from remat.keras.tensorflow.trace import filled, leaves_of, traced_step
from remat.micro_batches.options import MicroBatchChoice
from remat.tensorflow.micro_batches.choose import TIMED_PIECES, OnBody, Pieces, choose_count


def choose_micro_batches(
    model: keras.Model,
    train_step: Callable[[Any], Any],
    batch: tuple[Any, Any, Any],
    shapes: Sequence[tuple[int, ...]],
    request: Request,
    *,
    any_size: bool,
) -> MicroBatchChoice:
    """The number of micro-batches for a model's training step. Nothing of it trains.

    Args:
        model: compiled and built.
        train_step: the model's own.
        batch: x, y and sample weights of one batch.
        shapes: the largest shape of each tensor of a batch.
        request: with a budget, of which a percentage is one of the plain peak of the whole step.
        any_size: does Keras trace the step for batches of any size?

    Raises:
        InfeasibleBudget: where no number of micro-batches fits.
    """
    data = keras.utils.pack_x_y_sample_weight(*batch)
    # ``train_on_batch`` hands over NumPy's arrays as they are.
    leaves = [tf.convert_to_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf for leaf in leaves_of(data)]

    def pieces() -> Pieces:
        for leaf in leaves:
            if not isinstance(leaf, tf.Tensor):
                raise UnsupportedStep(f"a {type(leaf).__name__} cannot be split into micro-batches")
        step = MicroBatchedStep(model, TIMED_PIECES)

        def run(symbols: list[tf.Tensor], on_body: OnBody) -> list[tf.Tensor]:
            return step.without_update(model, filled(data, symbols), on_body)

        return Pieces(run, leaves, shapes, bool(model.jit_compile))

    whole = traced_step(model, train_step, data, shapes, any_size=any_size, levers=request.levers)
    return choose_count(whole, pieces, shapes[0][0], request, coupling_layers(model))
