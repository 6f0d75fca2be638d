"""The joint graph of a Keras model's training step, traced without training."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from remat.cost_model import get_profile
from remat.errors import UnsupportedStep
from remat.graph import Graph
from remat.keras import _private
from remat.tensorflow.labels import label_step, variable_roles
from remat.tensorflow.trace import TracedStep, trace_func_graph


def trace_model(
    model: keras.Model,
    *,
    batch_size: int,
    device: str = "cpu",
    loss: str | None = None,
    optimizer: str | None = None,
) -> Graph:
    """The graph of one ``train_step``: forward, backward and update. No activation is allocated.

    Args:
        model: a model with known input shapes (Functional, or built).
        batch_size: samples per step.
        device: profile for the predicted times: "cpu", "a100", "h100", "h200" or "measured".
        loss: a Keras loss; None takes the model's own, else cross-entropy after a softmax and mean squared
            error otherwise.
        optimizer: a Keras optimizer; None takes the model's own, else Adam.

    Raises:
        UnsupportedStep: where the model does not say what it takes.
    """
    profile = get_profile(device)
    if not getattr(model, "inputs", None):  # A subclassed model has no such attribute before it is built.
        raise UnsupportedStep(
            f"{model.name!r} does not say what it takes; build it from keras.Input, or call it once on data"
        )
    if not model.compiled or loss is not None or optimizer is not None:
        model.compile(
            optimizer=optimizer or (model.optimizer if model.compiled else "adam"),
            loss=loss or (model.loss if model.compiled else _default_loss(model)),
            jit_compile=False,
        )
    data = _batch_spec(model, batch_size)
    if model.trainable_variables and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    model._symbolic_build(data_batch=tf.nest.map_structure(_symbolic, data))
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


def _default_loss(model: keras.Model) -> Any:
    if len(model.outputs) == 1 and _ends_in_softmax(model):
        return "sparse_categorical_crossentropy"
    return "mean_squared_error"


def _ends_in_softmax(model: keras.Model) -> bool:
    last = model.layers[-1]
    return isinstance(last, keras.layers.Softmax) or getattr(last, "activation", None) is keras.activations.softmax


def _batch_spec(model: keras.Model, batch_size: int) -> tuple[Any, Any]:
    def spec(tensor: keras.KerasTensor) -> tf.TensorSpec:
        shape = (batch_size, *tensor.shape[1:])
        if None in shape:
            raise UnsupportedStep(
                f"{tensor.name!r} of {model.name!r} has the shape {tensor.shape}; give every dimension but the first"
            )
        return tf.TensorSpec(shape, tensor.dtype, name=tensor.name)

    structure = getattr(model, "_inputs_struct", None)
    inputs = tf.nest.map_structure(spec, model.inputs if structure is None else structure)
    outputs = tf.nest.map_structure(spec, model.outputs if len(model.outputs) > 1 else model.outputs[0])
    name = model.loss if isinstance(model.loss, str) else getattr(model.loss, "name", "")
    if isinstance(outputs, tf.TensorSpec) and str(name).startswith("sparse_"):
        outputs = tf.TensorSpec(outputs.shape[:-1], tf.int64)
    if isinstance(inputs, list) and len(inputs) == 1:
        inputs = inputs[0]
    return inputs, outputs


def _symbolic(spec: tf.TensorSpec) -> keras.KerasTensor:
    return keras.KerasTensor(tuple(spec.shape), dtype=spec.dtype.name)
