"""What a Keras model as a training step is on every backend: its options, its data, its first values."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from remat.keras.shared.training_data import Variables
from remat.running.workload import Array, StepOptions


class ModelWorkload(ABC):
    """The part of ``remat.running.workload.Workload`` that no backend changes.

    Args:
        model: compiled.
        options: batch size and shapes of the inputs.
        data: batches (inputs, targets) to train on, random ones if None.
    """

    framework = "keras"

    def __init__(self, model: keras.Model, options: StepOptions, data: Sequence[tuple[Any, Any]] | None = None) -> None:
        self._model = model
        self._options = options
        self._data = data
        self._variables: Variables | None = None

    @property
    def batch_size(self) -> int | None:
        """Samples in a batch."""
        return self._options.samples

    def restore(self) -> None:
        """Give the variables their first values."""
        self._set_back(nudged=False)

    @abstractmethod
    def _build_for(self, batch: tuple[Any, Any]) -> None:
        """Make every variable of the model and its optimizer."""

    def _assign(self, variable: keras.Variable, value: Array) -> None:
        variable.assign(value)

    def _set_back(self, nudged: bool) -> None:
        if self._variables is None:
            return
        for variable, value in zip(self._variables.all, self._variables.first_values(nudged), strict=True):
            self._assign(variable, value)

    def _reset(self, batch: tuple[Any, Any], nudged: bool) -> Variables:
        if self._variables is None:
            self._build_for(batch)
            self._variables = Variables(self._model)
        self._set_back(nudged)
        return self._variables


@contextlib.contextmanager
def gradients_shown(model: keras.Model, show: Callable[[str, Any], None]) -> Iterator[None]:
    """Within the block ``show`` gets each variable's path and the gradient that the optimizer is handed for it."""
    optimizer = model.optimizer
    own_apply = optimizer.apply

    def apply(grads: Any, trainable_variables: Any = None) -> Any:
        grads = list(grads)
        for gradient, variable in zip(grads, trainable_variables or model.trainable_variables, strict=True):
            if gradient is not None:
                show(variable.path, gradient)
        return own_apply(grads, trainable_variables)

    optimizer.apply = apply
    try:
        yield
    finally:
        del optimizer.apply
