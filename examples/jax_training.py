"""Train a small network with JAX inside a budget, its whole step planned: python examples/jax_training.py 60%."""

import sys

import jax
import jax.numpy as jnp

import remat.jax


def loss(weights, x, y):
    for w in weights[:-1]:
        x = jnp.tanh(x @ w)
    return jnp.mean((x @ weights[-1] - y) ** 2)


def step(weights, x, y):
    value, gradients = jax.value_and_grad(loss)(weights, x, y)
    return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)], value


keys = jax.random.split(jax.random.key(0), 19)
weights = [jax.random.normal(key, (64, 64 if n < 16 else 1)) / 8 for n, key in enumerate(keys[:17])]
x, y = jax.random.normal(keys[17], (2048, 64)), jax.random.normal(keys[18], (2048, 1))

train_step = remat.jax.jit(step, budget=sys.argv[1] if len(sys.argv) > 1 else "60%", donate_argnums=0)
for _ in range(20):
    weights, value = train_step(weights, x, y)
print(f"loss {value:.4f}")
print(train_step.plan)
