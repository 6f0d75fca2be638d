"""A step small enough to plan in a fraction of a second, for tests of everything but the models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from remat.tensorflow import GradientTape

WIDTH = 256
BATCH = 1024
DEPTH = 6
PLANNING = {"planner": "peak_greedy"}

Loss = Callable[..., tf.Tensor]


class Chain:
    """Dense layers one after the other; every activation has ``BATCH * WIDTH * 4`` bytes = 1 MiB."""

    def __init__(self, depth: int = DEPTH) -> None:
        random = np.random.default_rng(0)
        self.weights = [
            tf.Variable(random.normal(size=(WIDTH, WIDTH), scale=WIDTH**-0.5).astype("float32"), name=f"w{number}")
            for number in range(depth)
        ]

    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        for weight in self.weights:
            x = tf.tanh(x @ weight) * tf.sigmoid(x)
        return x


def inputs(batch: int = BATCH, seed: int = 3) -> tf.Tensor:
    return tf.constant(np.random.default_rng(seed).normal(size=(batch, WIDTH)).astype("float32"))


@dataclass(frozen=True)
class Ran:
    """One run of a step: its loss, its gradients, and the tape that wrote them."""

    loss: float
    gradients: list[Any]
    tape: Any
    function: Any


def run(
    loss: Loss,
    sources: Sequence[tf.Variable],
    *args: Any,
    budget: int | str | None,
    autograph: bool = False,
    **options: Any,
) -> Ran:
    """The gradients of ``loss(*args)`` in a fresh ``tf.function``; plain where the budget is None."""
    tapes = []

    @tf.function(autograph=autograph)
    def step(*args: Any) -> Any:
        tape = tf.GradientTape() if budget is None else GradientTape(budget=budget, **{**PLANNING, **options})
        tapes.append(tape)
        with tape:
            value = loss(*args)
        return value, tape.gradient(value, list(sources))

    value, gradients = step(*args)
    return Ran(float(value), gradients, tapes[0], step.get_concrete_function(*args))


def assert_equal_gradients(found: Ran, plain: Ran) -> None:
    """Equal to float rounding: 1e-5 of the plain gradient's largest value."""
    assert found.loss == pytest.approx(plain.loss, rel=1e-5)
    for one, other in zip(found.gradients, plain.gradients, strict=True):
        assert type(one) is type(other)
        if other is None:
            continue
        dense, expected = tf.convert_to_tensor(one).numpy(), tf.convert_to_tensor(other).numpy()
        scale = np.abs(expected).max()
        assert scale > 0
        np.testing.assert_allclose(dense, expected, rtol=0, atol=1e-5 * scale)


def copies_in(function: Any) -> list[tf.Operation]:
    """The recomputations that a traced function holds."""
    return [op for op in function.graph.get_operations() if "_remat_copy" in op.node_def.attr]
