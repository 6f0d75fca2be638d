"""Keras on PyTorch: the training step of Keras as functions that can be traced, its loss and its update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import torch

from remat.core.graph import Graph
from remat.keras import _private
from remat.running.cost_model import get_profile
from remat.torch.api.plan import EagerCandidate
from remat.torch.trace.fake_step import record_step
from remat.torch.trace.trace import gpu_of


def graph_of_step(model: keras.Model, spec: tuple[Any, Any], device: str) -> Graph:
    """The graph of one training step.

    Args:
        model: compiled.
        spec: of the batch (inputs, targets), as ``keras.KerasTensor``.
        device: profile for the predicted times.
    """
    x, y = keras.tree.map_structure(
        lambda one: torch.empty(tuple(one.shape), dtype=getattr(torch, keras.backend.standardize_dtype(one.dtype))),
        spec,
    )
    build(model, (x, y))
    return traced_step(model, loss_of(model), (x, y, None), device=device).graph


def build(model: keras.Model, batch: tuple[Any, Any]) -> None:
    """Make every variable of a model and its optimizer."""
    if not model.built:
        model(batch[0])
    model._symbolic_build(data_batch=batch)
    model.optimizer.build(model.trainable_variables)


def traced_step(
    model: keras.Model,
    loss_fn: Callable[..., Any],
    args: Sequence[Any],
    *,
    accumulates: bool = False,
    device: str | None = None,
) -> EagerCandidate:
    """A training step of the model: a loss and its gradients, the optimizer's state and its update.

    Args:
        model: built; its optimizer is built here.
        loss_fn: of a batch, or of a micro-batch.
        args: its arguments.
        accumulates: do gradients of earlier micro-batches exist?
        device: profile for the predicted times; None means that of the tensors' device. If it is a GPU, the step is
            traced with the kernels of that GPU.
    """
    gpu = None if device is None else gpu_of(get_profile(device), args)
    loss_fn = _without_added_losses(model, released(loss_fn))
    if model.optimizer is None:
        return EagerCandidate(record_step(loss_fn, args, accumulates=accumulates, gpu=gpu), device)
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    state = [variable.value for variable in model.optimizer.variables]
    recording = record_step(loss_fn, args, update=update_of(model), accumulates=accumulates, resident=state, gpu=gpu)
    return EagerCandidate(recording, device)


def released(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """A loss function in which a functional model does not hold the outputs of all of its layers at once."""

    def released_loss(*args: Any) -> Any:
        with _private.outputs_released():
            return loss_fn(*args)

    return released_loss


def _without_added_losses(model: keras.Model, loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """A loss function after which layers do not hold what they gave to ``add_loss``: a trace has no values for it."""

    def loss_alone(*args: Any) -> Any:
        try:
            return loss_fn(*args)
        finally:
            _private.clear_losses(model)

    return loss_alone


def loss_of(model: keras.Model) -> Callable[[Any, Any, Any], Any]:
    """What Keras' own training step differentiates, as a function of x, y and sample weights."""

    def loss_fn(x: Any, y: Any, sample_weight: Any) -> Any:
        y_pred = _private.call_in_training(model, x)
        loss = model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True)
        return holding(loss if model.optimizer is None else model.optimizer.scale_loss(loss), y_pred)

    return loss_fn


def update_of(model: keras.Model) -> Callable[[Callable[[Any], Any]], None]:
    """What the optimizer does with the gradients, as a function of what gives a parameter's gradient."""

    def update(gradient_of: Callable[[Any], Any]) -> None:
        variables = list(model.trainable_weights)
        with torch.no_grad():
            model.optimizer.apply([gradient_of(variable.value) for variable in variables], variables)

    return update


def holding(loss: Any, y_pred: Any) -> Any:
    """The loss, which keeps what the model returned: metrics see that after the backward pass, so memory holds it."""
    loss.y_pred = y_pred
    return loss
