"""How many threads TensorFlow has on a CPU: for one operation's kernel, and for operations side by side."""

from __future__ import annotations

import os

import tensorflow as tf


def kernel_threads() -> int:
    """Threads among which one operation's work is cut."""
    return tf.config.threading.get_intra_op_parallelism_threads() or _said_or_all("TF_NUM_INTRAOP_THREADS")


def executor_threads() -> int:
    """Operations that run at a time, at most."""
    return tf.config.threading.get_inter_op_parallelism_threads() or _said_or_all("TF_NUM_INTEROP_THREADS")


def _said_or_all(variable: str) -> int:
    """As TensorFlow reads it: what is no number says nothing."""
    try:
        return int(os.environ.get(variable, "")) or _cores()
    except ValueError:
        return _cores()


def _cores() -> int:
    """Those that this process may use; TensorFlow makes no more threads than that."""
    if hasattr(os, "sched_getaffinity"):  # Not on macOS.
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
