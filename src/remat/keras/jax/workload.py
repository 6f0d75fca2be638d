"""A Keras model on JAX as a training step: Keras' own functional ``train_step``, compiled as ``fit`` compiles it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import keras
import numpy as np

from remat.core.graph import Graph
from remat.jax.api.jit import jit as planned_jit
from remat.jax.peak import peak_of, shape_of
from remat.jax.trace.graph import graph_of_program, label_graph
from remat.jax.trace.program import program_of, trace_jaxpr
from remat.keras.shared.example_batch import batch_spec
from remat.keras.shared.training_data import Variables, batches
from remat.keras.shared.workload import ModelWorkload
from remat.running.cost_model import get_profile
from remat.running.workload import Array, Training

_ROLES = ("parameter", "parameter", "optimizer_state", "state")


class JaxWorkload(ModelWorkload):
    """See ``remat.running.workload.Workload`` and ``ModelWorkload``."""

    def graph(self, device: str) -> Graph:
        """The step, traced."""
        spec = batch_spec(self._model, self._options.samples, self._options.inputs)
        self._build(spec)
        data = keras.tree.map_structure(_shape_of_spec, spec)
        state = jax.tree.map(shape_of, self._state())
        closed, _ = trace_jaxpr(lambda s, d: self._model.train_step(s, d), (state, (*data, None)))
        program = program_of(closed)
        parts = zip(_ROLES, state, strict=True)
        roles = [role for role, part in parts for _ in jax.tree.leaves(part)]
        roles += ["batch"] * (len(program.inputs) - len(roles))
        return label_graph(graph_of_program(program, get_profile(device)), program, roles)

    def train(self, budget: int | str | None, steps: int, *, nudged: bool = False) -> Training:
        """Run some steps of the compiled ``train_step``."""
        own = batches(self._model, self._options, steps, self._data)
        variables = self._reset(own[0], nudged)
        step: Any = (
            jax.jit(self._model.train_step, donate_argnums=0)
            if budget is None
            else planned_jit(lambda s, d: self._model.train_step(s, d), budget=budget, donate_argnums=0)
        )
        state = self._state()
        peak_bytes = peak_of(step.lower(state, (*own[0], None)).compile().memory_analysis())
        losses, times = [], []
        wait: Any = jax.block_until_ready
        for x, y in own:
            started = time.perf_counter()
            logs, state = wait(step(state, (x, y, None)))
            times.append(time.perf_counter() - started)
            losses.append(float(logs["loss"]))
        values = variables.named(self._in_order(state, variables))
        plan = None if budget is None else step.plan
        graph = None if budget is None else step.graph
        return Training(peak_bytes, float(np.median(times[1:] or times)), tuple(losses), values, plan, graph)

    def gradients(self, budget: int | str | None, *, nudged: bool = False) -> Mapping[str, Array]:
        """Nothing: Keras' step on JAX does not give gradients out; the optimizer's slots hold them."""
        return {}

    def _build_for(self, batch: tuple[Any, Any]) -> None:
        self._build(keras.tree.map_structure(_spec_of, batch))

    def _build(self, spec: tuple[Any, Any]) -> None:
        model = self._model
        if model.trainable_variables and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        model._symbolic_build(data_batch=keras.tree.map_structure(_unnamed, spec))

    def _groups(self) -> tuple[Sequence[keras.Variable], ...]:
        """The variables in the order of the state that Keras' ``train_step`` takes."""
        model = self._model
        return (
            model.trainable_variables,
            model.non_trainable_variables,
            model.optimizer.variables,
            model.metrics_variables,
        )

    def _state(self) -> tuple[list[Any], ...]:
        """Copies, since steps donate their state."""
        return tuple([jax.numpy.array(v.value, copy=True) for v in group] for group in self._groups())

    def _in_order(self, state: Sequence[Sequence[Any]], variables: Variables) -> list[Any]:
        by_id = {
            id(variable): value
            for group, values in zip(self._groups(), state, strict=True)
            for variable, value in zip(group, values, strict=True)
        }
        return [by_id.get(id(v), v.value) for v in variables.all]


def _shape_of_spec(spec: keras.KerasTensor) -> Any:
    make: Any = jax.ShapeDtypeStruct
    return make(spec.shape, spec.dtype)


def _unnamed(spec: keras.KerasTensor) -> keras.KerasTensor:
    return keras.KerasTensor(spec.shape, dtype=spec.dtype)


def _spec_of(array: Any) -> keras.KerasTensor:
    return keras.KerasTensor(np.shape(array), np.asarray(array).dtype.name)
