"""Keras on TensorFlow: the model's own training step, traced and not run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import keras
import tensorflow as tf

from remat.core.graph import Graph
from remat.keras import _private
from remat.running.cost_model import get_profile
from remat.tensorflow.planned import PlannableFunction
from remat.tensorflow.trace.func_graph import FunctionToPlan, TracedStep, trace_func_graph
from remat.tensorflow.trace.labels import label_step, variable_roles


def graph_of_step(model: keras.Model, spec: tuple[Any, Any], device: str) -> Graph:
    """The graph of one ``train_step``.

    Args:
        model: compiled.
        spec: of the batch (inputs, targets), as ``keras.KerasTensor``.
        device: profile for the predicted times.
    """
    data = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype, name=t.name), spec)
    if model.trainable_variables and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    model._symbolic_build(data_batch=tf.nest.map_structure(_unnamed, spec))
    step = tf.function(lambda x, y: model.train_step((x, y)), autograph=False).get_concrete_function(*data)
    return label_model(trace_func_graph(step.graph, profile=get_profile(device)), model)


def traced_step(
    model: keras.Model,
    train_step: Callable[[Any], Any],
    data: Any,
    shapes: Sequence[tuple[int, ...]],
    *,
    any_size: bool,
    levers: Collection[str] = ("recompute",),
) -> PlannableFunction:
    """The step that takes a batch in one piece, the update included, as it would run.

    Args:
        model: compiled and built.
        train_step: the model's own.
        data: a batch.
        shapes: the largest shape of each tensor of a batch.
        any_size: does Keras trace it for batches of any size, as those of a data set? Gradients of an unknown shape
            hold other tensors.
        levers: what a plan of it may do.
    """
    leaves = leaves_of(data)
    in_xla = bool(model.jit_compile)
    specs = [tf.type_spec_from_value(leaf) for leaf in leaves]
    if any_size:
        specs = [_of_any_size(spec) for spec in specs]
    function = tf.function(
        lambda *symbols: train_step(filled(data, symbols)), jit_compile=in_xla, autograph=False
    ).get_concrete_function(*specs)
    given = [t for t in function.graph.inputs if t.name not in {inner.name for _, inner in function.graph.captures}]
    known = {t.name: shape for t, shape in zip(given, shapes, strict=True)}
    return PlannableFunction(FunctionToPlan(function.graph, known, in_xla), levers)


def label_model(step: TracedStep, model: keras.Model) -> Graph:
    """The graph of a model's traced step, with the names of its layers and the roles of its variables."""
    layers = [layer.name for layer in _private.all_layers(model)] + ["compile_loss"]
    roles = variable_roles((v.value for v in model.variables), "state")
    roles |= variable_roles((v.value for v in model.weights), "parameter")
    if model.optimizer is not None:
        layers.append(model.optimizer.name)
        roles |= variable_roles((v.value for v in model.optimizer.variables), "optimizer_state")
    return label_step(step, layers=layers, roles=roles)


def leaves_of(data: Any) -> list[Any]:
    """The tensors of a batch, in a fixed order; absent parts left out."""
    return [leaf for leaf in tf.nest.flatten(data) if leaf is not None]


def filled(data: Any, leaves: Sequence[Any]) -> Any:
    """``data`` with these in place of its tensors."""
    given = iter(leaves)
    return tf.nest.pack_sequence_as(data, [None if leaf is None else next(given) for leaf in tf.nest.flatten(data)])


def _of_any_size(spec: tf.TypeSpec) -> tf.TypeSpec:
    return tf.TensorSpec((None, *spec.shape[1:]), spec.dtype) if isinstance(spec, tf.TensorSpec) else spec


def _unnamed(spec: keras.KerasTensor) -> keras.KerasTensor:
    return keras.KerasTensor(spec.shape, dtype=spec.dtype)
