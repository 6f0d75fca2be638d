"""``limit_memory(micro_batches=k)`` on PyTorch: the tests of the TensorFlow backend, run once more on this one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from keras_contract import FILES, run

# Keras on PyTorch knows neither several steps per execution, nor sparse gradients, nor batches of an unknown size. Its
# own training multiplies the weights by the mask in place, so that weighted metrics get the mask of the loss as well.
NOT_HERE = (
    "not xla and not test_steps_per_execution and not test_an_embedding and not test_an_unknown_size_that_differs "
    "and not masked-on_weighted_sentences"
)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_the_whole_contract(name):
    assert run("torch", name, NOT_HERE, CUDA_VISIBLE_DEVICES="") >= 5
