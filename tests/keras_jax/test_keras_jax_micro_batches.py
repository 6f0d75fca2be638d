"""``limit_memory(micro_batches=k)`` on JAX: the tests of the TensorFlow backend, run once more on this one."""

from __future__ import annotations

import pytest

from keras_contract import check

# Missing gradients and batches of an unknown size do not exist on JAX; XLA is always on.
NOT_HERE = ["test_xla", "test_variables_without_a_gradient_stay", "test_an_unknown_size_that_differs"]


@pytest.mark.slow
def test_the_whole_contract():
    check("jax", NOT_HERE, JAX_PLATFORMS="cpu", XLA_FLAGS="")
