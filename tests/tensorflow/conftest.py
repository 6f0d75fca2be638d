"""Quiet TensorFlow, and the same random numbers in whatever order tests run."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    import keras

    keras.utils.set_random_seed(1)
