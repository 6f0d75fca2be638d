"""The zoo of Keras, on any of its backends: plain, under ``keras.RematScope``, and under remat."""

from __future__ import annotations

import os
from typing import Final

from benchmarks.zoo.frame import heap
from benchmarks.zoo.frame.subject import Models
from benchmarks.zoo.keras import hub, models

MODELS: Final[Models] = {**models.MODELS, **hub.MODELS}

IS_APART: Final = True
"""TensorFlow counts the weights of every model of a process."""


def environment(backend: str) -> dict[str, str]:
    """What a process needs that measures on this backend."""
    found = {**heap.environment(), "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "2"}
    if backend == "tensorflow":
        # The counter of a CPU's memory is there only with oneDNN, which some CPUs leave off.
        return {**found, "TF_ENABLE_ONEDNN_OPTS": os.environ.get("TF_ENABLE_ONEDNN_OPTS", "1")}
    if backend == "jax":
        # The process runs on one core (``one_core.py``), for which Eigen's kernels need no threads.
        return {**found, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}
    return found


__all__ = ["MODELS", "environment"]
