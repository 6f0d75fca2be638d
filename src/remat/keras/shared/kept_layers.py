"""The layers that a user names as checkpoints: what they return is kept while a training step is traced."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from remat.core.errors import UnsupportedStep
from remat.keras.recompute import find_layers


class NamedLayers:
    """What every backend's ``KeptLayers`` begins with.

    Args:
        model: the model.
        wanted: names of layers, layers, or names of tensors.

    Attributes:
        layers: those that were named or given.
        tensor_names: names of tensors, as they were given.

    Raises:
        ValueError: where the model has no layer of a name.
    """

    def __init__(self, model: Any, wanted: Sequence[Any]) -> None:
        self.tensor_names = [name for name in wanted if _is_tensor_name(name)]
        self.layers = find_layers(model, [name for name in wanted if not _is_tensor_name(name)])
        self._passing: dict[Any, Callable[..., Any]] = {}

    @contextlib.contextmanager
    def _calls_pass(self, through: Callable[[int, Any], Any]) -> Iterator[None]:
        """Inside, what a layer's ``call`` returns is what ``through`` makes of the layer's number and its result.

        The functions that stand for ``call`` are the same each time, so that what was captured with them stays valid.
        """
        own_calls = [vars(layer).get("call") for layer in self.layers]
        for number, layer in enumerate(self.layers):
            key = (number, through, own_calls[number])
            if key not in self._passing:
                self._passing[key] = _passing(layer.call, functools.partial(through, number))
            object.__setattr__(layer, "call", self._passing[key])
        try:
            yield
        finally:
            for layer, own_call in zip(self.layers, own_calls, strict=True):
                if own_call is None:
                    object.__delattr__(layer, "call")
                else:
                    object.__setattr__(layer, "call", own_call)

    def _not_called(self, number: int) -> UnsupportedStep:
        """What to raise for a layer whose output should be kept and never comes."""
        return UnsupportedStep(
            f"the checkpoint {self.layers[number].name!r} is a layer that this training step does not call; name "
            "layers on the way from the inputs to the loss"
        )


def _is_tensor_name(name: Any) -> bool:
    """Does ``name`` name a tensor (``"block/dense/BiasAdd:0"``), not a layer?"""
    return isinstance(name, str) and ("/" in name or ":" in name)


def _passing(call: Callable[..., Any], through: Callable[[Any], Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def passing(*args: Any, **kwargs: Any) -> Any:
        return through(call(*args, **kwargs))

    return passing
