"""``gradients`` takes what ``tf.gradients`` takes and gives what it gives, in functions and in TensorFlow 1 graphs."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import remat
from remat.tensorflow import (
    gradients,
    gradients_collection,
    gradients_memory,
    gradients_speed,
    last_plan,
    replaced_gradients,
)

pytestmark = pytest.mark.other_cpu

v1 = tf.compat.v1
WIDTH, BATCH, DEPTH = 128, 1024, 8
Network = Callable[[tf.Tensor, list[Any]], tuple[Any, Any]]


def weights(dtype: Any = np.float32) -> list[np.ndarray[Any, Any]]:
    random = np.random.default_rng(0)
    return [(random.normal(size=(WIDTH, WIDTH)) * WIDTH**-0.5).astype(dtype) for _ in range(DEPTH)]


def batch(dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    return np.random.default_rng(1).normal(size=(BATCH, WIDTH)).astype(dtype)


def dense(x, w):
    for number, weight in enumerate(w):
        x = tf.tanh(x @ weight) * tf.sigmoid(x)
        if number in (2, 5):
            v1.add_to_collection("checkpoints", x)
    return tf.reduce_mean(x**2), w


def half(x, w):
    w = [tf.cast(weight, tf.float16) for weight in w]
    x = tf.cast(x, tf.float16)
    for weight in w:
        x = tf.tanh(x @ weight)
    return tf.reduce_mean(tf.cast(x, tf.float32) ** 2), w


def embedding(x, w):
    tokens = tf.cast(tf.abs(x[:, 0]) * 20, tf.int64)
    rows = tf.nn.embedding_lookup(w[0], tokens)
    return dense(rows + x, w)[0], w


def skip_connections(x, w):
    kept = []
    for weight in w[:4]:
        x = tf.tanh(x @ weight)
        kept.append(x)
    for weight, skip in zip(w[4:], reversed(kept), strict=True):
        x = tf.tanh(x @ weight) + skip
    return tf.reduce_mean(x**2), w


def two_losses(x, w):
    left = right = x
    for weight in w[:4]:
        left = tf.tanh(left @ weight)
    for weight in w[4:]:
        right = tf.sin(right @ weight)
    return [tf.reduce_mean(left**2), tf.reduce_mean(left * right)], w


def while_loop(x, w):
    _, x = tf.while_loop(lambda i, _: i < 3, lambda i, h: (i + 1, tf.tanh(h @ w[0])), (0, x), maximum_iterations=3)
    return dense(x, w)[0], w


NETWORKS: list[Network] = [dense, half, embedding, skip_connections, two_losses, while_loop]

WAYS: dict[str, Any] = {
    "memory": {"checkpoints": "memory"},
    "speed": {"checkpoints": "speed"},
    "budget": {"budget": "85%", "planner": "peak_greedy"},
    "knee": {"planner": "peak_greedy"},
}


def in_function(network: Network, take: Callable[..., Any]) -> list[Any]:
    variables = [tf.Variable(w) for w in weights()]

    @tf.function(autograph=False)
    def step(x):
        ys, xs = network(x, [v.read_value() for v in variables])
        return [tf.convert_to_tensor(g) for g in take(ys, xs)]

    return [g.numpy() for g in step(tf.constant(batch()))]


def in_session(network: Network, take: Callable[..., Any]) -> list[Any]:
    with tf.Graph().as_default():
        v1.set_random_seed(1)
        enabled = v1.control_flow_v2_enabled()
        v1.enable_control_flow_v2()
        x = v1.placeholder(tf.float32, [BATCH, WIDTH])
        variables = [v1.get_variable(f"w{n}", initializer=w, use_resource=True) for n, w in enumerate(weights())]
        ys, xs = network(x, [v.read_value() for v in variables])
        found = [tf.convert_to_tensor(g) for g in take(ys, xs)]
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            values = session.run(found, {x: batch()})
        if not enabled:
            v1.disable_control_flow_v2()
        return values


# A step of half precision holds float32 copies of what a product reads, which no plan makes smaller.
BUDGETS = {half: "97%"}
# A budget writes the bodies of a loop anew, which nothing else here does.
QUICK = [(network, "memory") for network in NETWORKS] + [(while_loop, "budget")]
SLOW = [(network, way) for network in NETWORKS for way in WAYS if (network, way) not in QUICK]


@pytest.mark.parametrize(
    ("network", "way"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
    ids=lambda one: one if isinstance(one, str) else one.__name__,
)
@pytest.mark.parametrize("kind", [in_function, in_session], ids=lambda kind: kind.__name__)
def test_numbers_are_those_of_tf_gradients(kind, network, way):
    plain = kind(network, tf.gradients)
    options = {**WAYS[way], **({"budget": BUDGETS[network]} if way == "budget" and network in BUDGETS else {})}
    found = kind(network, lambda ys, xs: gradients(ys, xs, **options))
    assert last_plan().recomputed > 0 or way == "knee"
    for one, other in zip(found, plain, strict=True):
        tolerance = 2e-2 if one.dtype == np.float16 else 1e-5
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * max(1e-9, float(np.abs(other).max())))


def test_incoming_gradients_stops_and_none():
    def both(take):
        @tf.function
        def step(x, incoming):
            a, b, unused = tf.constant(1.5), tf.constant(0.5), tf.constant(2.0)
            y = x
            for _ in range(6):
                y = tf.tanh(y * a)
            stopped = y * b
            y = tf.sin(stopped)
            found = take([y, stopped], [a, b, unused], [incoming, None], stop_gradients=[b])
            assert found[2] is None
            zeros = take(y, unused, unconnected_gradients=tf.UnconnectedGradients.ZERO)
            return [*found[:2], zeros[0]]

        return [t.numpy() for t in step(tf.constant(batch()), tf.constant(batch()))]

    plain = both(tf.gradients)
    found = both(lambda ys, xs, grad_ys=None, **more: gradients(ys, xs, grad_ys, "memory", **more))
    np.testing.assert_allclose(found, plain, rtol=1e-5)


def test_a_list_of_tensors_is_what_is_kept():
    kept = []

    @tf.function(autograph=False)
    def step(x):
        h, cuts = x, []
        for number in range(9):
            h = tf.tanh(tf.sin(h))
            if number % 3 == 2:
                cuts.append(h)
        kept.extend(t.name for t in cuts[:-1])
        return gradients(tf.reduce_sum(h**2), x, checkpoints=cuts[:-1])

    function = step.get_concrete_function(tf.TensorSpec([BATCH, WIDTH]))
    copied = {
        op.name.rpartition("/recomputed_")[0] for op in function.graph.get_operations() if "/recomputed_" in op.name
    }
    forward = {op.name for op in function.graph.get_operations() if op.type in ("Tanh", "Sin")} - {
        op.name for op in function.graph.get_operations() if "/recomputed_" in op.name
    }
    assert {name.partition(":")[0] for name in kept}.isdisjoint(copied)
    assert len(copied & forward) >= len(forward) - len(kept) - 2


@pytest.mark.parametrize(
    ("shorthand", "rule"),
    [(gradients_memory, "memory"), (gradients_speed, "speed"), (gradients_collection, "collection")],
)
def test_shorthands(shorthand, rule):
    found = in_session(dense, shorthand)
    planned = last_plan()
    expected = in_session(dense, lambda ys, xs: gradients(ys, xs, checkpoints=rule))
    assert planned.schedule == last_plan().schedule
    assert planned.recomputed > 0
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("call", [tf.gradients, v1.gradients, "optimizer"], ids=["tf", "v1", "optimizer"])
def test_code_that_one_cannot_change(call):
    def train(use: bool) -> list[Any]:
        with tf.Graph().as_default() as graph:
            x = v1.placeholder(tf.float32, [BATCH, WIDTH])
            variables = [v1.get_variable(f"w{n}", initializer=w) for n, w in enumerate(weights())]
            loss, _ = dense(x, variables)
            optimizer = v1.train.GradientDescentOptimizer(0.1)

            def build() -> Any:
                if call == "optimizer":
                    return optimizer.minimize(loss)
                look_up = tf.gradients if call is _PLAIN else v1.gradients
                return optimizer.apply_gradients(zip(look_up(loss, variables), variables, strict=True))

            if use:
                with replaced_gradients("memory"):
                    train_op = build()
            else:
                train_op = build()
            copies = sum("_remat_copy" in op.node_def.attr for op in graph.get_operations())
            assert (copies > 0) == use
            with v1.Session() as session:
                session.run(v1.global_variables_initializer())
                for _ in range(2):
                    session.run(train_op, {x: batch()})
                return session.run(variables)

    plain, found = train(False), train(True)
    for one, other in zip(found, plain, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    assert tf.gradients is _PLAIN


_PLAIN = tf.gradients


def test_every_module_of_tensorflow_1_is_reached():
    """To import it by name makes another one than the attribute was."""
    by_name = importlib.import_module("tensorflow.compat.v1")
    plain = v1.gradients
    with replaced_gradients("memory"):
        assert by_name.gradients is v1.gradients is tf.gradients is not _PLAIN
    assert by_name.gradients is v1.gradients is plain


def test_two_calls_in_one_function_are_planned_once():
    def both(take):
        @tf.function(autograph=False)
        def step(x):
            first, second = tf.constant(1.1), tf.constant(0.9)
            h = x
            for _ in range(6):
                h = tf.tanh(tf.sin(h * first) * second)
            return take(tf.reduce_sum(h), first)[0], take(tf.reduce_sum(h**2), second)[0]

        return step(tf.constant(batch()))

    np.testing.assert_allclose(both(lambda y, x: gradients(y, x, checkpoints="memory")), both(tf.gradients), rtol=1e-4)
    with pytest.raises(remat.UnsupportedStep, match="twice in one function with different"):
        both(lambda y, x: gradients(y, x, budget=1 << 30 if "Sum_1" in y.name else 1 << 29))


def test_an_evaluation_branch_is_left_alone():
    """Nothing that a session runs for the loss may wait for what only the evaluation needs."""
    with tf.Graph().as_default():
        x, labels = v1.placeholder(tf.float32, [BATCH, WIDTH]), v1.placeholder(tf.float32, [BATCH, WIDTH])
        h = x
        for _ in range(6):
            h = tf.tanh(h)
        accuracy = tf.reduce_mean(tf.abs(h - labels))
        gradient = gradients(tf.reduce_sum(h), x, checkpoints="memory")[0]
        with v1.Session() as session:
            session.run(gradient, {x: batch()})
            assert session.run(accuracy, {x: batch(), labels: batch()}) > 0


def test_unknown_batch_dimension():
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, [None, WIDTH])
        h = x
        for _ in range(8):
            h = tf.tanh(h)
        with pytest.raises(remat.UnsupportedStep, match="batch_size="):
            gradients(tf.reduce_sum(h), x, checkpoints="memory")
        found = gradients(tf.reduce_sum(h), x, checkpoints="memory", batch_size=BATCH)[0]
        assert last_plan().recomputed > 0
        with v1.Session() as session:
            assert session.run(found, {x: batch()[:7]}).shape == (7, WIDTH)


@pytest.mark.slow
def test_ten_thousand_operations_are_rewritten_in_seconds():
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [BATCH, WIDTH])
        h = x
        while len(graph.get_operations()) < 5000:
            h = tf.tanh(h)
        started = time.perf_counter()
        tf.gradients(tf.reduce_sum(h), x)
        plain_s = time.perf_counter() - started
        assert len(graph.get_operations()) >= 10_000
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [BATCH, WIDTH])
        h = x
        while len(graph.get_operations()) < 5000:
            h = tf.tanh(h)
        started = time.perf_counter()
        gradients(tf.reduce_sum(h), x, checkpoints="memory")
        took_s = time.perf_counter() - started
    assert last_plan().recomputed > 4000
    assert took_s - plain_s < 60


def test_bad_requests_say_what_to_do():
    x = tf.constant(1.0)
    with pytest.raises(remat.UnsupportedStep, match=r"eager mode.*@tf\.function"):
        gradients(x, x, budget="50%")
    with pytest.raises(ValueError, match="not both"):
        gradients(x, x, checkpoints="memory", budget="50%")
    with pytest.raises(ValueError, match="'memroy' is no rule; give one of memory, speed, collection"):
        gradients(x, x, checkpoints="memroy")
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, [8])
        y = tf.reduce_sum(tf.tanh(x))
        with pytest.raises(ValueError, match="collection 'checkpoints' is empty"):
            gradients(y, x, checkpoints="collection")
        with pytest.raises(remat.UnsupportedStep, match="is no tensor that the gradients need"):
            gradients(y, x, checkpoints=[tf.sin(x)])
