"""The zoo of Keras, on any of its backends: plain, under ``keras.RematScope``, and under remat."""

from __future__ import annotations

from typing import Final

from benchmarks.zoo.frame import heap
from benchmarks.zoo.frame.subject import Models
from benchmarks.zoo.keras import hub, models

MODELS: Final[Models] = {**models.MODELS, **hub.MODELS}

IS_APART: Final = True
"""TensorFlow counts the weights of every model of a process."""


def environment(backend: str) -> dict[str, str]:
    """What a process needs that measures on this backend."""
    return {**heap.environment(), "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "2"}


__all__ = ["MODELS", "environment"]
