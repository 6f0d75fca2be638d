"""The batches that Keras trains on with TensorFlow: their tensors and shapes, and an iterator that gives them back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

Shapes: TypeAlias = list[tuple[int, ...]]


def leaves(data: Any) -> list[Any]:
    """The tensors of one batch, in a fixed order; absent parts left out."""
    flat = tf.nest.flatten(data, expand_composites=True)
    return [leaf for leaf in flat if leaf is not None and not isinstance(leaf, tf.experimental.Optional)]


def unpacked(batch: Any) -> tuple[Any, Any, Any]:
    """Inputs, targets and weights of samples, None for what is absent."""
    x, y, sample_weight = tf.nest.map_structure(
        lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf,
        keras.utils.unpack_x_y_sample_weight(batch),
    )
    return x, y, sample_weight


def parts_of_replicas(strategy: tf.distribute.Strategy, batch: Any) -> list[Any]:
    """What each replica of this process gets of a batch."""
    flat = tf.nest.flatten(batch)
    parts = zip(*(strategy.experimental_local_results(value) for value in flat), strict=True)
    return [tf.nest.pack_sequence_as(batch, list(part)) for part in parts]


def largest_shapes(batches: Iterable[Any]) -> Shapes:
    """For each tensor of a batch, the largest shape among the batches."""
    per_batch = [[tuple(tf.convert_to_tensor(leaf).shape) for leaf in leaves(batch)] for batch in batches]
    return [tuple(max(sizes) for sizes in zip(*shapes, strict=True)) for shapes in zip(*per_batch, strict=True)]


def grown_shapes(known: Shapes, shapes: Shapes) -> Shapes:
    """What is known to come, with some shapes that have come: for each tensor the larger size of each axis."""
    if [len(s) for s in shapes] != [len(s) for s in known]:
        return shapes
    return [tuple(map(max, a, b)) for a, b in zip(known, shapes, strict=True)]


def may_grow(element_spec: Any) -> bool:
    """May later batches of a data set be larger than the first? Of the first axis the last batch alone has less."""
    specs = tf.nest.flatten(element_spec, expand_composites=True)
    shapes = [spec.shape for spec in specs if isinstance(spec, tf.TensorSpec)]
    return any(shape.rank is None or None in shape.as_list()[1:] for shape in shapes)


def same_type_of_iterator(batches: Sequence[Any], element_spec: Any) -> tf.data.Iterator:
    """An iterator over ``batches`` for which a function traced for ``element_spec`` is not traced again."""
    dataset = tf.data.Dataset.from_tensors(batches[0])
    for batch in batches[1:]:
        dataset = dataset.concatenate(tf.data.Dataset.from_tensors(batch))
    return iter(tf.data.experimental.from_variant(tf.data.experimental.to_variant(dataset), element_spec))
