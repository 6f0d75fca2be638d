"""Keras on JAX: a model as a training step that is run by ``train_on_batch``, of which the compiler knows the peak."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import keras
import numpy as np

from remat.jax.api.jit import jit as planned_jit
from remat.jax.peak import peak_of, shape_of
from remat.keras.jax.trace import build, state_of
from remat.keras.limit import is_limited, plan_of
from remat.keras.shared.workload import ModelWorkload
from remat.running.workload import Array


class Workload(ModelWorkload):
    """See ``remat.running.workload.Workload`` and ``ModelWorkload``."""

    def gradients(self, budget: int | str | None, *, nudged: bool = False) -> Mapping[str, Array]:
        """Nothing: Keras' step on JAX does not give gradients out; the optimizer's slots hold them."""
        return {}

    def _peak_bytes(self, batch: tuple[Any, Any]) -> int:
        model = self._model
        plan = plan_of(model) if is_limited(model) else None
        step: Any = (
            jax.jit(model.train_step, donate_argnums=0)
            if plan is None
            else planned_jit(lambda s, d: model.train_step(s, d), plan=plan, donate_argnums=0)
        )
        state = tuple([shape_of(variable.value) for variable in part] for part in state_of(model))
        return peak_of(step.lower(state, (*batch, None)).compile().memory_analysis())

    def _build_for(self, batch: tuple[Any, Any]) -> None:
        build(self._model, keras.tree.map_structure(_spec_of, batch))


def _spec_of(array: Any) -> keras.KerasTensor:
    return keras.KerasTensor(np.shape(array), np.asarray(array).dtype.name)
