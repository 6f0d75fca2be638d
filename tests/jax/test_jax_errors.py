"""What the JAX front end refuses, and what its errors say."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from jax_models import GREEDY, mlp

import remat
import remat.jax
from remat.fit import variants
from remat.planning.find import find


@pytest.mark.parametrize("make", [remat.jax.value_and_grad, remat.jax.grad, remat.jax.jit])
def test_unreadable_budgets_are_refused_at_once(make):
    for budget in ("plenty", "-1GiB", 0, "0%"):
        with pytest.raises(remat.InvalidBudget, match=str(budget)):
            make(jnp.sum, budget=budget)


def test_a_budget_and_a_plan():
    case = mlp(layers=2)
    plan = remat.plan(remat.jax.trace(jax.value_and_grad(case.loss), *case.args), "100%", **GREEDY)
    with pytest.raises(ValueError, match="value_and_grad takes budget= or plan=, not both"):
        remat.jax.value_and_grad(case.loss, budget="50%", plan=plan)
    with pytest.raises(TypeError, match=r"plan= of remat.jax.jit is a remat.Plan, not str"):
        remat.jax.jit(case.loss, plan="plan.json")


def test_unknown_planner():
    with pytest.raises(ValueError, match="there is no planner 'best'; choose one of auto"):
        remat.jax.value_and_grad(jnp.sum, budget="50%", planner="best")


def test_not_a_function():
    with pytest.raises(TypeError, match="takes a function, not float"):
        remat.jax.value_and_grad(3.0)


def test_an_infeasible_budget_says_what_binds():
    case = mlp(layers=4)
    with pytest.raises(remat.InfeasibleBudget, match="no schedule within 2000 bytes") as caught:
        remat.jax.value_and_grad(case.loss, budget=2000, **GREEDY)(*case.args)
    error = caught.value
    assert error.budget_bytes == 2000
    assert f"the smallest budget that can be kept is {error.minimum_bytes} bytes" in str(error)
    assert "What binds there is op" in str(error)


def test_unknown_shapes():
    from jax import export

    (size,) = export.symbolic_shape("n")
    with pytest.raises(remat.UnsupportedStep, match="dimensions that are not known while the function is traced"):
        remat.jax.trace(jnp.sin, jax.ShapeDtypeStruct((size, 3), jnp.float32))


def test_no_time_is_no_time(monkeypatch):
    limits = []

    def noted(graph, budget_bytes, planner, time_limit_s, **options):
        limits.append(time_limit_s)
        return find(graph, budget_bytes, planner, time_limit_s, **options)

    monkeypatch.setattr(variants, "find_again", noted)
    case = mlp(layers=2)
    for given in (0, None):
        ours = remat.jax.value_and_grad(case.loss, budget="100%", time_limit_s=given)
        jax.jit(ours).lower(*case.args)
    assert limits[0] == 0
    assert limits[-1] is None


def test_no_measured_run():
    with pytest.raises(ValueError, match="repeats=0 measures nothing; give 1 or more"):
        remat.jax.measure(jnp.sum, jnp.ones(3), repeats=0)


def test_a_mistake_in_the_loss_is_not_hidden():
    def broken(x):
        raise RuntimeError("the user's own mistake")

    with pytest.raises(RuntimeError, match="the user's own mistake"):
        remat.jax.value_and_grad(broken, budget="50%")(jnp.ones(3))
    with pytest.raises(TypeError, match="scalar-output functions"):
        remat.jax.value_and_grad(jnp.sin, budget="50%")(jnp.ones(3))


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="a GPU can trace it")
def test_cudnns_attention_without_a_gpu_gets_one_line():
    def loss(x, implementation):
        return jax.nn.dot_product_attention(x, x, x, implementation=implementation).astype(jnp.float32).mean()

    x = jax.ShapeDtypeStruct((2, 64, 4, 32), jnp.bfloat16)
    with pytest.raises(remat.UnsupportedStep, match="can be traced only where a GPU with cuDNN is"):
        remat.jax.trace(jax.grad(functools.partial(loss, implementation="cudnn")), x)
    # Without a choice it is what XLA makes of products, in every version that is supported.
    chosen, left_out = (
        remat.jax.trace(jax.grad(functools.partial(loss, implementation=which)), x) for which in ("xla", None)
    )
    assert chosen.fingerprint == left_out.fingerprint
