"""A Keras model on TensorFlow as a training step: traced by its ``train_step``, run by ``train_on_batch``."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from remat.core.budget import parse_budget
from remat.core.graph import Graph
from remat.keras.limit import graph_of, limit_memory, plan_of
from remat.keras.shared.training_data import batches
from remat.keras.shared.workload import ModelWorkload, gradients_shown
from remat.keras.tensorflow.limit import build
from remat.keras.tensorflow.model_trace import trace_model
from remat.running.workload import Array, Training
from remat.tensorflow.peak.device import current_device


class TensorFlowWorkload(ModelWorkload):
    """See ``remat.running.workload.Workload`` and ``ModelWorkload``."""

    def graph(self, device: str) -> Graph:
        """The step, traced."""
        return trace_model(self._model, batch_size=self._options.samples, device=device, inputs=self._options.inputs)

    def train(self, budget: int | str | None, steps: int, *, nudged: bool = False) -> Training:
        """Run some steps by ``train_on_batch``."""
        model, own = self._model, batches(self._model, self._options, steps, self._data)
        variables = self._reset(own[0], nudged)
        limit_memory(model, budget)
        device = current_device()
        losses, times, peaks = [], [], []
        try:
            for x, y in own:
                device.reset_peak()
                started = time.perf_counter()
                logs = model.train_on_batch(x, y, return_dict=True)
                losses.append(float(logs["loss"]))
                times.append(time.perf_counter() - started)
                peaks.append(device.peak_bytes)
            plan = None if budget is None else plan_of(model)
            graph = None if budget is None else graph_of(model)
        finally:
            limit_memory(model, None)
        values = variables.named(v.value for v in variables.all)
        return Training(max(peaks), float(np.median(times[1:] or times)), tuple(losses), values, plan, graph)

    def gradients(self, budget: int | str | None, *, nudged: bool = False) -> Mapping[str, Array]:
        """What the optimizer is handed in the first step."""
        model, (batch,) = self._model, batches(self._model, self._options, 1, self._data)
        self._reset(batch, nudged)
        kept = {v.path: tf.Variable(tf.zeros(v.shape, v.dtype), trainable=False) for v in model.trainable_variables}
        if isinstance(budget, int) or (budget is not None and not budget.strip().endswith("%")):
            # The copies lie on the device beside the step.
            budget = parse_budget(budget) + sum(v.value.dtype.size * v.shape.num_elements() for v in kept.values())

        def keep(path: str, gradient: Any) -> None:
            if path in kept:
                kept[path].assign(tf.convert_to_tensor(gradient))

        limit_memory(model, budget)
        try:
            with gradients_shown(model, keep):
                model.train_function = None
                model.train_on_batch(*batch)
        finally:
            limit_memory(model, None)
            model.train_function = None
        return {f"gradient/{path}": variable.numpy() for path, variable in kept.items()}

    def _build_for(self, batch: tuple[Any, Any]) -> None:
        build(self._model, batch)

    def _assign(self, variable: keras.Variable, value: Array) -> None:
        # Handed over as it is, an array may become the variable's memory, which the device then does not count.
        variable.assign(tf.raw_ops.DeepCopy(x=value))

    def _set_back(self, nudged: bool) -> None:
        super()._set_back(nudged)
        gc.collect()
