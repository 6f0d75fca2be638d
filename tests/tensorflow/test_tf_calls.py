"""What functions take that a step calls: the program that XLA makes of one by itself, or its operations one by one."""

from __future__ import annotations

import pytest
import tensorflow as tf

import remat.tensorflow
from remat.tensorflow import _private
from remat.tensorflow.peak.device import current_device
from remat.tensorflow.trace import calls

MIB = 1 << 20
CHANNELS, SIDE, SAMPLES = 256, 8, 16  # An image batch of 1 MiB, and a filter of 49 KiB.
DENSE_TWICE = 2 * 7 * 7 * CHANNELS * CHANNELS * 4
"""What XLA makes of the filter's gradient: a filter of all channels, twice; 24.5 MiB."""


@tf.function(jit_compile=True)
def in_groups(x, w):
    return tf.nn.convolution(x, w, padding="SAME")


def convolved(layers=1):
    """A step with convolutions in groups, each in a function of its own, and what it is called with."""
    filters = [tf.Variable(tf.random.stateless_normal([7, 7, 1, CHANNELS], [1, n])) for n in range(layers)]

    @tf.function(autograph=False)
    def step(x):
        with tf.GradientTape() as tape:
            for w in filters:
                # A function for each, as Keras makes one for each layer.
                x = tf.function(lambda a, b: tf.nn.convolution(a, b, padding="SAME"), jit_compile=True)(x, w)
            loss = tf.reduce_mean(tf.square(x))
        return tape.gradient(loss, filters)

    return step, tf.random.stateless_normal([SAMPLES, SIDE, SIDE, CHANNELS], [2, 3])


def calls_of(graph):
    return [op for op in graph.ops if op.kind in calls.CALLS]


@pytest.mark.other_cpu
def test_the_program_of_a_call_is_in_the_plan():
    step, x = convolved()
    graph = remat.tensorflow.trace(step, x)
    forward, backward = calls_of(graph)
    assert not graph.notes
    assert forward.workspace_bytes == 0
    assert backward.workspace_bytes == DENSE_TWICE
    assert backward.time_s > 0


@pytest.mark.other_cpu
def test_calls_that_are_alike_are_compiled_once(monkeypatch):
    monkeypatch.setattr(calls, "_blocks_of", {})
    compiled = []
    own = _private.compiled_program
    monkeypatch.setattr(_private, "compiled_program", lambda *args, **more: compiled.append(args) or own(*args, **more))
    step, x = convolved(layers=5)
    found = calls_of(remat.tensorflow.trace(step, x))
    assert len(found) == 10
    assert len(compiled) == 2


@pytest.mark.other_cpu
def test_a_program_that_cannot_be_had_is_said(monkeypatch):
    monkeypatch.setattr(calls, "_blocks_of", {})

    def fails(*_, **__):
        raise ValueError("no program")

    monkeypatch.setattr(_private, "compiled_program", fails)
    step, x = convolved()
    graph = remat.tensorflow.trace(step, x)
    assert all(op.workspace_bytes == 0 for op in calls_of(graph))
    assert len(graph.notes) == 2
    assert "PartitionedCall" in graph.notes[0]


def test_what_a_step_with_such_calls_takes_is_predicted():
    step, x = convolved()
    graph = remat.tensorflow.trace(step, x)
    device = current_device()
    predicted = device.allocator.peak_on_a_new_heap(graph, graph.plain_schedule)
    measured = remat.tensorflow.measure(step, x).peak_bytes - device.in_use_bytes + x.shape.num_elements() * 4
    assert predicted > DENSE_TWICE
    # The heap may hand out a chunk of less than twice the size of that block.
    assert measured == pytest.approx(predicted, rel=0.35)


@pytest.mark.other_cpu
def test_operations_of_other_functions_count_as_those_of_the_step():
    wide = 1024

    @tf.function
    def inner(x):
        return tf.reduce_sum(tf.cumsum(tf.cumsum(x, 1), 1), 1)

    @tf.function(autograph=False)
    def step(x):
        return inner(x)

    (call,) = calls_of(remat.tensorflow.trace(step, tf.TensorSpec((wide, wide))))
    assert call.workspace_bytes == 2 * wide * wide * 4 - wide * 4  # While the sum is made, one of the two is gone.
    assert call.time_s > 0


def test_a_budget_holds_with_convolutions_in_groups():
    step, x = convolved(layers=2)
    step(x)
    device = current_device()
    graph = remat.tensorflow.trace(step, x)
    budget = device.in_use_bytes + 2 * DENSE_TWICE
    filters = [tf.Variable(tf.random.stateless_normal([7, 7, 1, CHANNELS], [1, n])) for n in range(2)]

    @tf.function(autograph=False)
    def planned(x):
        with remat.tensorflow.GradientTape(budget=budget, planner="peak_greedy") as tape:
            h = x
            for w in filters:
                h = tf.tanh(in_groups(h, w))
            loss = tf.reduce_mean(tf.square(h))
        planned.tape = tape
        return tape.gradient(loss, filters)

    peak = remat.tensorflow.measure(planned, x).peak_bytes
    assert len(calls_of(graph)) == 4
    assert DENSE_TWICE < peak <= budget
