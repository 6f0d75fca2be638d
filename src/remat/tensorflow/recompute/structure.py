"""Arguments and results of any structure, taken apart into their tensors and put together again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
