"""Functions that other tools recompute wrongly, each with the loss and the sources that it is differentiated with.

A case takes ``wrap``, which is ``recompute`` or the identity, and returns a function that computes all that is to be
compared: losses, gradients (None where there is none), states.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
Step = Callable[[], Any]
WIDTH = 8


def values(*shape: int, seed: int = 0, dtype: Any = tf.float32) -> tf.Tensor:
    return tf.constant(np.random.default_rng(seed).normal(size=shape), dtype)


def variable(*shape: int, seed: int = 1, dtype: Any = tf.float32) -> tf.Variable:
    return tf.Variable(values(*shape, seed=seed, dtype=dtype) * tf.constant(0.5, dtype))


def differentiate(sources: Any, function: Callable[[], tf.Tensor]) -> Any:
    with tf.GradientTape() as tape:
        tape.watch([s for s in tf.nest.flatten(sources) if isinstance(s, tf.Tensor)])
        value = function()
    return value, tape.gradient(value, sources)


def nested_structures(wrap: Wrap) -> Step:
    x, y, w = values(4, WIDTH), values(4, WIDTH, seed=2), variable(WIDTH, WIDTH)

    def block(inputs, extra, *, scale):
        first, (second, nothing) = inputs["a"], inputs["b"]
        assert nothing is None
        h = tf.tanh(first @ w) * extra[0] + second * scale["by"]
        return {"h": h, "list": [tf.sin(h), None], "tuple": (second * 2.0,)}

    wrapped = wrap(block)

    def loss():
        out = wrapped({"a": x, "b": (y, None)}, [x + 1.0], scale={"by": y})
        assert out["list"][1] is None
        return tf.reduce_sum(out["h"] ** 2) + tf.reduce_sum(out["list"][0]) + tf.reduce_sum(out["tuple"][0])

    return lambda: differentiate({"x": x, "y": y, "w": w}, loss)


def arguments_that_are_no_tensors(wrap: Wrap) -> Step:
    x, w = values(4, WIDTH), variable(WIDTH, WIDTH)

    @wrap
    def block(x, times: int, flip: bool, name: str, mask=None, training=None):
        assert (times, flip, name, mask, training) == (3, True, "tanh", None, False)
        for _ in range(times):
            x = getattr(tf, name)(x @ w)
        return tf.reverse(x, [0]) if flip else x

    weights = values(4, WIDTH, seed=4)
    loss = lambda: tf.reduce_sum(block(x, 3, flip=True, name="tanh", training=False) * weights)  # noqa: E731
    return lambda: differentiate([x, w], loss)


def tensor_arguments_without_gradient(wrap: Wrap) -> Step:
    x, w = values(4, WIDTH), variable(WIDTH, WIDTH)
    index, mask = tf.constant([3, 1, 0, 2]), tf.constant([True, False, True, True])

    @wrap
    def block(x, index, *, mask, training):
        h = tf.gather(tf.tanh(x @ w), index)
        h = tf.where(mask[:, None], h, 0.0 * h)
        return tf.where(training, h * 2.0, h), tf.argmax(h, axis=-1), mask

    def loss():
        h, best, mask_again = block(x, index, mask=mask, training=tf.constant(True))
        return tf.reduce_sum(h**2 * tf.cast(best, tf.float32)[:, None]) + tf.reduce_sum(tf.cast(mask_again, tf.float32))

    return lambda: differentiate([x, w], loss)


def closed_over_tensor(wrap: Wrap) -> Step:
    x, w = values(4, WIDTH), variable(WIDTH, WIDTH)

    def loss():
        scale = tf.exp(x * 0.1) + tf.reduce_mean(w)
        return tf.reduce_sum(wrap(lambda h: tf.tanh(h @ w) * scale)(x) ** 2)

    return lambda: differentiate([x, w], loss)


def unused_outputs(wrap: Wrap) -> Step:
    x, y, used, unused = values(4, WIDTH), values(4, WIDTH, seed=3), variable(WIDTH, WIDTH), variable(WIDTH, WIDTH)

    @wrap
    def block(x, y):
        return tf.tanh(x @ used), tf.tanh(x @ unused), tf.sin(y), tf.cos(x)

    def loss():
        first, _, _, last = block(x, y)
        return tf.reduce_sum(first**2) + tf.reduce_sum(last**3)

    return lambda: differentiate([x, y, used, unused], loss)


def half_precision(wrap: Wrap) -> Step:
    x, w = values(4, WIDTH, dtype=tf.float16), variable(WIDTH, WIDTH, dtype=tf.float16)
    wrapped = wrap(lambda x: tf.nn.softmax(tf.tanh(x @ w)))
    return lambda: differentiate([x, w], lambda: tf.reduce_sum(tf.cast(wrapped(x), tf.float32) ** 2))


def double_and_bfloat16(wrap: Wrap) -> Step:
    x, w = values(4, WIDTH, dtype=tf.float64), variable(WIDTH, WIDTH, dtype=tf.bfloat16)
    wrapped = wrap(lambda x: tf.cast(tf.tanh(tf.cast(x, tf.bfloat16) @ w), tf.float64) * x)
    return lambda: differentiate([x, w], lambda: tf.reduce_sum(wrapped(x) ** 2))


def nested_recompute(wrap: Wrap) -> Step:
    x, w, v = values(4, WIDTH), variable(WIDTH, WIDTH), variable(WIDTH, WIDTH, seed=5)
    inner = wrap(lambda x, w: tf.tanh(tf.sin(x) @ w))
    middle = wrap(lambda x: inner(tf.tanh(inner(x, w)), v) + x)
    outer = wrap(lambda x: middle(middle(x) @ w))
    return lambda: differentiate([x, w, v], lambda: tf.reduce_sum(outer(x) ** 2))


def second_order(wrap: Wrap) -> Step:
    x, w = values(4, WIDTH), variable(WIDTH, WIDTH)
    wrapped = wrap(lambda x: tf.sigmoid(tf.tanh(x @ w) * x))

    def penalty():
        _, gradient = differentiate(x, lambda: tf.reduce_sum(wrapped(x) ** 2))
        return tf.reduce_sum(gradient**2)

    return lambda: differentiate([x, w], penalty)


def third_order(wrap: Wrap) -> Step:
    x = values(4)
    wrapped = wrap(lambda x: tf.sin(x) * tf.exp(0.3 * x))

    def derivative(order: int) -> tf.Tensor:
        if order == 0:
            return tf.reduce_sum(wrapped(x))
        return tf.reduce_sum(differentiate(x, lambda: derivative(order - 1))[1])

    return lambda: differentiate(x, lambda: derivative(2))


def persistent_tape(wrap: Wrap) -> Step:
    x, w = values(4, WIDTH), variable(WIDTH, WIDTH)
    wrapped = wrap(lambda x: (tf.tanh(x @ w), tf.sin(x @ w)))

    def step():
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            first, second = wrapped(x)
            one, other = tf.reduce_sum(first**2), tf.reduce_sum(first * second)
        return tape.gradient(one, [x, w]), tape.gradient(other, [x, w]), tape.gradient(one, x)

    return step


def jacobian(wrap: Wrap) -> Step:
    x, w = values(3), variable(3, 3)
    wrapped = wrap(lambda x: tf.tanh(tf.linalg.matvec(w, x)))

    def step():
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = wrapped(x)
        return tape.jacobian(y, x, experimental_use_pfor=False)

    return step


def in_a_while_loop(wrap: Wrap) -> Step:
    x, w = values(4, WIDTH), variable(WIDTH, WIDTH)
    wrapped = wrap(lambda x: tf.tanh(tf.sin(x) @ w) + x)

    def loss():
        loop = tf.while_loop(lambda i, _: i < 4, lambda i, h: (i + 1, wrapped(h)), (0, x), maximum_iterations=4)
        return tf.reduce_sum(loop[1] ** 2)

    return lambda: differentiate([x, w], loss)


def around_a_while_loop(wrap: Wrap) -> Step:
    x, w = values(4, WIDTH), variable(WIDTH, WIDTH)

    @wrap
    def block(x):
        h = tf.tanh(x @ w)
        _, h = tf.while_loop(lambda i, _: i < 3, lambda i, h: (i + 1, tf.tanh(h @ w)), (0, h), maximum_iterations=3)
        return tf.sin(h) * x

    return lambda: differentiate([x, w], lambda: tf.reduce_sum(block(x) ** 2))


def around_a_condition(wrap: Wrap) -> Step:
    x, w = values(4, WIDTH), variable(WIDTH, WIDTH)

    @wrap
    def block(x):
        h = tf.tanh(x @ w)
        h = tf.cond(tf.reduce_sum(h) > 1e9, lambda: h, lambda: tf.sin(h) @ w)
        return tf.tanh(h)

    return lambda: differentiate([x, w], lambda: tf.reduce_sum(block(x) ** 2))


def around_a_function(wrap: Wrap) -> Step:
    x, w = values(4, WIDTH), variable(WIDTH, WIDTH)
    inner = tf.function(lambda x: tf.tanh(x @ w))
    wrapped = wrap(lambda x: tf.sin(inner(tf.cos(x))) * x)
    return lambda: differentiate([x, w], lambda: tf.reduce_sum(wrapped(x) ** 2))


def a_function_itself(wrap: Wrap) -> Step:
    x, w = values(4, WIDTH), variable(WIDTH, WIDTH)
    wrapped = wrap(tf.function(lambda x, times: tf.tanh(tf.sin(x) @ w) * times))
    return lambda: differentiate([x, w], lambda: tf.reduce_sum(wrapped(wrapped(x, 2.0), times=3.0) ** 2))


def stateless_dropout(wrap: Wrap) -> Step:
    x, w = values(4, WIDTH), variable(WIDTH, WIDTH)
    wrapped = wrap(lambda x: tf.tanh(tf.nn.experimental.stateless_dropout(tf.tanh(x @ w), 0.5, seed=[1, 2]) @ w))
    return lambda: differentiate([x, w], lambda: tf.reduce_sum(wrapped(x) ** 2))


def generators(wrap: Wrap) -> Step:
    x, w = values(4, WIDTH), variable(WIDTH, WIDTH)
    generator, of_numpy = tf.random.Generator.from_seed(5), np.random.default_rng(5)

    @wrap
    def block(x):
        drawn = of_numpy.normal(size=(4, WIDTH)).astype("float32")
        return tf.tanh(tf.sin(x @ w) * generator.normal((4, WIDTH)) + drawn)

    def step():
        return differentiate([x, w], lambda: tf.reduce_sum(block(block(x)) ** 2)), generator.state.read_value()

    return step


def keras_dropout(wrap: Wrap) -> Step:
    x, w = values(4, WIDTH), variable(WIDTH, WIDTH)
    dropout = keras.layers.Dropout(0.5, seed=7)
    wrapped = wrap(lambda x, training: tf.tanh(dropout(tf.tanh(x @ w), training=training) @ w))

    def step():
        found = differentiate([x, w], lambda: tf.reduce_sum(wrapped(wrapped(x, training=True), training=True) ** 2))
        return found, dropout.seed_generator.state.value

    return step


def batch_normalization(wrap: Wrap) -> Step:
    x, w = values(16, WIDTH), variable(WIDTH, WIDTH)
    layer = keras.layers.BatchNormalization(momentum=0.5)
    layer.build((None, WIDTH))
    wrapped = wrap(lambda x: tf.tanh(layer(tf.tanh(x @ w), training=True)))

    def step():
        found = differentiate([x, w, layer.gamma.value, layer.beta.value], lambda: tf.reduce_sum(wrapped(x) ** 3))
        return found, layer.moving_mean.value, layer.moving_variance.value

    return step


def fused_batch_normalization_and_convolution(wrap: Wrap) -> Step:
    x, w = values(4, 6, 6, 3), variable(3, 3, 3, 5)
    layer = keras.layers.BatchNormalization()
    layer.build((None, 6, 6, 5))

    @wrap
    def block(x):
        h = tf.nn.conv2d(x, w, 1, "SAME")
        h = tf.nn.relu(layer(h, training=True))
        return tf.nn.max_pool2d(h, 2, 2, "SAME")

    def step():
        found = differentiate([x, w, layer.gamma.value], lambda: tf.reduce_sum(block(x) ** 2))
        return found, layer.moving_variance.value

    return step


def side_effects(wrap: Wrap) -> Step:
    x, w, counter = values(4, WIDTH), variable(WIDTH, WIDTH), tf.Variable(0.0, trainable=False)
    metric = keras.metrics.Mean()
    metric.update_state(0.0)
    metric.reset_state()

    @wrap
    def block(x):
        counter.assign_add(1.0)
        h = tf.tanh(x @ w) * counter
        metric.update_state(h)
        counter.assign_add(1.0)
        return tf.sin(h + counter)

    def step():
        found = differentiate([x, w], lambda: tf.reduce_sum(block(x) ** 2))
        return found, counter.read_value(), metric.result()

    return step


def variable_changed_before_the_backward_pass(wrap: Wrap) -> Step:
    x, w = values(4, WIDTH), variable(WIDTH, WIDTH)
    wrapped = wrap(lambda x: tf.sin(tf.tanh(x @ w)))

    def step():
        w.assign(values(WIDTH, WIDTH, seed=1))
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(wrapped(x) ** 2)
        w.assign(tf.zeros_like(w))
        return loss, tape.gradient(loss, [x, w])

    return step


def added_losses(wrap: Wrap) -> Step:
    x = values(4, WIDTH)
    layer = keras.layers.Dense(WIDTH, activation="tanh", activity_regularizer="l2", kernel_initializer="ones")
    layer.build((None, WIDTH))

    class Adds(keras.layers.Layer):
        def call(self, h):
            self.add_loss(tf.reduce_mean(tf.tanh(h) ** 2))
            return h

    adds = Adds()
    wrapped = wrap(lambda h: tf.sin(adds(layer(h))))

    def loss():
        h = wrapped(x)
        assert len(layer.losses) == len(adds.losses) == 1
        return tf.reduce_sum(h**2) + tf.add_n(layer.losses) + tf.add_n(adds.losses)

    return lambda: differentiate([x, layer.kernel.value], loss)


def embedding(wrap: Wrap) -> Step:
    table, w, tokens = variable(50, WIDTH), variable(WIDTH, WIDTH), tf.constant([[1, 4], [4, 7]], tf.int64)
    wrapped = wrap(lambda tokens: tf.tanh(tf.nn.embedding_lookup(table, tokens) @ w))
    return lambda: differentiate([table, w], lambda: tf.reduce_sum(wrapped(tokens) ** 2))


def embedding_outside(wrap: Wrap) -> Step:
    table, tokens = variable(50, WIDTH), tf.constant([3, 4, 4])
    wrapped = wrap(lambda table: tf.tanh(tf.gather(table, tokens)))
    return lambda: differentiate(table, lambda: tf.reduce_sum(wrapped(table) ** 2))


def no_arguments(wrap: Wrap) -> Step:
    w = variable(WIDTH, WIDTH)
    wrapped = wrap(lambda: tf.sin(tf.tanh(w @ w)))
    return lambda: differentiate(w, lambda: tf.reduce_sum(wrapped() ** 2))


def custom_gradients(wrap: Wrap) -> Step:
    x, w = values(4, WIDTH), variable(WIDTH, WIDTH)

    @tf.custom_gradient
    def tripled(y):
        z = tf.tanh(y)
        return z, lambda dy: 3.0 * dy * z

    wrapped = wrap(lambda x: tf.sin(tripled(tf.nn.silu(x @ w))) * x)
    return lambda: differentiate([x, w], lambda: tf.reduce_sum(wrapped(x) ** 2))


def stopped_gradient(wrap: Wrap) -> Step:
    x, w = values(4, WIDTH), variable(WIDTH, WIDTH)
    wrapped = wrap(lambda x: tf.stop_gradient(tf.tanh(x @ w)) * tf.sin(x))
    return lambda: differentiate([x, w], lambda: tf.reduce_sum(wrapped(x) ** 2))


def complex_numbers(wrap: Wrap) -> Step:
    x = values(4, WIDTH)
    wrapped = wrap(lambda x: tf.abs(tf.signal.fft(tf.cast(tf.tanh(x), tf.complex64))))
    return lambda: differentiate(x, lambda: tf.reduce_sum(wrapped(x) ** 2))


def linear_loss(wrap: Wrap) -> Step:
    """The incoming gradient is a constant: nothing but the forward pass holds the recomputation back."""
    x, w = values(4, WIDTH), variable(WIDTH, WIDTH)
    wrapped = wrap(lambda x: tf.tanh(tf.sin(x @ w)))
    return lambda: differentiate([x, w], lambda: tf.reduce_sum(wrapped(wrapped(x))))


def output_is_input(wrap: Wrap) -> Step:
    x, w = values(4, WIDTH), variable(WIDTH, WIDTH)
    wrapped = wrap(lambda x: (x, tf.tanh(x @ w), w.read_value()))

    def loss():
        same, h, weights = wrapped(x)
        return tf.reduce_sum(same * h) + tf.reduce_sum(weights**2)

    return lambda: differentiate([x, w], loss)


CASES: list[Callable[[Wrap], Step]] = [
    nested_structures,
    arguments_that_are_no_tensors,
    tensor_arguments_without_gradient,
    closed_over_tensor,
    unused_outputs,
    half_precision,
    double_and_bfloat16,
    nested_recompute,
    second_order,
    third_order,
    persistent_tape,
    jacobian,
    in_a_while_loop,
    around_a_while_loop,
    around_a_condition,
    around_a_function,
    a_function_itself,
    stateless_dropout,
    generators,
    keras_dropout,
    batch_normalization,
    fused_batch_normalization_and_convolution,
    side_effects,
    variable_changed_before_the_backward_pass,
    added_losses,
    embedding,
    embedding_outside,
    no_arguments,
    custom_gradients,
    stopped_gradient,
    complex_numbers,
    linear_loss,
    output_is_input,
]
