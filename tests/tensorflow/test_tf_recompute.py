"""``recompute`` changes no number: not in eager mode, not in graphs, not under XLA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from recompute_cases import CASES, Step, Wrap, added_losses

from remat.tensorflow import recompute

MODES = ["eager", "graph", "xla", "graph inside, tape outside"]
# In TensorFlow itself a loss that is added inside a function cannot leave it.
COMBINATIONS = [
    pytest.param(case, mode, id=f"{case.__name__}-{mode}")
    for case in CASES
    for mode in MODES
    if not (case is added_losses and mode == MODES[-1])
]


def run(case: Callable[[Wrap], Step], wrap: Wrap, mode: str) -> Any:
    keras.utils.set_random_seed(1)
    if mode == "graph inside, tape outside":
        # Each wrapped function in a graph of its own; gradients are taken eagerly.
        return case(lambda f: tf.function(wrap(f), autograph=False))()
    step = case(wrap)
    if mode == "eager":
        return step()
    return tf.function(step, jit_compile=mode == "xla", autograph=False)()


def assert_same(found: Any, plain: Any) -> None:
    ours, theirs = (tf.nest.flatten(value, expand_composites=False) for value in (found, plain))
    assert len(ours) == len(theirs)
    compared = 0
    for one, other in zip(ours, theirs, strict=True):
        assert type(one) is type(other)
        if other is None:
            continue
        got, want = tf.convert_to_tensor(one), tf.convert_to_tensor(other)
        assert got.dtype == want.dtype
        tolerance = {2: 2e-2, 4: 2e-5}.get(want.dtype.size, 1e-8)
        array = want.numpy().astype("float64")
        scale = max(1e-30, float(np.abs(array).max()))
        np.testing.assert_allclose(got.numpy().astype("float64"), array, rtol=0, atol=tolerance * scale)
        compared += 1
    assert compared


@pytest.mark.parametrize(("case", "mode"), COMBINATIONS)
def test_numbers_are_those_of_the_plain_function(case, mode):
    assert_same(run(case, recompute, mode), run(case, lambda f: f, mode))
