"""How peaks are read with little work of the compiler, and which plans are looked at."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax_models import GREEDY, assert_close, mlp, transformer

import remat
import remat.jax
from remat.core.simulator import simulate
from remat.jax import candidate
from remat.jax.candidate import FunctionCandidate
from remat.jax.peak import Gauge, Lowered, peak_of
from remat.jax.scans.menu import menu_of
from remat.jax.scans.pairs import find_pairs
from remat.jax.scans.variants import _forward_program
from remat.jax.trace.graph import graph_of_program
from remat.jax.trace.program import Flattener, alive
from remat.jax.variants import variants_of
from remat.planners.replay.residents import TooManyRuns
from remat.running.cost_model import get_profile


class Program:
    """Stands in for a traced program: its peak as the compiler says it, and roughly."""

    def __init__(self, exact_bytes, rough_bytes):
        self.peaks = {False: exact_bytes, True: rough_bytes}
        self.asked = []

    def memory(self, *, is_rough=False):
        self.asked.append(is_rough)
        return SimpleNamespace(
            argument_size_in_bytes=self.peaks[is_rough],
            output_size_in_bytes=0,
            temp_size_in_bytes=0,
            alias_size_in_bytes=0,
        )


@pytest.mark.parametrize(("rough_bytes", "read_bytes"), [(100_000, 60_000), (100_050, 60_000), (99_950, 60_100)])
def test_programs_behind_the_plain_step_are_compiled_roughly(rough_bytes, read_bytes):
    """What the plain step differs by is allowed for where the rough figure is the smaller one."""
    gauge, plain, planned = Gauge(), Program(100_000, rough_bytes), Program(-1, 60_000)

    assert gauge.peak_bytes(plain) == 100_000
    assert plain.asked == [False]
    assert gauge.peak_bytes(planned) == read_bytes
    assert planned.asked == [True]
    assert gauge.is_exact == (rough_bytes == 100_000)


def test_rough_figures_that_are_far_off_are_not_used():
    gauge, planned = Gauge(), Program(60_000, 66_000)
    gauge.peak_bytes(Program(100_000, 105_000))

    assert gauge.peak_bytes(planned) == 60_000
    assert planned.asked == [False]
    assert gauge.is_exact


def pooled(weights, x):
    """The gradient of a maximum over windows is a scatter, for which the emitters of kernels need other buffers."""
    for w in weights:
        x = jnp.tanh(lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return jnp.mean(x**2)


def scanned(weights, x):
    """Rough figures of loops are some bytes off."""
    return jnp.mean(lax.scan(lambda c, w: (jnp.tanh(jnp.sin(c @ w) @ w.T), None), x, weights)[0] ** 2)


@pytest.mark.parametrize("kind", ["dense", "scanned", "pooled"])
def test_a_plan_says_what_the_compiler_says(kind):
    """Whichever way its peak was read, up to the bytes by which the two ways differ."""
    if kind == "dense":
        loss, args = mlp().loss, mlp().args
    elif kind == "scanned":
        loss, args = scanned, (jnp.full((8, 32, 32), 0.1), jnp.ones((256, 32)))
    else:
        loss, args = pooled, ([jnp.full((3, 3, 8, 8), 0.1)] * 6, jnp.ones((4, 16, 16, 8)))
    ours = remat.jax.jit(jax.value_and_grad(loss), budget="75%", **GREEDY)
    compiled = ours.lower(*args).compile()

    assert ours.plan.peak_bytes < ours.plan.baseline_peak_bytes
    assert peak_of(compiled.memory_analysis()) <= ours.plan.peak_bytes <= ours.plan.budget_bytes
    assert ours.plan.peak_bytes == pytest.approx(peak_of(compiled.memory_analysis()), rel=1e-3)


def test_equal_programs_are_compiled_once(monkeypatch):
    """A refusal names the smallest budget; when that is asked for, the plain step is not compiled again."""
    compiled = []
    true_compiled = Lowered.compiled

    def watched(self, *, is_rough=False):
        compiled.append(is_rough)
        return true_compiled(self, is_rough=is_rough)

    monkeypatch.setattr(Lowered, "compiled", watched)
    case = mlp(layers=7)

    def plan(budget):
        return remat.jax.jit(jax.value_and_grad(case.loss), budget=budget, **GREEDY).plan_for(*case.args)

    with pytest.raises(remat.InfeasibleBudget) as refused:
        plan(1)
    assert compiled.count(False) == 1
    asked = len(compiled)
    assert plan(refused.value.minimum_bytes).peak_bytes <= refused.value.minimum_bytes
    assert compiled.count(False) == 1
    assert len(compiled) <= asked + 1


def test_a_cut_at_blocks_that_takes_too_many_runs_is_left_out(monkeypatch):
    """As where a block reads far back, like a scan by ``lax.associative_scan``."""
    asked = []

    def too_many(*_args):
        asked.append(True)
        raise TooManyRuns

    monkeypatch.setattr(candidate, "plan_with_checkpoints", too_many)
    case = mlp()
    ours = remat.jax.jit(jax.value_and_grad(case.loss), budget="60%", **GREEDY)

    assert_close(ours(*case.args), jax.jit(jax.value_and_grad(case.loss))(*case.args))
    assert asked
    assert ours.plan.measured_peak_bytes <= ours.plan.budget_bytes


def test_blocks_that_read_far_back_are_tried_as_under_checkpoint():
    """Three blocks with ``lax.associative_scan``: a cut between them has no end, ``jax.checkpoint`` has."""
    width = 8

    def combine(left, right):
        return left[0] * right[0], right[0] * left[1] + right[1]

    def loss(blocks, x):
        for decay, drive, out in blocks:
            _, states = lax.associative_scan(combine, (jax.nn.sigmoid(x @ decay), x @ drive), axis=1)
            x = x + jnp.tanh(states * x) @ out
        return jnp.mean(x**2)

    flat, structure = jax.tree.flatten(([(jnp.ones((width, width)),) * 3] * 3, jnp.ones((2, 64, width))))
    variants, _ = variants_of(lambda *own: jax.value_and_grad(loss)(*jax.tree.unflatten(structure, own)), flat)
    graph = variants[0].graph

    (found,) = FunctionCandidate(variants, lambda plan: pytest.fail("nothing is compiled")).suggestions()
    assert found.peak_bytes < 0.6 * simulate(graph, graph.plain_schedule).peak_bytes
    assert found.overhead < 0.6


def test_the_menu_of_a_loop_has_no_wide_gaps():
    """A budget between two options is used up to the lower one of them."""
    case = transformer(scanned=True, layers=4, dropout=0.0)
    closed = jax.make_jaxpr(jax.value_and_grad(case.loss))(*case.args)
    flattener = Flattener()
    outputs = flattener.add(closed, [flattener.value(var.aval) for var in closed.jaxpr.invars])
    (pair,) = find_pairs(alive(flattener.equations, outputs), outputs)
    body = _forward_program(pair)
    menu = menu_of(pair, body, graph_of_program(body, get_profile("cpu")), in_chunks=False)

    held = [option.held_bytes for option in menu]
    gaps = [(before - after) / held[0] for before, after in itertools.pairwise(held)]
    assert len(held) > 12
    # One value of the body is a tenth of all that the loop could stack.
    assert max(gaps) < 0.12
