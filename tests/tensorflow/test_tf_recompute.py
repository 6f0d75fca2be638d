"""``recompute`` changes no number: not in eager mode, not in graphs, not under XLA."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from recompute_cases import CASES, WIDTH, Step, Wrap, added_losses, differentiate, values, variable

from remat.tensorflow import recompute
from remat.tensorflow.recompute.eager import EagerCalls

pytestmark = pytest.mark.other_cpu

MODES = ["eager", "graph", "xla", "graph inside, tape outside", "graph in segments", "xla in segments"]
# In TensorFlow itself a loss that is added inside a function cannot leave it.
_QUICK_UNDER_XLA = frozenset(
    {"nested_structures", "unused_outputs", "second_order", "side_effects", "closed_over_tensor"}
)
_QUICK_IN_SEGMENTS = frozenset({"nested_recompute", "embedding", "batch_normalization", "output_is_input"})


def _marks(case: Callable[[Wrap], Step], mode: str) -> Any:
    some = {"graph in segments": _QUICK_IN_SEGMENTS, "xla in segments": frozenset()}
    quick = mode in MODES[:2] or case.__name__ in some.get(mode, _QUICK_UNDER_XLA)
    return () if quick else pytest.mark.slow


COMBINATIONS = [
    pytest.param(case, mode, marks=_marks(case, mode), id=f"{case.__name__}-{mode}")
    for case in CASES
    for mode in MODES
    if not (case is added_losses and mode == "graph inside, tape outside")
]


def run(case: Callable[[Wrap], Step], wrap: Wrap, mode: str) -> Any:
    keras.utils.set_random_seed(1)
    if mode == "graph inside, tape outside":
        # Each wrapped function in a graph of its own; gradients are taken eagerly.
        return case(lambda f: tf.function(wrap(f), autograph=False))()
    step = case(wrap)
    if mode == "eager":
        return step()
    return tf.function(step, jit_compile=mode.startswith("xla"), autograph=False)()


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
    wrap = recompute(in_segments=mode.endswith("in segments"))
    assert_same(run(case, wrap, mode), run(case, lambda f: f, mode))


def copies(function: Any, *args: Any) -> int:
    graph = tf.function(function, autograph=False).get_concrete_function(*args).graph
    return sum("_remat_copy" in op.node_def.attr for op in graph.get_operations())


def graph_of_gradient(function):
    """The graph of the gradient of the sum of squares of a function of four numbers."""

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(function(x) ** 2)
        return tape.gradient(loss, x)

    return tf.function(step, autograph=False).get_concrete_function(tf.TensorSpec([4])).graph


def test_each_operation_is_recomputed_once_and_no_more():
    @recompute
    def block(x):
        for _ in range(5):
            x = tf.tanh(x)
        return x

    graph = graph_of_gradient(lambda x: block(block(x)))
    tanhs = [op for op in graph.get_operations() if op.type == "Tanh"]
    assert len(tanhs) == 20
    assert sum("_remat_copy" in op.node_def.attr for op in tanhs) == 10


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_nested_operation_runs_once_more_for_each_region_around_it(depth):
    """Two calls on each level. What comes last in a region needs no run for that region: nothing reads it there.

    So with r(d) runs of the innermost function's operations for the backward pass of one region of depth d, r(1) = 1
    and r(d) = 2 r(d - 1) + 2 ** (d - 2): two regions inside, the first of which also runs for what reads it.
    """
    block = recompute(lambda x: tf.tanh(tf.tanh(x)))
    for _ in range(depth - 1):
        block = recompute(lambda x, inner=block: inner(inner(x)))

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(block(block(x)) ** 2)
        return tape.gradient(loss, x)

    graph = tf.function(step, autograph=False).get_concrete_function(tf.TensorSpec([4])).graph
    needed, stack = set(), [t.op for t in graph.outputs]
    while stack:
        op = stack.pop()
        if op not in needed:
            needed.add(op)
            stack += [t.op for t in op.inputs] + list(op.control_inputs)
    runs = 1
    for level in range(2, depth + 1):
        runs = 2 * runs + 2 ** (level - 2)
    forward = 2 * 2**depth
    assert sum(op.type == "Tanh" for op in needed) == forward + 2 * 2 * runs


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


def test_an_equal_graph_is_built_once_and_no_variable_is_kept_alive():
    x, block_variables = values(4, WIDTH), [variable(WIDTH, WIDTH), variable(WIDTH, WIDTH, seed=9)]
    calls = EagerCalls(lambda x, v, times=1.0: tf.tanh(x @ v) * times, segmented=False)

    def gradient(v, times=1.0):
        return differentiate([x, v], lambda: tf.reduce_sum(calls.run((x, v), {"times": times})))[1]

    def kept():
        return [concrete for concrete in calls._known._known.values() if concrete is not None]

    for count, v in enumerate([block_variables[0]] * 3 + [block_variables[1]] * 3):
        assert_same(gradient(v), differentiate([x, v], lambda v=v: tf.reduce_sum(tf.tanh(x @ v)))[1])
        assert len(kept()) == (count > 0) + (count > 3)
    assert_same(gradient(v, times=3.0), [3.0 * g for g in gradient(v)])  # Another graph.
    dead = weakref.ref(block_variables[0])
    del block_variables[0]
    gc.collect()
    assert dead() is None
    assert len(kept()) == 1


def test_captured_tensors_and_new_seeds_are_not_kept():
    x, scale = values(4, WIDTH), values(4, WIDTH, seed=3)
    for function in (lambda x: x * scale, lambda x: tf.nn.dropout(tf.sin(x), 0.5)):
        calls = EagerCalls(function, segmented=False)
        for _ in range(3):
            differentiate(x, lambda calls=calls: tf.reduce_sum(calls.run((x,), {})))
        assert not any(calls._known._known.values())


def test_a_tf_function_is_traced_once_and_recomputed():
    traces = []

    @recompute
    @tf.function
    def block(x):
        traces.append(1)
        for _ in range(5):
            x = tf.tanh(x)
        return x

    x = values(4)
    for _ in range(3):
        differentiate(x, lambda: tf.reduce_sum(block(x)))
    assert len(traces) == 1
    differentiate(x, lambda: tf.reduce_sum(block(x, enabled=False)))  # The plain function is another one.
    assert len(traces) == 2


def test_a_whole_network_in_segments_keeps_few_tensors():
    @recompute(in_segments=True)
    def network(x):
        for _ in range(25):
            x = tf.tanh(x)
        return x

    graph = graph_of_gradient(network)
    copied = [op for op in graph.get_operations() if op.type == "Tanh" and "_remat_copy" in op.node_def.attr]
    assert len(copied) == 25
    forward = [op for op in graph.get_operations() if op.type == "Tanh" and op not in copied]
    kept = [op for op in forward if any("_remat_copy" in t.node_def.attr for o in op.outputs for t in o.consumers())]
    assert 3 <= len(kept) <= 5
