"""The joint graph of a Keras model's training step, traced without training."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf

from remat.core.graph import Graph
from remat.keras import _private
from remat.keras.shared.compiling import compile_if_needed
from remat.keras.shared.example_batch import batch_spec
from remat.running.cost_model import get_profile
from remat.running.workload import InputShape
from remat.tensorflow.trace.func_graph import TracedStep, trace_func_graph
from remat.tensorflow.trace.labels import label_step, variable_roles


def trace_model(
    model: keras.Model,
    *,
    batch_size: int,
    device: str = "cpu",
    loss: str | None = None,
    optimizer: str | None = None,
    inputs: Sequence[InputShape] = (),
) -> Graph:
    """The graph of one ``train_step``: forward, backward and update. No activation is allocated.

    Args:
        model: a model with known input shapes (Functional, or built).
        batch_size: samples per step.
        device: profile for the predicted times: "cpu", "a100", "h100", "h200" or "measured".
        loss: a Keras loss; None takes the model's own, else cross-entropy after a softmax and mean squared
            error otherwise.
        optimizer: a Keras optimizer; None takes the model's own, else Adam.
        inputs: shapes of the inputs, for a model that does not say what it takes.

    Raises:
        UnsupportedStep: where the model does not say what it takes.
    """
    profile = get_profile(device)
    compile_if_needed(model, loss, optimizer)
    spec = batch_spec(model, batch_size, inputs)
    data = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype, name=t.name), spec)
    if model.trainable_variables and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    model._symbolic_build(data_batch=tf.nest.map_structure(_unnamed, spec))
    step = tf.function(lambda x, y: model.train_step((x, y)), autograph=False).get_concrete_function(*data)
    return label_model(trace_func_graph(step.graph, profile=profile), model)


def label_model(step: TracedStep, model: keras.Model) -> Graph:
    """The graph of a model's traced step, with the names of its layers and the roles of its variables."""
    layers = [layer.name for layer in _private.all_layers(model)] + ["compile_loss"]
    roles = variable_roles((v.value for v in model.variables), "state")
    roles |= variable_roles((v.value for v in model.weights), "parameter")
    if model.optimizer is not None:
        layers.append(model.optimizer.name)
        roles |= variable_roles((v.value for v in model.optimizer.variables), "optimizer_state")
    return label_step(step, layers=layers, roles=roles)


def _unnamed(spec: keras.KerasTensor) -> keras.KerasTensor:
    return keras.KerasTensor(spec.shape, dtype=spec.dtype)
