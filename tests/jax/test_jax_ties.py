"""What is held back beside recomputations, so that the compiler keeps no more than the plan does."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax_models import assert_close

from remat.jax.emit.evaluate import _find_holds, emit
from remat.jax.peak import Compiler
from remat.jax.trace import op_facts
from remat.jax.trace.graph import graph_of_program
from remat.jax.trace.program import program_of, trace_jaxpr
from remat.planners.view.problem import Problem
from remat.planning.find import find
from remat.running.cost_model import get_profile


class Traced:
    """The gradient of a loss as a program, and a plan for it."""

    def __init__(self, loss, args, budget):
        self.args = jax.tree.leaves(args)
        structure = jax.tree.structure(args)
        self.function = lambda *flat: jax.value_and_grad(loss)(*jax.tree.unflatten(structure, flat))
        self.program = program_of(trace_jaxpr(self.function, self.args)[0])
        self.graph = graph_of_program(self.program, get_profile("cpu"))
        self.turning_point = Problem.of(self.graph).turning_point
        self.schedule = find(self.graph, budget, planner="peak_greedy").schedule

    def run(self, tie):
        return emit(self.program, self.schedule, self.turning_point, tie)(self.args, ())

    def peak_bytes(self):
        shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in self.args]
        return Compiler(self.program, self.turning_point, "barrier", shapes).peak(self.schedule).expected_bytes


def convolved(x, w):
    return jnp.tanh(lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))


def down_and_up(weights, x):
    x = lax.reduce_window(convolved(x, weights[0]), -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    x = jnp.repeat(jnp.repeat(x, 2, 1), 2, 2)
    for w in weights[1:]:
        x = convolved(x, w)
    return jnp.mean(x**2)


@pytest.fixture(scope="module")
def pooled():
    x = jax.random.normal(jax.random.key(0), (8, 16, 16, 8))
    return Traced(down_and_up, ([jnp.full((3, 3, 8, 8), 0.1)] * 6, x), "75%")


def test_indices_of_a_maximum_over_windows_are_not_made_early(pooled, monkeypatch):
    """They take four times the bytes of the picture, from the beginning of the step to the gradient of the maximum."""
    peak_bytes = pooled.peak_bytes()
    monkeypatch.setattr(op_facts, "WITH_INDICES", frozenset())

    assert peak_bytes < 0.8 * pooled.peak_bytes()


@pytest.mark.parametrize("tie", ["barrier", "data"])
def test_what_runs_apart_computes_the_same(pooled, tie):
    wanted = jax.tree.leaves(jax.jit(pooled.function)(*pooled.args))

    assert_close(jax.jit(lambda: pooled.run(tie))(), wanted)


def test_gradients_of_weights_come_before_the_next_recomputation():
    """They read activations for the last time; the compiler might run them later, and keep the activations."""

    def loss(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    traced = Traced(loss, ([jnp.full((16, 16), 0.1)] * 8, jnp.ones((64, 16))), "75%")
    gradients = set(traced.program.outputs[1:])
    holds = _find_holds(traced.program, traced.schedule, traced.turning_point, "barrier")

    held = {value for hold in holds for value in (hold.trigger, *hold.done)}
    assert len(gradients & held) >= len(gradients) / 2
