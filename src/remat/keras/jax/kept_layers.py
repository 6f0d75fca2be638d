"""Keras on JAX: a checkpoint is a value that has a name."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from remat.jax.planned_part import Function
from remat.keras import _private
from remat.keras.shared.kept_layers import NamedLayers


class KeptLayers(NamedLayers):
    """Gives what chosen layers return the layers' names, while a training step is traced.

    Args:
        model: the model.
        wanted: names of layers, layers, or names with a slash or a colon, which the model's own code gives to values
            with ``jax.ad_checkpoint.checkpoint_name``.

    Attributes:
        names: the names of all that is to be kept.

    Raises:
        ValueError: where the model has no layer of a name.
    """

    def __init__(self, model: Any, wanted: Sequence[Any]) -> None:
        super().__init__(model, wanted)
        self.names = tuple(dict.fromkeys([*(layer.name for layer in self.layers), *self.tensor_names]))

    def naming(self, function: Function) -> Function:
        """The function, in which the layers' outputs have names whenever it is traced."""

        @functools.wraps(function)
        def traced(*args: Any, **kwargs: Any) -> Any:
            with self._calls_pass(lambda number, result: _named(result, self.layers[number].name)):
                return function(*args, **kwargs)

        return traced


def _named(result: Any, name: str) -> Any:
    def one(leaf: Any) -> Any:
        passed = checkpoint_name(leaf, name)  # type: ignore[no-untyped-call]
        if (mask := getattr(leaf, _private.MASK, None)) is not None:
            setattr(passed, _private.MASK, mask)
        return passed

    return jax.tree.map(one, result)
