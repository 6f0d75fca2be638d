"""A GPT-2 shaped Transformer, unrolled or scanned over its layers, with any ``jax.checkpoint`` around a layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@dataclass(frozen=True)
class Size:
    """Sizes of a model.

    Attributes:
        layers: how many.
        width: of the residual stream.
        heads: of attention.
        length: tokens of a sample.
        batch: samples.
        words: of the vocabulary.
    """

    layers: int = 6
    width: int = 128
    heads: int = 4
    length: int = 128
    batch: int = 16
    words: int = 512


def transformer(size: Size, *, scanned: bool, wrap: Callable[[Any], Any] = lambda block: block) -> tuple[Any, Any]:
    """The loss and its arguments; ``wrap`` goes around the function of one layer."""
    width, heads = size.width, size.heads
    shapes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    random = np.random.default_rng(0)

    def weight(*shape: int) -> Any:
        return jnp.asarray(random.normal(size=shape) * 0.02, jnp.float32)

    blocks = [{name: weight(*shape) for name, shape in shapes.items()} for _ in range(size.layers)]
    params: dict[str, Any] = {"words": weight(size.words, width), "blocks": blocks}
    if scanned:
        params["blocks"] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)
    tokens = jnp.asarray(random.integers(0, size.words, (size.batch, size.length)))

    def norm(x: Any) -> Any:
        centred = x - x.mean(-1, keepdims=True)
        return centred * lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5)

    def split(x: Any) -> Any:
        return x.reshape(size.batch, size.length, heads, width // heads).transpose(0, 2, 1, 3)

    def layer(x: Any, p: Any) -> Any:
        q, k, v = map(split, jnp.split(norm(x) @ p["qkv"], 3, -1))
        scores = q @ k.swapaxes(2, 3) * (width // heads) ** -0.5
        causal = jnp.tril(jnp.ones((size.length, size.length), bool))
        mixed = jax.nn.softmax(jnp.where(causal, scores, -1e9)) @ v
        x = x + mixed.transpose(0, 2, 1, 3).reshape(x.shape) @ p["out"]
        return x + jax.nn.gelu(norm(x) @ p["up"]) @ p["down"]

    wrapped = wrap(layer)

    def loss(params: Any, tokens: Any) -> Any:
        x = params["words"][tokens]
        if scanned:
            x, _ = lax.scan(lambda c, p: (wrapped(c, p), None), x, params["blocks"])
        else:
            for p in params["blocks"]:
                x = wrapped(x, p)
        logits = norm(x) @ params["words"].T
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1))

    return loss, (params, tokens)
