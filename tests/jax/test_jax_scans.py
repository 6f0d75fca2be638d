"""Layers under ``lax.scan`` are planned inside the loop: what it keeps and what it makes again."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax_models import GREEDY, assert_close, normal, transformer

import remat
import remat.jax
from remat.jax.peak import Compiler, peak_of, shape_of
from remat.jax.variants import variants_of, variants_of_jaxpr


def planned(loss, budget, **options):
    return remat.jax.value_and_grad(loss, budget=budget, **GREEDY, **options)


def stacked(layers=12, width=32, batch=256):
    weights = jnp.stack([normal(n, width, width, scale=width**-0.5) for n in range(layers)])
    return weights, normal(77, batch, width)


def loop_loss(each, **options):
    def loss(weights, x):
        x, _ = lax.scan(lambda c, w: (each(c, w), None), x, weights, **options)
        return jnp.mean(jnp.square(x))

    return loss


def wide(x, w):
    return x + jnp.tanh(jnp.sin(x @ w) @ w) * jnp.cos(x)


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["60%", "30%"])
def test_a_scanned_transformer(budget):
    case = transformer(scanned=True, layers=6)
    ours = planned(case.loss, budget)
    jitted = jax.jit(ours)

    assert_close(jitted(*case.args), jax.jit(jax.value_and_grad(case.loss))(*case.args))
    measured = remat.jax.measure(jitted, *case.args, repeats=1)
    assert measured.peak_bytes == ours.plan.peak_bytes <= ours.plan.budget_bytes
    assert ours.plan.baseline_peak_bytes > 1.5 * ours.plan.peak_bytes


@pytest.mark.parametrize("options", [{}, {"reverse": True}, {"unroll": 2}], ids=["forward", "reverse", "unrolled"])
def test_loops_of_every_direction(options):
    loss = loop_loss(wide, **options)
    ours = planned(loss, "50%")

    assert_close(jax.jit(ours)(*stacked()), jax.jit(jax.value_and_grad(loss))(*stacked()))
    assert ours.plan.peak_bytes <= ours.plan.budget_bytes


def test_the_smallest_budget_keeps_little_more_than_what_the_loop_carries():
    loss = loop_loss(wide)
    with pytest.raises(remat.InfeasibleBudget) as caught:
        jax.jit(planned(loss, 1000))(*stacked())
    minimum = caught.value.minimum_bytes
    ours = planned(loss, minimum)

    assert_close(jax.jit(ours)(*stacked()), jax.jit(jax.value_and_grad(loss))(*stacked()))
    weights, x = stacked()
    carried = x.nbytes * (len(weights) + 1)
    # Arguments, gradients, the carries, and a handful of values for one layer.
    assert minimum < 2 * weights.nbytes + x.nbytes + carried + 8 * x.nbytes


@pytest.mark.slow
def test_the_menu_goes_below_what_checkpointed_layers_need():
    """Bodies of the backward loop are planned, too; each entry of the menu gives the gradients of the plain loop."""
    case = transformer(scanned=True, layers=4, batch=32, dropout=0.0)
    flat, structure = jax.tree.flatten(case.args)
    checkpointed = transformer(scanned=True, layers=4, batch=32, dropout=0.0, wrap=jax.checkpoint)

    def gradient(*leaves):
        return jax.value_and_grad(case.loss)(*jax.tree.unflatten(structure, leaves))

    variants, _ = variants_of(gradient, flat)
    peaks = [remat.simulate(one.graph, one.graph.plain_schedule).peak_bytes for one in variants]
    # The menu orders its options by a model of their bytes, so that neighbours may change places.
    assert all(later < 1.05 * before for before, later in itertools.pairwise(peaks))
    assert len(set(peaks)) > 6
    last = variants[-1]
    compiler = Compiler(last.program, last.turning_point, "data", [shape_of(leaf) for leaf in flat])
    compiled = compiler.compile(last.graph.plain_schedule)
    assert_close(compiled(*flat, *last.program.constants.values()), jax.tree.leaves(jax.jit(gradient)(*flat)))
    theirs = remat.jax.measure(jax.jit(jax.value_and_grad(checkpointed.loss)), *case.args, repeats=1).peak_bytes
    assert compiler.peak(last.graph.plain_schedule).expected_bytes < 0.95 * theirs


@pytest.mark.thorough
def test_stacks_that_others_read_stay():
    def loss(weights, x):
        def each(c, w):
            c = wide(c, w)
            return c, (jnp.mean(c), c[0])

        x, (means, rows) = lax.scan(each, x, weights)
        return jnp.mean(x * x) + means.sum() + jnp.sum(rows[3] ** 2), means

    plain = jax.jit(jax.value_and_grad(loss, has_aux=True))
    ours = planned(loss, "60%", has_aux=True)

    assert_close(jax.jit(ours)(*stacked()), plain(*stacked()))
    assert ours.plan.peak_bytes <= ours.plan.budget_bytes


@pytest.mark.thorough
def test_checkpointed_layers_stay_so_where_they_fit():
    loss = loop_loss(jax.checkpoint(wide, prevent_cse=False))
    ours = planned(loss, "100%")

    assert_close(jax.jit(ours)(*stacked()), jax.jit(jax.value_and_grad(loss))(*stacked()))
    assert ours.plan.recomputed == 0
    assert ours.plan.peak_bytes <= ours.plan.budget_bytes


@pytest.mark.thorough
def test_constants_and_integers_in_the_loop():
    """The body reads a captured array, and a counter that is carried along."""
    table = normal(5, 256, 32)

    def loss(weights, x):
        def each(carry, w):
            c, n = carry
            return (jnp.tanh(wide(c, w) * table) + n, n + 1), None

        (x, _), _ = lax.scan(each, (x, 0), weights)
        return jnp.mean(x * x)

    ours = planned(loss, "60%")
    assert_close(jax.jit(ours)(*stacked()), jax.jit(jax.value_and_grad(loss))(*stacked()))
    assert ours.plan.peak_bytes <= ours.plan.budget_bytes


def test_callbacks_in_a_loop_run_once_for_each_iteration():
    seen = []

    def each(x, w):
        jax.debug.callback(lambda v: seen.append(float(v)), x[0, 0])
        return jnp.tanh(x @ w)

    loss = loop_loss(each)
    value, _ = jax.jit(planned(loss, "110%"))(*stacked())
    jax.block_until_ready(value)
    jax.effects_barrier()

    assert len(seen) == 12


@pytest.mark.thorough
def test_a_plan_of_a_loop_is_followed_again():
    loss = loop_loss(wide)
    ours = planned(loss, "50%")
    jax.jit(ours)(*stacked())
    again = remat.jax.value_and_grad(loss, plan=ours.plan)

    assert_close(jax.jit(again)(*stacked()), jax.jit(jax.value_and_grad(loss))(*stacked()))
    assert again.plan is ours.plan


def test_bytes_of_checkpointed_bodies_take_no_more_time_than_these():
    """``jax.checkpoint`` around the body of a scan is one of the plans, though its trace says less of its bytes."""
    case = transformer(scanned=True, layers=6, dropout=0.0)
    checkpointed = transformer(scanned=True, layers=6, dropout=0.0, wrap=jax.checkpoint)
    compiled = remat.jax.jit(jax.value_and_grad(checkpointed.loss)).lower(*case.args).compile()
    variants = variants_of_jaxpr(jax.make_jaxpr(jax.value_and_grad(case.loss))(*case.args), tie="barrier")
    (number,) = variants.suggested

    plan = remat.jax.jit(jax.value_and_grad(case.loss), budget=peak_of(compiled.memory_analysis())).plan_for(*case.args)
    assert plan.time_s <= variants.as_it_is(number).time_s
