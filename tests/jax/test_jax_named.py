"""``checkpoints=`` of ``remat.jax.jit``: named values are kept, everything else between them is recomputed."""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import remat

WIDTH, BATCH = 64, 1024


def loss(weights, x):
    for number, weight in enumerate(weights):
        x = jnp.sin(jnp.tanh(x @ weight))
        if number % 3 == 2:
            x = checkpoint_name(x, f"block_{number // 3}")
        x = x * 2.0  # Alone it reads the named value, and would take it into its own kernel.
    return jnp.sum(x**2)


def arguments():
    random = np.random.default_rng(0)
    weights = [jnp.asarray(random.normal(size=(WIDTH, WIDTH)) * WIDTH**-0.5, jnp.float32) for _ in range(9)]
    return weights, jnp.asarray(random.normal(size=(BATCH, WIDTH)), jnp.float32)


def test_what_is_named_is_kept_and_the_rest_is_not():
    step = remat.jax.jit(jax.value_and_grad(loss), checkpoints=["block_0", "block_1"])
    value, gradients = step(*arguments())
    plain_value, plain_gradients = jax.jit(jax.value_and_grad(loss))(*arguments())
    np.testing.assert_allclose(value, plain_value, rtol=1e-6)
    for found, plain in zip(gradients, plain_gradients, strict=True):
        np.testing.assert_allclose(found, plain, rtol=1e-5, atol=1e-5 * float(jnp.abs(plain).max()))
    runs = Counter(step.plan.schedule)
    again = Counter(op.kind for number, op in enumerate(step.graph.ops) if runs[number] > 1)
    assert again["tanh"] == 9
    # A sine is part of the kernel that reads it, unless it is named; those are kept.
    assert sum(op.kind == "sin" for op in step.graph.ops) == 2
    assert again["sin"] == 0
    assert step.plan.peak_bytes == step.plan.budget_bytes < step.plan.baseline_peak_bytes


def test_a_name_that_nothing_has():
    step = remat.jax.jit(jax.value_and_grad(loss), checkpoints=["block_7"])
    with pytest.raises(remat.UnsupportedStep, match=r"'block_7' names no value .*block_0, block_1, block_2"):
        step(*arguments())


def test_one_way_to_choose_is_enough():
    plan = remat.jax.jit(jax.value_and_grad(loss), checkpoints=["block_0"]).plan_for(*arguments())
    with pytest.raises(ValueError, match=r"takes plan= or checkpoints=, not both"):
        remat.jax.jit(loss, plan=plan, checkpoints=["block_0"])
