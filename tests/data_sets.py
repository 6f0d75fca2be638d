"""Data sets of TensorFlow that nobody waits for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

_iterate: Callable[[Any], Any] = tf.data.Dataset.__iter__


def iterate_untuned(data_set: Any) -> Any:
    """An iterator over a data set whose performance TensorFlow does not tune; to stand in place of ``__iter__``.

    It tunes in a thread that sleeps for longer and longer. Who lets go of the iterator waits until the thread wakes up:
    for a second after each ``fit`` of a test.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return _iterate(data_set.with_options(options))
