"""What a workload of Keras trains on, and what its training leaves behind, by kind and name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np

from remat.keras.shared.example_batch import batch_spec, random_batch
from remat.running.workload import Array, StepOptions, nudge

_SEED = 11


class Variables:
    """All variables of a model and its optimizer, which can be set back to their first values.

    Args:
        model: compiled and built, its optimizer too.
    """

    def __init__(self, model: keras.Model) -> None:
        self.all = unique([*model.variables, *model.optimizer.variables])
        self._trainable = {id(v) for v in model.trainable_variables}
        self._slots = {id(v) for v in model.optimizer.variables if v.shape}
        self._first = [keras.ops.convert_to_numpy(v.value).copy() for v in self.all]

    def first_values(self, nudged: bool) -> list[Array]:
        """The first values; of weights, half a rounding off where asked for."""
        random = np.random.default_rng(_SEED)
        moved = [id(v) in self._trainable and nudged for v in self.all]
        return [nudge(value, random) if m else value for value, m in zip(self._first, moved, strict=True)]

    def named(self, values: Iterable[Any]) -> dict[str, Array]:
        """Values in the order of ``all``, by kind and path."""
        return {
            f"{self._kind(variable)}/{variable.path}#{number}": np.array(keras.ops.convert_to_numpy(value))
            for number, (variable, value) in enumerate(zip(self.all, values, strict=True))
        }

    def _kind(self, variable: keras.Variable) -> str:
        if id(variable) in self._trainable:
            return "weight"
        if id(variable) in self._slots:
            return "slot"
        return "statistic" if "float" in variable.dtype else "state"


def unique(variables: Iterable[keras.Variable]) -> list[keras.Variable]:
    """Each variable once, in order."""
    return list({id(v): v for v in variables}.values())


def batches(
    model: keras.Model, options: StepOptions, steps: int, data: Sequence[tuple[Any, Any]] | None
) -> list[tuple[Any, Any]]:
    """One batch a step: the user's own, over and over, or random ones."""
    if data is not None:
        return [data[step % len(data)] for step in range(steps)]
    spec = batch_spec(model, options.samples, options.inputs)
    return [random_batch(model, spec, seed) for seed in range(steps)]
