"""Convolutions, and steps that overwrite their parameters: what XLA on a CPU makes beside the tensors of a step."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax_models import OF_XLA_0_10

import remat.jax
from remat.jax.emit import evaluate
from remat.jax.trace import op_facts
from remat.jax.trace.graph import graph_of_program
from remat.jax.trace.program import program_of, trace_jaxpr
from remat.running.cost_model import get_profile

WIDTH = 192
GROUPS = 24


def convolved(x, kernel, groups=1):
    return lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups
    )


def separable(params, x):
    for depthwise, pointwise in params:
        x = jnp.tanh(convolved(x, depthwise, groups=WIDTH) @ pointwise)
    return jnp.mean(x**2)


def wide(params, x):
    """Kernels that are large beside the pictures."""
    for kernel in params:
        x = jnp.tanh(convolved(x, kernel))
    return jnp.mean(x**2)


def products(params, x):
    for weight in params:
        x = jnp.tanh(x @ weight)
    return jnp.mean(x**2)


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape) / shape[-1] ** 0.5


def separable_arguments():
    return [(normal(n, 3, 3, 1, WIDTH), normal(9 - n, WIDTH, WIDTH)) for n in range(5)], normal(20, 8, 8, 8, WIDTH)


def wide_arguments():
    return [normal(n, 3, 3, 256, 256) for n in range(6)], normal(20, 8, 4, 4, 256)


def product_arguments():
    return [normal(n, 256, 256) for n in range(8)], normal(20, 512, 256)


def step_of(loss):
    def step(params, x):
        value, gradients = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda old, gradient: old - 0.1 * gradient, params, gradients), value

    return step


def plan_of(loss, arguments, budget="75%"):
    return remat.jax.jit(step_of(loss), budget=budget, donate_argnums=0).plan_for(*arguments)


def test_gradients_of_grouped_kernels_are_the_same_in_pieces():
    params, x = separable_arguments()
    wanted, _ = jax.jit(step_of(separable))(params, x)
    planned = remat.jax.jit(step_of(separable), budget="75%")
    found, _ = planned(params, x)

    assert len(planned.plan.schedule) > len(planned.graph.ops)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("groups", [1, 3, 20, GROUPS])
def test_pieces_of_groups_make_what_the_whole_makes(groups, monkeypatch):
    """Also where the last piece is smaller, and each group has several channels."""
    x, kernel = normal(0, 2, 6, 6, 2 * GROUPS), normal(1, 3, 3, 2, 3 * GROUPS)
    closed = jax.make_jaxpr(jax.grad(lambda k: jnp.sum(convolved(x, k, groups=GROUPS) ** 3)))(kernel)
    (eqn,) = [one for one in closed.jaxpr.eqns if one.params.get("batch_group_count", 1) > 1]
    read = [normal(n, *var.aval.shape) for n, var in enumerate(eqn.invars)]
    wanted = eqn.primitive.bind(*read, **eqn.params)
    monkeypatch.setattr(op_facts, "groups_at_once", lambda _: groups)

    (found,) = evaluate.on_cpu.evaluate(eqn, read, "barrier")

    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@OF_XLA_0_10
def test_gradients_of_grouped_kernels_need_no_products_of_all_channels(monkeypatch):
    arguments = separable_arguments()
    budget_bytes = plan_of(separable, arguments).peak_bytes
    monkeypatch.setattr(op_facts, "groups_at_once", lambda _: None)

    with pytest.raises(remat.InfeasibleBudget):
        plan_of(separable, arguments, budget_bytes)


@OF_XLA_0_10
@pytest.mark.parametrize(
    ("loss", "arguments"), [(separable, separable_arguments), (wide, wide_arguments)], ids=["separable", "wide"]
)
def test_a_trace_knows_what_convolutions_take_beside_their_tensors(loss, arguments):
    plan = plan_of(loss, arguments())

    # XLA up to jaxlib 0.10.0 takes a twelfth more for kernels of single channels.
    least = 0.9 if jax.__version_info__ > (0, 10, 0) else 0.85
    assert plan.traced_peak_bytes > least * plan.peak_bytes


def compiled_bytes(loss, arguments, plan):
    return remat.jax.jit(step_of(loss), plan=plan, donate_argnums=0).lower(*arguments).compile().memory_analysis()


@pytest.mark.parametrize(("loss", "arguments"), [(wide, wide_arguments), (products, product_arguments)])
def test_parameters_are_not_copied_before_they_are_overwritten(loss, arguments, monkeypatch):
    made = arguments()
    plan = plan_of(loss, made, "85%")
    program = remat.jax.jit(step_of(loss), plan=plan, donate_argnums=0).lower(*made).compile().as_text()
    monkeypatch.setattr(evaluate, "_reads_of_overwritten", lambda *_: {})
    copying = remat.jax.jit(step_of(loss), plan=plan, donate_argnums=0).lower(*made).compile().as_text()

    assert copies_of_arguments(program) < copies_of_arguments(copying) / 4


def copies_of_arguments(program):
    entry = program[program.index("\nENTRY") :]
    arguments = re.findall(r"%(\S+) = \S+ parameter\(", entry)
    return sum(entry.count(f" copy(%{name})") for name in arguments)


def test_kernels_in_another_order_are_not_made_early(monkeypatch):
    arguments = wide_arguments()
    plan = plan_of(wide, arguments)
    peak_bytes = compiled_bytes(wide, arguments, plan).temp_size_in_bytes
    monkeypatch.setattr(evaluate._Finder, "_arguments_alone", lambda *_: [])

    assert peak_bytes < 0.7 * compiled_bytes(wide, arguments, plan).temp_size_in_bytes


def test_gradients_that_wait_for_the_update_belong_to_the_backward_part():
    """They are idle bytes too, and were taken for activations: the forward part seemed to end behind five kernels."""
    params, x = [normal(n, 3, 3, 256, 256) for n in range(6)], normal(20, 2, 4, 4, 256)
    closed, _ = trace_jaxpr(step_of(wide), (params, x))
    program = program_of(closed)
    first = min(n for n, one in enumerate(program.instructions) if one.is_backward)

    assert graph_of_program(program, get_profile("cpu")).turning_point == first - 1
