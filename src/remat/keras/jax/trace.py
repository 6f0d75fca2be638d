"""Keras on JAX: the model's own functional training step, traced and not run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import keras

from remat.core.graph import Graph
from remat.jax.peak import shape_of
from remat.jax.trace.graph import graph_of_program, label_graph
from remat.jax.trace.program import program_of, trace_jaxpr
from remat.running.cost_model import get_profile

_ROLES = ("parameter", "parameter", "optimizer_state", "state")  # Of the parts of the state, in order.


def graph_of_step(model: keras.Model, spec: tuple[Any, Any], device: str) -> Graph:
    """The graph of one ``train_step``.

    Args:
        model: compiled.
        spec: of the batch (inputs, targets), as ``keras.KerasTensor``.
        device: profile for the predicted times.
    """
    build(model, spec)
    data = keras.tree.map_structure(_shape_of_spec, spec)
    state = tuple([shape_of(variable.value) for variable in part] for part in state_of(model))
    closed, _ = trace_jaxpr(lambda s, d: model.train_step(s, d), (state, (*data, None)))
    program = program_of(closed)
    roles = [role for role, part in zip(_ROLES, state, strict=True) for _ in part]
    roles += ["batch"] * (len(program.inputs) - len(roles))
    return label_graph(graph_of_program(program, get_profile(device)), program, roles)


def build(model: keras.Model, spec: tuple[Any, Any]) -> None:
    """Make every variable of a model and its optimizer."""
    if model.trainable_variables and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    unnamed = keras.tree.map_structure(lambda one: keras.KerasTensor(one.shape, dtype=one.dtype), spec)
    model._symbolic_build(data_batch=unnamed)


def state_of(model: keras.Model) -> tuple[Sequence[keras.Variable], ...]:
    """The variables in the order of the state that Keras' ``train_step`` takes."""
    return (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    )


def _shape_of_spec(spec: keras.KerasTensor) -> Any:
    make: Any = jax.ShapeDtypeStruct
    return make(spec.shape, spec.dtype)
