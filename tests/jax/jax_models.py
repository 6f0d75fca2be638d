"""Small training losses of every kind; activations outweigh parameters, as in real training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import remat.jax
from remat.planning.find import find

GREEDY = {"planner": "peak_greedy"}
"""For a budget where the planner is not what is tested: a schedule in milliseconds, the same one each time."""

AUTO = {"time_limit_s": 0.3}
"""The planner that users get."""


OF_XLA_0_10 = pytest.mark.skipif(
    jax.__version_info__ >= (0, 11), reason="says what XLA did up to jaxlib 0.10; see docs/versions.md"
)


@dataclass(frozen=True)
class Case:
    """A loss and its arguments.

    Attributes:
        loss: a function of the parameters and of the other arguments.
        args: what it is called with, parameters first.
        has_aux: does the loss return more than a scalar?
    """

    loss: Callable[..., Any]
    args: tuple[Any, ...]
    has_aux: bool = False


def following(loss: Callable[..., Any], *args: Any, share: str = "70%", **options: Any) -> Any:
    """The planned gradient of a loss, for tests of what a plan runs: its schedule is fixed before anything is compiled.

    The schedule is a greedy one within a share of the trace's plain peak; it recomputes something.
    """
    graph = remat.jax.trace(jax.value_and_grad(loss, **options), *args)
    plan = find(graph, share, "peak_greedy")
    assert plan.recomputed > 0
    return remat.jax.value_and_grad(loss, plan=plan, **options)


def normal(seed: int, *shape: int, scale: float = 1.0, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * scale, dtype)


def mlp(dtype: Any = jnp.float32, layers: int = 12, width: int = 64, batch: int = 512) -> Case:
    params = [
        {"w": normal(n, width, width, scale=width**-0.5, dtype=dtype), "b": jnp.zeros(width, dtype)}
        for n in range(layers)
    ]

    def loss(params: Any, x: Any) -> Any:
        for layer in params:
            x = jnp.tanh(x @ layer["w"] + layer["b"])
        return jnp.mean(jnp.square(x).astype(jnp.float32))

    return Case(loss, (params, normal(99, batch, width, dtype=dtype)))


def convnet(dtype: Any = jnp.float32, layers: int = 3) -> Case:
    """Convolutions with batch normalisation; the new running statistics are auxiliary results."""
    channels = 8
    params = [
        {
            "kernel": normal(n, 3, 3, 3 if n == 0 else channels, channels, scale=0.2, dtype=dtype),
            "scale": jnp.ones(channels, dtype),
        }
        for n in range(layers)
    ]
    statistics = [jnp.zeros(channels, jnp.float32) for _ in params]

    def loss(params: Any, statistics: Any, x: Any, y: Any) -> Any:
        updated = []
        for layer, running in zip(params, statistics, strict=True):
            x = lax.conv_general_dilated(x, layer["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
            updated.append(0.9 * running + 0.1 * mean.astype(jnp.float32))
            x = jax.nn.relu((x - mean) * lax.rsqrt(variance + 1e-3) * layer["scale"])
        logits = x.mean((1, 2)).astype(jnp.float32)
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1)), updated

    x = normal(1, 16, 16, 16, 3, dtype=dtype)
    y = jnp.asarray(np.random.default_rng(2).integers(0, channels, 16))
    return Case(loss, (params, statistics, x, y), has_aux=True)


def transformer(
    dtype: Any = jnp.float32,
    *,
    layers: int = 2,
    width: int = 32,
    length: int = 32,
    batch: int = 8,
    scanned: bool = False,
    dropout: float = 0.1,
    generator: str = "rbg",
    wrap: Callable[[Any], Any] = lambda block: block,
) -> Case:
    """GPT-2 shaped: attention and MLP behind layer norms, with dropout, unrolled or scanned over the layers.

    ``wrap`` goes around the function of one layer. The random generator is the one that compiles quickly;
    "threefry2x32" is JAX's default.
    """
    heads, words = 2, 64
    shapes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    blocks = [
        {name: normal(10 * n + k, *shape, scale=0.1, dtype=dtype) for k, (name, shape) in enumerate(shapes.items())}
        for n in range(layers)
    ]
    params = {"words": normal(500, words, width, scale=0.1, dtype=dtype), "blocks": blocks}
    if scanned:
        params["blocks"] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)

    def norm(x: Any) -> Any:
        mean = x.mean(-1, keepdims=True)
        return (x - mean) * lax.rsqrt(jnp.square(x - mean).mean(-1, keepdims=True) + 1e-5)

    def drop(x: Any, key: Any) -> Any:
        return jnp.where(jax.random.bernoulli(key, 1 - dropout, x.shape), x / (1 - dropout), 0) if dropout else x

    @wrap
    def block(x: Any, p: Any, key: Any) -> Any:
        one, other = jax.random.split(key)
        q, k, v = (
            part.reshape(batch, length, heads, -1).transpose(0, 2, 1, 3)
            for part in jnp.split(norm(x) @ p["qkv"], 3, -1)
        )
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), q @ k.swapaxes(2, 3) / 4.0, -1e9)
        mixed = (jax.nn.softmax(scores) @ v).transpose(0, 2, 1, 3).reshape(batch, length, width)
        x = x + drop(mixed @ p["out"], one)
        return x + drop(jax.nn.gelu(norm(x) @ p["up"]) @ p["down"], other)

    def loss(params: Any, tokens: Any, key: Any) -> Any:
        x = params["words"][tokens]
        keys = jax.random.split(key, layers)
        if scanned:
            x, _ = lax.scan(lambda x, each: (block(x, *each), None), x, (params["blocks"], keys))
        else:
            for p, own in zip(params["blocks"], keys, strict=True):
                x = block(x, p, own)
        logits = (norm(x) @ params["words"].T).astype(jnp.float32)
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1))

    tokens = jnp.asarray(np.random.default_rng(3).integers(0, words, (batch, length)))
    return Case(loss, (params, tokens, jax.random.key(5, impl=generator)))


def assert_close(found: Any, expected: Any, *, rtol: float = 2e-5) -> None:
    """Equal at float rounding, relative to the largest value of each array; integers exactly."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        a, b = np.asarray(one), np.asarray(other)
        if a.dtype.kind in "iub":
            np.testing.assert_array_equal(a, b)
            continue
        a, b = a.astype(np.float64), b.astype(np.float64)
        loose = rtol if one.dtype == jnp.float32 else 2e-2
        np.testing.assert_allclose(a, b, rtol=0, atol=loose * max(1e-6, float(np.max(np.abs(b), initial=0.0))))


def assert_as_exact(found: Any, expected: Any, exact: Any, *, at_most: float = 1.5) -> None:
    """In half precision, where a compiler rounds between kernels only: no farther from float32 than plain JAX is."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other, true in zip(*map(jax.tree.leaves, (found, expected, exact)), strict=True):
        assert one.dtype == other.dtype
        ours, plain, reference = (np.asarray(a, np.float64) for a in (one, other, true))
        rounding = float(jnp.finfo(one.dtype).eps) * float(np.max(np.abs(reference), initial=0.0))
        assert np.max(np.abs(ours - reference)) <= at_most * max(np.max(np.abs(plain - reference)), rounding)


def in_float32(args: Any) -> Any:
    """Arguments with the same values in float32."""
    return jax.tree.map(lambda a: a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a, args)


def temp_bytes(jitted: Any, *args: Any) -> int:
    return int(jitted.lower(*args).compile().memory_analysis().temp_size_in_bytes)
