"""All variables of a Keras model and its optimizer: their first values, and what kind of number each is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import keras
import numpy as np

from remat.running.workload import Array, nudge

_SEED: Final = 11
"""Of the nudge of first weights. Any number will do: the same weights are moved alike in both of two trainings."""


class Variables:
    """All variables of a model and its optimizer, which can be set back to their first values.

    Args:
        model: compiled and built, its optimizer too.
        value_of: gives a variable's value; its own by default.
    """

    def __init__(
        self, model: keras.Model, value_of: Callable[[keras.Variable], Any] = lambda variable: variable.value
    ) -> None:
        self.all = unique([*model.variables, *model.optimizer.variables])
        self._trainable = {id(v) for v in model.trainable_variables}
        self._slots = {id(v) for v in model.optimizer.variables if v.shape}
        self._first = [keras.ops.convert_to_numpy(value_of(v)).copy() for v in self.all]

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
