"""A Keras model as a training step that ``remat plan``, ``measure`` and ``check`` can use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from remat.core.graph import Graph
from remat.keras.shared.backend import of_backend
from remat.keras.shared.workload import compile_if_needed
from remat.running.workload import InputShape, StepOptions, Workload


def make_workload(made: keras.Model, options: StepOptions, data: Sequence[tuple[Any, Any]] | None = None) -> Workload:
    """The training step of a model, compiled with the loss and the optimizer of ``options`` where it is not.

    Args:
        made: the model.
        options: batch size, shapes of the inputs, loss and optimizer; on PyTorch also the mode.
        data: batches (inputs, targets) to train on; random ones if None.

    Raises:
        UnsupportedStep: for a backend of Keras that remat does not support.
    """
    compile_if_needed(made, options.loss, options.optimizer)
    workload: Workload = of_backend("workload", "remat").Workload(made, options, data)
    return workload


def trace_model(
    model: keras.Model,
    *,
    batch_size: int,
    device: str = "cpu",
    loss: str | None = None,
    optimizer: str | None = None,
    inputs: Sequence[InputShape] = (),
) -> Graph:
    """The graph of one training step: forward, backward and update. No activation is allocated.

    Args:
        model: a model with known input shapes (Functional, or built).
        batch_size: samples per step.
        device: profile for the predicted times: "cpu", "a100", "h100", "h200" or "measured".
        loss: a Keras loss; None takes the model's own, else cross-entropy after a softmax and mean squared
            error otherwise.
        optimizer: a Keras optimizer; None takes the model's own, else Adam.
        inputs: shapes of the inputs, for a model that does not say what it takes.

    Raises:
        UnsupportedStep: where the model does not say what it takes, and for a backend of Keras that remat does not
            support.
    """
    options = StepOptions(batch_size=batch_size, inputs=tuple(inputs), loss=loss, optimizer=optimizer)
    return make_workload(model, options).graph(device)
