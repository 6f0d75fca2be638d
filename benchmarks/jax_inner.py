"""What slices of inner layers save and cost in JAX: ``python -m benchmarks.jax_inner``.

Two models whose widest layer is the inner one of an MLP, four times as wide as what is around it: a ConvNeXt at a high
resolution (a stem and blocks of one width, two images), and a Transformer over one long sequence whose attention looks
at windows. Each gradient is compiled plainly, with every block under ``jax.checkpoint``, with the smallest peak by
recomputation alone, and with the smallest peak by recomputation and slices. Columns are those of
``benchmarks.jax_split``.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

import remat.jax
from benchmarks.jax_split import LEVERS, UPDATES, Params, measured, smallest
from benchmarks.one_core import stay_on_one_core
from benchmarks.split_table import table

RESULT = Path(__file__).parent / "results" / "jax-inner.md"
BLOCKS, WINDOW = 3, 64
CONVOLUTION: Final = ("NHWC", "HWIO", "NHWC")


def matrix(random: np.random.Generator, *shape: int) -> jax.Array:
    """Random weights."""
    return jnp.asarray(random.normal(size=shape) * np.prod(shape[:-1]) ** -0.5, jnp.float32)


def normalised(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Layer normalisation."""
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-6) * scale


def inner_layer(params: Params, x: jax.Array) -> jax.Array:
    """Four times as wide, and back."""
    return jax.nn.gelu(x @ params["up"] + params["bias"]) @ params["down"]


def convnext_block(params: Params, x: jax.Array) -> jax.Array:
    """A depthwise convolution, and an inner layer."""
    width = x.shape[-1]
    mixed = jax.lax.conv_general_dilated(
        x, params["mix"], (1, 1), "SAME", dimension_numbers=CONVOLUTION, feature_group_count=width
    )
    return x + inner_layer(params, normalised(mixed, params["scale"]))


def transformer_block(params: Params, x: jax.Array) -> jax.Array:
    """Attention within windows, and an inner layer."""
    width = x.shape[-1]
    rows = normalised(x, params["scale"]).reshape(-1, WINDOW, width)
    q, k, v = (rows @ params["mix"][n] for n in range(3))
    weights = jax.nn.softmax(jnp.einsum("wqc,wkc->wqk", q, k) * width**-0.5)
    x = x + jnp.einsum("wqk,wkc->wqc", weights, v).reshape(x.shape)
    return x + inner_layer(params, normalised(x, params["scale"]))


def block_parameters(random: np.random.Generator, width: int, mix: tuple[int, ...]) -> Params:
    """Of one block."""
    return {
        "mix": matrix(random, *mix),
        "scale": jnp.ones(width),
        "up": matrix(random, width, 4 * width),
        "bias": jnp.zeros(4 * width),
        "down": matrix(random, 4 * width, width),
    }


def convnext(*, quick: bool) -> tuple[str, Any, Params, tuple[Any, ...]]:
    """Two images, cut into patches of four by four."""
    side, width = (64, 16) if quick else (512, 48)
    random = np.random.default_rng(0)
    params = {
        "stem": matrix(random, 4, 4, 3, width),
        "blocks": [block_parameters(random, width, (7, 7, 1, width)) for _ in range(BLOCKS)],
        "head": matrix(random, width, 10),
    }

    def loss(block: Any, params: Params, images: jax.Array, labels: jax.Array) -> jax.Array:
        x = jax.lax.conv_general_dilated(images, params["stem"], (4, 4), "VALID", dimension_numbers=CONVOLUTION)
        for one in params["blocks"]:
            x = block(one, x)
        return jnp.square(x.mean((1, 2)) @ params["head"] - labels).mean()

    data = (matrix(random, 2, side, side, 3), matrix(random, 2, 10))
    return f"ConvNeXt, {BLOCKS} blocks of width {width}, 2 x {side} x {side}", (loss, convnext_block), params, data


def transformer(*, quick: bool) -> tuple[str, Any, Params, tuple[Any, ...]]:
    """One long sequence."""
    tokens, width = (1024, 16) if quick else (16_384, 96)
    random = np.random.default_rng(0)
    params = {"blocks": [block_parameters(random, width, (3, width, width)) for _ in range(BLOCKS)]}

    def loss(block: Any, params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
        for one in params["blocks"]:
            x = block(one, x)
        return jnp.square(x - y).mean()

    data = (matrix(random, 1, tokens, width), matrix(random, 1, tokens, width))
    name = f"Transformer, {BLOCKS} blocks of width {width}, {tokens:,} tokens, windows of {WINDOW}"
    return name, (loss, transformer_block), params, data


MODELS = {"convnext": convnext, "transformer": transformer}


def lines_of(model: str, *, quick: bool, time_limit_s: float) -> list[dict[str, Any]]:
    """A line for each way to run one model."""
    name, (loss, block), params, data = MODELS[model](quick=quick)

    def plainly(*args: Any) -> jax.Array:
        return loss(block, *args)

    def by_checkpoints(*args: Any) -> jax.Array:
        return loss(jax.checkpoint(block), *args)

    ways = {
        "plain": jax.jit(jax.value_and_grad(plainly)),
        "by hand, each block under jax.checkpoint": remat.jax.jit(jax.value_and_grad(by_checkpoints)),
        "remat, smallest peak by recomputation": smallest(plainly, (params, *data), ("recompute",), time_limit_s),
        "remat, smallest peak with slices": smallest(plainly, (params, *data), LEVERS, time_limit_s),
    }
    return measured(name, ways, params, data)


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small models; keeps no result")
    parser.add_argument("--model", choices=MODELS, help="one model alone; keeps no result")
    options = parser.parse_args()
    stay_on_one_core()
    models = [options.model] if options.model else list(MODELS)
    lines = [line for model in models for line in lines_of(model, quick=options.quick, time_limit_s=0.3)]
    about = (
        f"jax {jax.__version__}; float32. Peak: arguments, results and what lies between, of the compiled program. "
        "Grown: what the process took while the program ran, arguments left out. Difference: of the parameters after "
        f"{UPDATES} steps of AdamW from plain, relative, the largest one."
    )
    text = table("Slices of inner layers in JAX", about, lines)
    if not options.quick and options.model is None:
        RESULT.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
