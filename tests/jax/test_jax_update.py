"""The lever "update" in JAX: gradients die early where they can, and the plan says what they wait for."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import remat
import remat.jax
from remat.core.plan import load_plan_and_graph

LAYERS, WIDTH = 8, 192
LEVERS = ("recompute", "update")


def parameters():
    random = np.random.default_rng(0)
    return [
        {"w": jnp.asarray(random.normal(size=(WIDTH, WIDTH)) * WIDTH**-0.5, jnp.float32), "b": jnp.zeros(WIDTH)}
        for _ in range(LAYERS)
    ]


def batch():
    return jnp.asarray(np.random.default_rng(1).normal(size=(8, WIDTH)), jnp.float32)


def loss(params, x):
    for layer in params:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return jnp.square(x).mean()


def step_of(optimizer):
    def step(params, state, x):
        value, gradients = jax.value_and_grad(loss)(params, x)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


PLAIN = optax.adamw(1e-3)
CLIPPED = optax.chain(optax.clip_by_global_norm(1e-3), optax.adamw(1e-3))


def smallest(optimizer, levers):
    """The smallest peak of the compiled step."""
    params = parameters()
    step = remat.jax.jit(step_of(optimizer), budget=1, levers=levers, donate_argnums=(0, 1), planner="peak_greedy")
    with pytest.raises(remat.InfeasibleBudget) as caught:
        step.plan_for(params, optimizer.init(params), batch())
    return caught.value.minimum_bytes


def planned(optimizer, budget="100%", **options):
    return remat.jax.jit(
        step_of(optimizer), budget=budget, levers=LEVERS, donate_argnums=(0, 1), planner="peak_greedy", **options
    )


def gradients_bytes():
    return sum(leaf.nbytes for leaf in jax.tree.leaves(parameters()))


def test_gradients_die_early_and_clipping_forbids_it(tmp_path):
    params = parameters()
    free, bound = planned(PLAIN), planned(CLIPPED)
    for optimizer, step in ((PLAIN, free), (CLIPPED, bound)):
        step.plan_for(params, optimizer.init(params), batch())
    assert free.plan.update.saved_bytes >= 0.6 * gradients_bytes()
    assert free.plan.update.bound_by == ""
    assert free.plan.traced_peak_bytes <= bound.plan.traced_peak_bytes - 0.6 * gradients_bytes()
    assert bound.plan.update.saved_bytes == 0
    assert bound.plan.update.waiting_bytes >= gradients_bytes()
    assert "of gradients wait for" in str(bound.plan)
    assert "clip" in bound.plan.update.bound_by  # The function of optax that the number is made in.

    free.plan.save(tmp_path / "plan.json", free.graph)
    loaded, graph = load_plan_and_graph(tmp_path / "plan.json")
    assert loaded.update == free.plan.update
    assert remat.simulate(graph, loaded.schedule).peak_bytes == free.plan.traced_peak_bytes
    followed = remat.jax.jit(step_of(PLAIN), plan=loaded, donate_argnums=(0, 1))
    assert followed.plan_for(params, PLAIN.init(params), batch()) == loaded


@pytest.mark.thorough
def test_the_measured_peak_falls_by_nearly_the_gradients():
    resident = 3 * gradients_bytes()
    free = {levers: smallest(PLAIN, levers) for levers in (("recompute",), LEVERS)}
    bound = {levers: smallest(CLIPPED, levers) for levers in (("recompute",), LEVERS)}
    assert free[LEVERS] <= free["recompute",]
    assert free[LEVERS] - resident <= 0.5 * gradients_bytes()
    # Gradients that wait for the clip's number are held, or some of them made again.
    assert bound[LEVERS] - resident >= 0.5 * gradients_bytes()
    assert bound[LEVERS] <= bound["recompute",]


@pytest.mark.thorough
@pytest.mark.parametrize("optimizer", [PLAIN, CLIPPED], ids=["plain", "clipped"])
def test_numbers_stay(optimizer):
    outcomes = []
    for step in (jax.jit(step_of(optimizer)), planned(optimizer)):
        params = parameters()
        state = optimizer.init(params)
        for _ in range(3):
            params, state, value = step(params, state, batch())
        outcomes.append((params, value))
    for one, other in zip(*map(jax.tree.leaves, outcomes), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-8)


def test_the_lever_is_for_whole_steps():
    with pytest.raises(ValueError, match="levers="):
        remat.jax.value_and_grad(loss, budget="50%", levers=LEVERS)
