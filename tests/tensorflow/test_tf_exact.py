"""Steps with operations that other tools get wrong: recomputation around them changes no number."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from small_steps import BATCH, PLANNING, WIDTH, Chain, assert_equal_gradients, copies_in, inputs, run

import remat
from remat.tensorflow import GradientTape

pytestmark = pytest.mark.other_cpu


def dense(chain, x):
    return tf.reduce_mean(tf.square(chain(x)))


def embedding(chain, table, x):
    tokens = tf.cast(tf.abs(x[:, 0]) * 100, tf.int32) % 50
    return dense(chain, tf.nn.embedding_lookup(table, tokens) + x)


def custom_gradient(chain, table, x):
    @tf.custom_gradient
    def tripled(y):
        return tf.tanh(y), lambda dy: 3.0 * dy

    return dense(chain, tripled(chain(x) + table[0]))


def nested_function(chain, table, x):
    inner = tf.function(lambda y: tf.tanh(y @ chain.weights[0]) + table[0])
    return dense(chain, inner(x)) + dense(chain, inner(x * 2.0))


def while_loop(chain, table, x):
    _, y = tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, tf.tanh(y @ chain.weights[0])), (0, x + table[0]))
    return dense(chain, y)


def conditional(chain, table, x):
    return dense(chain, tf.cond(tf.reduce_sum(x) > 1e9, lambda: x, lambda: tf.sin(x) + table[0]))


def ragged(chain, table, x):
    lengths = tf.fill([BATCH // 4], 4)
    rows = tf.RaggedTensor.from_row_lengths(x + table[0], lengths)
    return dense(chain, tf.reduce_mean(rows, axis=1))


def sparse(chain, table, x):
    picked = tf.sparse.from_dense(tf.where(x > 1.0, x, 0.0))
    return dense(chain, tf.sparse.sparse_dense_matmul(picked, chain.weights[0]) + table[0])


def boolean_mask(chain, table, x):
    return dense(chain, tf.boolean_mask(x, x[:, 0] > 0) + table[0])


def strings(chain, table, x):
    words = tf.strings.as_string(tf.cast(x[:, 0], tf.int32))
    buckets = tf.strings.to_hash_bucket_fast(words, 50)
    return dense(chain, tf.gather(table, buckets) + x)


def stateless_dropout(chain, table, x):
    return dense(chain, tf.nn.experimental.stateless_dropout(chain(x), 0.5, seed=[1, 2]) + table[0])


def stop_gradient(chain, table, x):
    y = chain(x + table[0])
    return dense(chain, tf.stop_gradient(y) * y)


def integers(chain, table, x):
    return dense(chain, x + tf.cast(tf.argmax(x + table[0], axis=-1), tf.float32)[:, None] * 1e-3 + table[1])


def gradient_penalty(chain, table, x):
    x = x + table[0]
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.reduce_sum(chain(x))
    return tf.reduce_mean(tf.square(tape.gradient(y, x)))


LOSSES = [
    embedding,
    custom_gradient,
    nested_function,
    while_loop,
    conditional,
    ragged,
    sparse,
    boolean_mask,
    strings,
    stateless_dropout,
    stop_gradient,
    integers,
    gradient_penalty,
]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_gradients_equal_plain(loss):
    chain = Chain()
    table = tf.Variable(tf.random.stateless_normal([50, WIDTH], seed=[1, 1]))
    sources = [*chain.weights, table]
    x = inputs()

    plain = run(lambda x: loss(chain, table, x), sources, x, budget=None)
    try:
        found = run(lambda x: loss(chain, table, x), sources, x, budget="70%")
    except remat.InfeasibleBudget as error:
        found = run(lambda x: loss(chain, table, x), sources, x, budget=error.minimum_bytes)

    assert_equal_gradients(found, plain)
    assert len(copies_in(found.function)) == found.tape.plan.recomputed > 0


def test_embedding_gradients_stay_sparse():
    chain = Chain()
    table = tf.Variable(tf.random.stateless_normal([50, WIDTH], seed=[1, 1]))

    found = run(lambda x: embedding(chain, table, x), [*chain.weights, table], inputs(), budget="80%")

    assert isinstance(found.gradients[-1], tf.IndexedSlices)


def test_a_source_without_gradient_stays_none():
    chain = Chain()
    stranger = tf.Variable(1.0)

    found = run(lambda x: dense(chain, x), [*chain.weights, stranger], inputs(), budget="80%")

    assert found.gradients[-1] is None
    assert found.tape.plan.recomputed > 0


def test_dropout_mask_of_the_recomputation_is_the_first_one():
    """The output shows the mask of the forward pass, the gradient of ``scale`` the one that the backward pass used."""
    chain = Chain()
    scale = tf.Variable(tf.ones([BATCH, WIDTH]))

    def three_steps(make_tape):
        dropout = keras.layers.Dropout(0.5, seed=5)
        tapes = []

        @tf.function(autograph=False)
        def step(x):
            tape = make_tape()
            tapes.append(tape)
            with tape:
                dropped = dropout(chain(x) * scale + 3.0, training=True)
                loss = dense(chain, tf.tanh(dropped))
            return tf.not_equal(dropped, 0.0), tf.not_equal(tape.gradient(loss, scale), 0.0)

        masks = [[mask.numpy() for mask in step(inputs())] for _ in range(3)]
        return masks, dropout.seed_generator.state.numpy(), tapes[0]

    plain_masks, plain_seed, _ = three_steps(tf.GradientTape)
    masks, seed, tape = three_steps(lambda: GradientTape(budget="85%", **PLANNING))

    assert any("dropout" in name for name in tape.recomputed_operations)
    assert np.array_equal(masks, plain_masks)
    assert np.array_equal(seed, plain_seed)
    for forward, backward in masks:
        assert np.array_equal(forward, backward)
        assert 0.45 < forward.mean() < 0.55
    assert not np.array_equal(masks[0], masks[1])


@pytest.mark.parametrize(
    "make", [lambda: tf.random.Generator.from_seed(1), lambda: None], ids=["Generator", "stateful"]
)
def test_stateful_random_numbers_are_drawn_once(make):
    chain = Chain()
    results = []
    for budget in (None, "70%"):
        tf.random.set_seed(3)
        generator = make()

        def loss(x, generator=generator):
            noise = tf.random.normal(x.shape, seed=4) if generator is None else generator.normal(x.shape)
            return dense(chain, chain(x) * noise)

        results.append(run(loss, chain.weights, inputs(), budget=budget))
    assert_equal_gradients(results[1], results[0])
    assert results[1].tape.plan.recomputed > 0
    assert not any("Random" in op.type and "Stateless" not in op.type for op in copies_in(results[1].function))


def test_variables_written_in_the_step_are_written_once():
    chain = Chain()
    counter = tf.Variable(0.0)
    statistics = tf.Variable(tf.zeros([WIDTH]))

    def loss(x):
        y = chain(x)
        counter.assign_add(1.0)
        statistics.assign(0.9 * statistics + 0.1 * tf.reduce_mean(y, axis=0))
        return dense(chain, y * (1.0 + counter))

    states = []
    for budget in (None, "60%"):
        counter.assign(0.0)
        statistics.assign(tf.zeros([WIDTH]))
        ran = run(loss, chain.weights, inputs(), budget=budget)
        states.append((counter.numpy(), statistics.numpy(), ran))
    assert states[0][0] == states[1][0] == 1.0
    tf.debugging.assert_near(states[0][1], states[1][1])
    assert_equal_gradients(states[1][2], states[0][2])


def test_persistent_tape_gives_both_gradients():
    chain = Chain()
    x = inputs()

    def both(tape_of):
        @tf.function
        def step(x):
            with tape_of() as tape:
                y = chain(x)
                first, second = tf.reduce_mean(tf.square(y)), tf.reduce_mean(tf.sin(y))
            return tape.gradient(first, chain.weights), tape.gradient(second, chain.weights)

        return step(x)

    plain = both(lambda: tf.GradientTape(persistent=True))
    found = both(lambda: GradientTape(persistent=True, budget="80%", **PLANNING))
    for one, other in zip(tf.nest.flatten(found), tf.nest.flatten(plain), strict=True):
        tf.debugging.assert_near(one, other, atol=1e-6)


def test_limited_step_inside_a_second_tape():
    """Second-order gradients: the outer, plain tape differentiates through the inner one's gradients."""
    chain = Chain(depth=3)

    def second_order(inner_of):
        @tf.function
        def step(x):
            with tf.GradientTape() as outer:
                with inner_of() as inner:
                    value = dense(chain, x)
                norm = tf.add_n([tf.reduce_sum(g**2) for g in inner.gradient(value, chain.weights)])
            return outer.gradient(norm, chain.weights)

        return step(inputs())

    plain = second_order(tf.GradientTape)
    found = second_order(lambda: GradientTape(budget="90%", **PLANNING))
    for one, other in zip(found, plain, strict=True):
        tf.debugging.assert_near(one, other, atol=1e-5 * tf.reduce_max(tf.abs(other)))
