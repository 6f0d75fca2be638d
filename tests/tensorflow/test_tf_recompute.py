"""``recompute`` changes no number: not in eager mode, not in graphs, not under XLA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from recompute_cases import CASES, WIDTH, Step, Wrap, added_losses, differentiate, values

from remat.tensorflow import recompute

MODES = ["eager", "graph", "xla", "graph inside, tape outside"]
# In TensorFlow itself a loss that is added inside a function cannot leave it.
_QUICK_UNDER_XLA = frozenset(
    {"nested_structures", "unused_outputs", "second_order", "side_effects", "closed_over_tensor"}
)


def _marks(case: Callable[[Wrap], Step], mode: str) -> Any:
    quick = mode in MODES[:2] or case.__name__ in _QUICK_UNDER_XLA
    return () if quick else pytest.mark.slow


COMBINATIONS = [
    pytest.param(case, mode, marks=_marks(case, mode), id=f"{case.__name__}-{mode}")
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


def copies(function: Any, *args: Any) -> int:
    graph = tf.function(function, autograph=False).get_concrete_function(*args).graph
    return sum("_remat_copy" in op.node_def.attr for op in graph.get_operations())


def test_each_operation_is_recomputed_once_and_no_more():
    @recompute
    def block(x):
        for _ in range(5):
            x = tf.tanh(x)
        return x

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(block(block(x)) ** 2)
        return tape.gradient(loss, x)

    graph = tf.function(step, autograph=False).get_concrete_function(tf.TensorSpec([4])).graph
    tanhs = [op for op in graph.get_operations() if op.type == "Tanh"]
    assert len(tanhs) == 20
    assert sum("_remat_copy" in op.node_def.attr for op in tanhs) == 10


def test_nested_regions_run_three_times_at_most():
    """Once forward, once in the outer region's recomputation, once in its own; what is last in the outer one, twice."""
    inner = recompute(lambda x: tf.tanh(tf.tanh(x)))
    outer = recompute(lambda x: inner(inner(x)))

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(outer(outer(x)) ** 2)
        return tape.gradient(loss, x)

    graph = tf.function(step, autograph=False).get_concrete_function(tf.TensorSpec([4])).graph
    needed, stack = set(), [t.op for t in graph.outputs]
    while stack:
        op = stack.pop()
        if op not in needed:
            needed.add(op)
            stack += [t.op for t in op.inputs] + list(op.control_inputs)
    assert sum(op.type == "Tanh" for op in needed) == 8 + 4 + 8


def test_switches(monkeypatch):
    def step(x, **how):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(block(x, **how))
        return tape.gradient(loss, x)

    block = recompute(lambda x: tf.tanh(tf.sin(x)))
    spec = tf.TensorSpec([4])
    assert copies(step, spec) > 0
    assert copies(lambda x: step(x, enabled=False), spec) == 0
    monkeypatch.setenv("REMAT_RECOMPUTE", "0")
    assert copies(step, spec) == 0
    monkeypatch.delenv("REMAT_RECOMPUTE")
    block = recompute(lambda x: tf.tanh(tf.sin(x)), enabled=lambda: False)
    assert copies(step, spec) == 0
    block = recompute(lambda x, enabled: tf.tanh(tf.sin(x)) if enabled else x)  # A parameter of the function's own.
    assert copies(lambda x: step(x, enabled=True), spec) > 0


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_stateful_dropout_and_the_global_seed(mode):
    """The mask is the plain function's, the same in the recomputation; and draws afterwards are what they were."""

    def run_with(wrap):
        tf.random.set_seed(3)
        x = values(64, WIDTH)
        block = wrap(lambda x: tf.tanh(tf.nn.dropout(tf.nn.dropout(tf.sin(x), 0.5) + 1.0, 0.3)))

        def step():
            return differentiate(x, lambda: tf.reduce_sum(block(block(x)) ** 2))

        found = step() if mode == "eager" else tf.function(step, autograph=False)()
        again = step() if mode == "eager" else None
        return found, again, tf.random.uniform([3]) if mode == "eager" else None

    assert_same(run_with(recompute), run_with(lambda f: f))


def test_python_side_effects_happen_once_a_call_in_eager_mode():
    calls = []

    @recompute
    def block(x):
        calls.append(1)
        return tf.sin(x)

    for _ in range(3):
        differentiate(x := values(4), lambda: tf.reduce_sum(block(x)))
    assert len(calls) == 3


def test_what_is_closed_over_may_change_between_eager_calls():
    x, scale = values(4), 1.0
    block = recompute(lambda x: tf.sin(x) * scale)
    first = differentiate(x, lambda: tf.reduce_sum(block(x)))[1]
    scale = 2.0
    np.testing.assert_allclose(differentiate(x, lambda: tf.reduce_sum(block(x)))[1], 2.0 * first, rtol=1e-6)
