"""Losses that Keras layers add while an eager call is traced: they must leave the trace as values.

``add_loss`` keeps a tensor on the layer, where the training step finds it later. Inside a trace that tensor is a
symbol; here it is noted, handed out of the trace as one more result, and its value put in its place.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

_active = threading.local()
_LISTS = ("_losses", "_eager_losses")  # Of Keras 3, and of tf_keras.


class Losses:
    """What layers added during one trace, in order."""

    def __init__(self) -> None:
        self._lists: list[list[Any]] = []
        self._symbols: list[tf.Tensor] = []

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._symbols)

    def note(self, layer: Any) -> None:
        """Remember the layer, whose losses are looked at when the trace ends."""
        for name in _LISTS:
            kept = getattr(layer, name, None)
            if isinstance(kept, list) and not any(known is kept for known in self._lists):
                self._lists.append(kept)

    def tensors(self) -> list[tf.Tensor]:
        """The symbols that were added and are still there."""
        graph = tf.compat.v1.get_default_graph()
        self._symbols = [t for kept in self._lists for t in kept if getattr(t, "graph", None) is graph]
        return list(self._symbols)

    def replace(self, values: Sequence[tf.Tensor]) -> None:
        """Put values in the places of the symbols."""
        by_symbol = {id(symbol): value for symbol, value in zip(self._symbols, values, strict=True)}
        for kept in self._lists:
            kept[:] = [by_symbol.get(id(t), t) for t in kept]


@contextlib.contextmanager
def collected_losses() -> Iterator[Losses]:
    """Note what layers add inside; nested uses note what they add themselves."""
    for name in ("keras", "tf_keras"):
        module = sys.modules.get(name)
        if module is not None and hasattr(module, "layers"):
            _observe(module.layers.Layer)
    outer = getattr(_active, "losses", None)
    _active.losses = Losses()
    try:
        yield _active.losses
    finally:
        _active.losses = outer


def _observe(layer_class: Any) -> None:
    """Make ``add_loss`` tell us of its layer; without a trace of ours it stays what it was."""
    own = layer_class.add_loss
    if getattr(own, "_remat_observed", False):
        return

    @functools.wraps(own)
    def add_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = own(self, *args, **kwargs)
        losses = getattr(_active, "losses", None)
        if losses is not None:
            losses.note(self)
        return result

    add_loss._remat_observed = True  # type: ignore[attr-defined]
    layer_class.add_loss = add_loss
