"""The first run of what is made anew later is one kernel of oneDNN's, and nothing keeps its parts from becoming one."""

from __future__ import annotations

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf
from small_steps import WIDTH, inputs
from test_tf_optimized_graph import optimized_graphs

from remat.core.plan import plan_for_schedule
from remat.running.cost_model import get_profile
from remat.tensorflow import GradientTape, _private
from remat.tensorflow.emit.fused import fused_groups, fuses
from remat.tensorflow.peak.carried_out import carried_out_at
from remat.tensorflow.trace.func_graph import trace_func_graph

DEPTH = 4


def gelu(x):
    return keras.activations.gelu(x, approximate=False)


def gelu_of_tanh(x):
    return tf.nn.gelu(x, approximate=True)


KERNELS = {gelu: "GeluExact", gelu_of_tanh: "GeluApproximate"}


class Layers:
    """Products with a bias and an activation, one after the other."""

    def __init__(self, activation=gelu, dtype="float32"):
        random = np.random.default_rng(0)
        kernels = [random.normal(size=(WIDTH, WIDTH), scale=WIDTH**-0.5) for _ in range(DEPTH)]
        self.weights = [tf.Variable(tf.cast(kernel, dtype)) for kernel in kernels]
        self.biases = [tf.Variable(tf.cast(random.normal(size=WIDTH), dtype)) for _ in range(DEPTH)]
        self.dtype, self.activation = dtype, activation

    def step(self, **limit):
        """Its gradients, plainly or under a plan."""

        @tf.function(autograph=False)
        def function(x):
            with GradientTape(**limit) if limit else tf.GradientTape() as tape:
                x = tf.cast(x, self.dtype)
                for weight, bias in zip(self.weights, self.biases, strict=True):
                    x = self.activation(tf.nn.bias_add(x @ weight, bias))
                loss = tf.reduce_mean(tf.square(x))
            function.tape = tape
            return tape.gradient(loss, self.weights + self.biases)

        function.get_concrete_function(inputs())
        return function

    def traced(self):
        """Its trace, of which nothing is rewritten."""
        return trace_func_graph(self.step().get_concrete_function(inputs()).graph, profile=get_profile("cpu"))

    def planned(self):
        """The step whose layers run twice, each operation after the one before it."""
        graph = self.step(budget="100%").tape._rewritten.step.graph
        plan = plan_for_schedule(graph, layers_again(graph), planner="by hand")
        return self.step(plan=dataclasses.replace(plan, one_by_one=True))


def layers_again(graph):
    """All layers a second time between the forward and the backward pass, which reads what was made last."""
    kinds = [op.kind for op in graph.ops]
    loss = kinds.index("Reshape")
    layers = [index for index in range(loss) if kinds[index] not in ("ReadVariableOp", "Cast")]
    return (*range(loss), *layers, *range(loss, len(kinds)))


def made_one(function):
    """By what is in it, how many products the graph optimizer has made one kernel of."""
    nodes = [node for graph in optimized_graphs(function) for node in graph.node if "Fused" in node.op]
    return [b"+".join(node.attr["fused_ops"].list.s).decode() for node in nodes]


@pytest.mark.skipif(not _private.uses_onednn(), reason="TensorFlow's own kernels are not made one here")
@pytest.mark.parametrize("activation", KERNELS, ids=lambda one: one.__name__)
def test_the_first_run_of_a_gelu_is_one_kernel(activation):
    """The last layer's is left out: nobody reads it before it runs again."""
    layers = Layers(activation)
    function = layers.planned()
    assert made_one(function).count(f"BiasAdd+{KERNELS[activation]}") >= DEPTH - 1
    for ours, plain in zip(function(inputs()), layers.step()(inputs()), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-7)


@pytest.mark.skipif(not _private.uses_onednn(), reason="TensorFlow's own kernels are not made one here")
def test_edges_between_its_parts_keep_a_kernel_from_being_made(monkeypatch):
    monkeypatch.setattr("remat.tensorflow.emit.emit.fuses", lambda: False)
    made = made_one(Layers().planned())
    assert "BiasAdd" in made
    assert "BiasAdd+GeluExact" not in made


def kinds_of_groups(step, schedule):
    groups = fused_groups(step, schedule, carried_out_at(step, schedule))
    return [tuple(step.graph.ops[schedule[at]].kind for at in group) for group in groups]


def test_what_the_backward_pass_reads_is_no_part_of_a_kernel():
    step = Layers().traced()
    assert kinds_of_groups(step, step.graph.plain_schedule) == []
    whole = ("MatMul", "BiasAdd", "Mul", "Neg", "Mul", "Erfc", "Mul")
    assert kinds_of_groups(step, layers_again(step.graph)) == [whole] * DEPTH


def test_a_second_run_of_half_precision_makes_what_the_first_made():
    """One kernel would round once what its parts round several times."""
    step = Layers(dtype="bfloat16").traced()
    assert kinds_of_groups(step, layers_again(step.graph)) == []


def test_a_user_may_turn_it_off():
    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"remapping": False})
    try:
        assert not fuses()
    finally:
        tf.config.optimizer.set_experimental_options({**before, "remapping": True})
    assert fuses() == _private.uses_onednn()
