"""Replicas and the store of their processes: private TensorFlow symbols, as in ``_private.py``."""

from __future__ import annotations

import tensorflow as tf
from tensorflow.python.eager import context as _context


def replica_numbers(context: tf.distribute.ReplicaContext) -> tuple[int, int]:
    """The number of a replica in its process, and in all processes; the public one is a tensor during a trace."""
    return int(context._replica_id), int(context._replica_id_in_sync_group)


class ProcessStore:
    """The key-value store of TensorFlow's coordination service, in which processes leave words for one another.

    It is a ``remat.fit.ranks.Store``. All processes of a ``MultiWorkerMirroredStrategy`` reach it.
    """

    def put(self, key: str, value: str) -> None:
        """Write a value once."""
        _context.context().set_config_key_value(key, value)

    def get(self, key: str, timeout_s: float) -> str | None:
        """Wait for a value that a process writes; None where none does in that time."""
        try:
            value: str = _context.context().get_config_key_value(key, int(1000 * timeout_s))
        except tf.errors.DeadlineExceededError:
            return None
        return value
