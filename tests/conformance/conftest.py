"""Quiet frameworks on the CPU."""

from __future__ import annotations

import importlib
import os

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("JAX_PLATFORMS", "cpu")


@pytest.fixture(autouse=True, scope="session")
def frameworks_are_loaded() -> None:
    """Before the first test, so that no collection of garbage has to look through them."""
    for name in ("jax", "tensorflow", "torch"):
        importlib.import_module(name)
