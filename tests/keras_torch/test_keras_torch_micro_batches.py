"""``limit_memory(micro_batches=k)`` on PyTorch: the tests of the TensorFlow backend, run once more on this one."""

from __future__ import annotations

import pytest

from keras_contract import check

# Keras on PyTorch knows neither XLA, nor several steps per execution, nor batches of an unknown size. Its own training
# multiplies the weights by the mask in place, so that weighted metrics get the mask of the loss as well.
NOT_HERE = ["test_xla", "test_steps_per_execution", "test_an_unknown_size_that_differs", "masked-on_weighted_sentences"]


@pytest.mark.slow
def test_the_whole_contract():
    check("torch", NOT_HERE, CUDA_VISIBLE_DEVICES="")
