"""Quiet TensorFlow, and a clean default session for each test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


@pytest.fixture(autouse=True)
def fresh_session() -> Iterator[None]:
    import keras

    keras.utils.set_random_seed(1)
    yield
    keras.backend.clear_session()
