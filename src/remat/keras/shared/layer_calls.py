"""What layers return while a training step is traced, for checkpoints that a user names."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from remat.core.errors import UnsupportedStep


def is_tensor_name(name: Any) -> bool:
    """Does ``name`` name a tensor (``"block/dense/BiasAdd:0"``), not a layer?"""
    return isinstance(name, str) and ("/" in name or ":" in name)


def not_called(layer: Any) -> UnsupportedStep:
    """What to raise for a layer whose output should be kept and never comes."""
    return UnsupportedStep(
        f"the checkpoint {layer.name!r} is a layer that this training step does not call; name layers on the way from "
        "the inputs to the loss"
    )


@contextlib.contextmanager
def calls_pass(layers: Sequence[Any], through: Callable[[int, Any], Any]) -> Iterator[None]:
    """Inside, what a layer's ``call`` returns is what ``through`` makes of it.

    Args:
        layers: the layers; they are changed while this lasts.
        through: takes the layer's number among ``layers`` and its result.
    """
    own_calls = [vars(layer).get("call") for layer in layers]
    for number, layer in enumerate(layers):
        object.__setattr__(layer, "call", _passing(layer.call, functools.partial(through, number)))
    try:
        yield
    finally:
        for layer, own_call in zip(layers, own_calls, strict=True):
            if own_call is None:
                object.__delattr__(layer, "call")
            else:
                object.__setattr__(layer, "call", own_call)


def _passing(call: Callable[..., Any], through: Callable[[Any], Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def passing(*args: Any, **kwargs: Any) -> Any:
        return through(call(*args, **kwargs))

    return passing
