"""A Keras model on PyTorch as a training step: traced by its loss, run by ``train_on_batch``."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import torch

from remat.core.graph import Graph
from remat.keras.limit import graph_of, limit_memory, plan_of
from remat.keras.shared.example_batch import batch_spec
from remat.keras.shared.training_data import batches
from remat.keras.shared.workload import ModelWorkload, gradients_shown
from remat.keras.torch.training_step import loss_of, traced_step
from remat.running.workload import Array, Training
from remat.torch.measure import measure

_SEED = 11


class TorchWorkload(ModelWorkload):
    """See ``remat.running.workload.Workload`` and ``ModelWorkload``."""

    def graph(self, device: str) -> Graph:
        """The step, traced."""
        spec = batch_spec(self._model, self._options.samples, self._options.inputs)
        x, y = keras.tree.map_structure(
            lambda one: torch.empty(tuple(one.shape), dtype=getattr(torch, keras.backend.standardize_dtype(one.dtype))),
            spec,
        )
        self._build_for((x, y))
        return traced_step(self._model, loss_of(self._model), (x, y, None), device=device).step.graph

    def train(self, budget: int | str | None, steps: int, *, nudged: bool = False) -> Training:
        """Run some steps by ``train_on_batch``, and one more to measure its peak."""
        model, own = self._model, batches(self._model, self._options, steps, self._data)
        variables = self._reset(own[0], nudged)
        limit_memory(model, budget)
        losses, times = [], []
        try:
            for batch in own:
                started = time.perf_counter()
                losses.append(float(model.train_on_batch(*batch, return_dict=True)["loss"]))
                times.append(time.perf_counter() - started)
            values = variables.named(v.value for v in variables.all)
            plan = None if budget is None else plan_of(model)
            graph = None if budget is None else graph_of(model)
            peak_bytes = measure(lambda: model.train_on_batch(*own[0]), repeats=1).peak_bytes
        finally:
            limit_memory(model, None)
        return Training(peak_bytes, float(np.median(times[1:] or times)), tuple(losses), values, plan, graph)

    def gradients(self, budget: int | str | None, *, nudged: bool = False) -> Mapping[str, Array]:
        """What the optimizer is handed in the first step."""
        model, (batch,) = self._model, batches(self._model, self._options, 1, self._data)
        self._reset(batch, nudged)
        kept: dict[str, Array] = {}

        def keep(path: str, gradient: Any) -> None:
            kept[f"gradient/{path}"] = gradient.detach().cpu().numpy().copy()

        limit_memory(model, budget)
        try:
            with gradients_shown(model, keep):
                model.train_on_batch(*batch)
        finally:
            limit_memory(model, None)
        return kept

    def _build_for(self, batch: tuple[Any, Any]) -> None:
        model = self._model
        if not model.built:
            model(batch[0])
        model._symbolic_build(data_batch=batch)
        model.optimizer.build(model.trainable_variables)

    def _set_back(self, nudged: bool) -> None:
        super()._set_back(nudged)
        if self._variables is not None:
            torch.manual_seed(_SEED)  # Dropout draws from PyTorch's own generator.
        gc.collect()
