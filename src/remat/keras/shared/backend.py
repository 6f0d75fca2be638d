"""Finds what belongs to the active backend: each has a folder with the same files, and the same names in them."""

from __future__ import annotations

import importlib
from typing import Any, Final

import keras

from remat.core.errors import UnsupportedStep

BACKENDS: Final = ("tensorflow", "jax", "torch")
"""The backends of Keras that remat has a front end for. Keras 3.15 has others (NumPy and OpenVINO), which do not train.

Each is a folder of ``remat.keras`` with the modules ``limit``, ``choose``, ``step``, ``kept_layers``, ``trace`` and
``workload``.
"""


def of_backend(module: str, caller: str) -> Any:
    """A module of the active backend's folder, so that no other framework is imported.

    Args:
        module: its name.
        caller: the function that the user called, for the error.

    Raises:
        UnsupportedStep: for a backend that remat does not support.
    """
    backend = keras.backend.backend()
    if backend not in BACKENDS:
        raise UnsupportedStep(
            f"{caller} supports Keras on TensorFlow, JAX and PyTorch, and the active backend is {backend!r}; set "
            "KERAS_BACKEND=tensorflow, jax or torch before keras is imported"
        )
    return importlib.import_module(f"remat.keras.{backend}.{module}")
