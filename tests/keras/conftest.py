"""The models of the TensorFlow tests, and quiet TensorFlow."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).parent.parent / "tensorflow"))


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    import keras

    keras.utils.set_random_seed(1)


@pytest.fixture(autouse=True)
def untuned_data_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    import tensorflow as tf

    from data_sets import iterate_untuned

    monkeypatch.setattr(tf.data.Dataset, "__iter__", iterate_untuned)
