"""Keras on TensorFlow: a model as a training step that is run by ``train_on_batch``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from remat.core.budget import parse_budget
from remat.core.errors import InfeasibleBudget
from remat.keras.limit import limit_memory
from remat.keras.shared.limit import is_share
from remat.keras.shared.workload import ModelWorkload, gradients_shown
from remat.keras.tensorflow.limit import assign, build
from remat.running.workload import Array, Training
from remat.tensorflow.peak.device import current_device
from remat.tensorflow.trace.sizes import shape_bytes


class Workload(ModelWorkload):
    """See ``remat.running.workload.Workload`` and ``ModelWorkload``."""

    def train(self, budget: int | str | None, steps: int, *, nudged: bool = False) -> Training:
        """Run some steps by ``train_on_batch``."""
        self._peaks: list[int] = []
        return super().train(budget, steps, nudged=nudged)

    def gradients(self, budget: int | str | None, *, nudged: bool = False) -> Mapping[str, Array]:
        """What the optimizer is handed in the first step."""
        model, (batch,) = self._model, self._batches(1)
        self._reset(batch, nudged)
        kept = {v.path: tf.Variable(tf.zeros(v.shape, v.dtype), trainable=False) for v in model.trainable_variables}
        if budget is not None and not is_share(budget):
            # The copies lie on the device beside the step.
            budget = parse_budget(budget) + sum(shape_bytes(v.shape, v.dtype) for v in kept.values())

        def keep(path: str, gradient: Any) -> None:
            if path in kept:
                kept[path].assign(tf.convert_to_tensor(gradient))

        def run(budget: int | str | None) -> None:
            limit_memory(model, budget)
            try:
                with gradients_shown(model, keep):
                    model.train_function = None
                    model.train_on_batch(*batch)
            finally:
                limit_memory(model, None)
                model.train_function = None

        try:
            run(budget)
        except InfeasibleBudget as refused:
            # Copying holds gradients longer. Only numbers are compared here; ``train`` keeps the budget itself.
            run(refused.minimum_bytes)
        return {f"gradient/{path}": variable.numpy() for path, variable in kept.items()}

    def _run(self, batch: tuple[Any, Any]) -> float:
        device = current_device()
        if device.has_counter:
            device.reset_peak()
        loss = super()._run(batch)
        self._peaks.append(device.peak_bytes if device.has_counter else 0)
        return loss

    def _peak_bytes(self, batch: tuple[Any, Any]) -> int:
        return max(self._peaks)

    def _build_for(self, batch: tuple[Any, Any]) -> None:
        build(self._model, batch)

    def _assign(self, variable: keras.Variable, value: Array) -> None:
        assign(variable, value)
