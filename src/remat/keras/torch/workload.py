"""Keras on PyTorch: a model as a training step that is run by ``train_on_batch``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from remat.keras.limit import limit_memory
from remat.keras.shared.workload import ModelWorkload, gradients_shown
from remat.keras.torch.trace import build
from remat.running.workload import Array
from remat.torch.measure import measure

_SEED: Final = 11
"""Of PyTorch's generator, from which dropout draws. Any number will do: both of two trainings begin with it."""


class Workload(ModelWorkload):
    """See ``remat.running.workload.Workload`` and ``ModelWorkload``."""

    def gradients(self, budget: int | str | None, *, nudged: bool = False) -> Mapping[str, Array]:
        """What the optimizer is handed in the first step."""
        model, (batch,) = self._model, self._batches(1)
        self._reset(batch, nudged)
        kept: dict[str, Array] = {}

        def keep(path: str, gradient: Any) -> None:
            kept[f"gradient/{path}"] = gradient.detach().cpu().numpy().copy()

        limit_memory(model, budget, mode=self._mode)
        try:
            with gradients_shown(model, keep):
                model.train_on_batch(*batch)
        finally:
            limit_memory(model, None)
        return kept

    def _peak_bytes(self, batch: tuple[Any, Any]) -> int:
        return measure(lambda: self._model.train_on_batch(*batch), repeats=1).peak_bytes

    def _build_for(self, batch: tuple[Any, Any]) -> None:
        build(self._model, batch)

    def _set_back(self, nudged: bool) -> None:
        super()._set_back(nudged)
        if self._variables is not None:
            torch.manual_seed(_SEED)
