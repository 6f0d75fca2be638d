"""Models written with Flax NNX, Flax Linen and Equinox, and optax around them."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax_models import GREEDY, assert_close, normal

import remat.jax

WIDTH, BATCH, LAYERS = 16, 512, 8


def linen():
    from flax import linen as nn

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(LAYERS):
                x = nn.Dropout(0.1, deterministic=False)(nn.tanh(nn.Dense(2 * WIDTH)(x)))
            return nn.Dense(1)(x)

    model = Model()
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    params = model.init(rngs, jnp.ones((1, WIDTH)))
    return params, lambda params, x: jnp.mean(model.apply(params, x, rngs={"dropout": jax.random.key(2)}) ** 2)


def nnx():
    from flax import nnx as library

    class Model(library.Module):
        def __init__(self, rngs):
            sizes = [WIDTH, *([2 * WIDTH] * LAYERS)]
            self.layers = library.List([library.Linear(a, b, rngs=rngs) for a, b in itertools.pairwise(sizes)])

        def __call__(self, x):
            for layer in self.layers:
                x = library.tanh(layer(x))
            return x

    structure, params = library.split(Model(library.Rngs(0)))
    return params, lambda params, x: jnp.mean(library.merge(structure, params)(x) ** 2)


def equinox():
    import equinox as eqx

    model = eqx.nn.MLP(WIDTH, 1, 2 * WIDTH, LAYERS, activation=jnp.tanh, key=jax.random.key(0))
    params, rest = eqx.partition(model, eqx.is_inexact_array)
    return params, lambda params, x: jnp.mean(jax.vmap(eqx.combine(params, rest))(x) ** 2)


@pytest.mark.parametrize(
    "library",
    [pytest.param(linen, marks=pytest.mark.slow), nnx, pytest.param(equinox, marks=pytest.mark.slow)],
    ids=lambda f: f.__name__,
)
def test_training_with_optax(library):
    params, loss = library()
    x = normal(0, BATCH, WIDTH)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9))

    def train(gradient):
        @jax.jit
        def step(params, state):
            value, gradients = gradient(params, x)
            updates, state = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state, value

        own, state = params, optimizer.init(params)
        for _ in range(3):
            own, state, value = step(own, state)
        return own, value

    ours = remat.jax.value_and_grad(loss, budget="80%", **GREEDY)
    assert_close(train(ours), train(jax.value_and_grad(loss)), rtol=1e-4)
    assert ours.plan.recomputed > 0
