"""What a call takes and returns, as tensors: nested structures, and the masks and losses that Keras attaches."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

_MASK = "_keras_mask"


def flatten(value: Any) -> tuple[list[tf.Tensor], Callable[[Sequence[tf.Tensor]], Any]]:
    """The tensors of a structure, and how to put others in their places.

    Args:
        value: tensors, ragged and sparse tensors and anything else, in dicts, lists, tuples or alone. Variables stay
            where they are: they are no values.

    Returns:
        The tensors, and a function that takes as many and returns the same structure around them.
    """
    leaves = tf.nest.flatten(value)
    parts = [_components(leaf) for leaf in leaves]

    def rebuild(tensors: Sequence[tf.Tensor]) -> Any:
        remaining = iter(tensors)
        rebuilt = []
        for leaf, part in zip(leaves, parts, strict=True):
            new = [next(remaining) for _ in part]
            if not part:
                rebuilt.append(leaf)
            elif isinstance(leaf, tf.Tensor):
                rebuilt.append(new[0])
            else:
                rebuilt.append(tf.nest.pack_sequence_as(leaf, new, expand_composites=True))
        return tf.nest.pack_sequence_as(value, rebuilt)

    return [t for part in parts for t in part], rebuild


def _components(leaf: Any) -> list[tf.Tensor]:
    if isinstance(leaf, tf.Tensor):
        return [leaf]
    if isinstance(leaf, tf.RaggedTensor | tf.SparseTensor | tf.IndexedSlices):
        return list(tf.nest.flatten(leaf, expand_composites=True))
    return []


def mask_of(tensor: tf.Tensor) -> tf.Tensor | None:
    """The mask that Keras attached to a tensor."""
    return getattr(tensor, _MASK, None)


def with_mask_of(source: tf.Tensor, target: tf.Tensor) -> tf.Tensor:
    """``target`` with the mask that Keras attached to ``source``."""
    mask = mask_of(source)
    if mask is not None:
        set_mask(target, mask)
    return target


def set_mask(tensor: tf.Tensor, mask: tf.Tensor) -> None:
    """Attach a mask as Keras does."""
    setattr(tensor, _MASK, mask)


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
