"""``limit_memory(micro_batches=k)`` on JAX: the tests of the TensorFlow backend, run once more on this one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from keras_contract import FILES, run

# Sparse gradients, missing ones and batches of an unknown size do not exist on JAX; XLA is always on.
NOT_HERE = (
    "not xla and not test_an_embedding and not test_variables_without_a_gradient_stay and not "
    "test_an_unknown_size_that_differs"
)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_the_whole_contract(name):
    assert run("jax", name, NOT_HERE, JAX_PLATFORMS="cpu", XLA_FLAGS="") >= 5
