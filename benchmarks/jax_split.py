"""What slices of a language model's head save and cost in JAX: ``python -m benchmarks.jax_split``.

The models are those of ``benchmarks.split``: two layers of a small width and the full vocabularies of GPT-2 and Llama
3, so that the head binds. Each gradient is compiled plainly, with the smallest peak by recomputation alone, with the
smallest peak by recomputation and slices, and beside two heads that people write by hand: one computes gradients chunk
by chunk in its forward pass; the other runs each chunk under ``jax.checkpoint``. Both are loops under ``lax.scan``.
remat is then given the bytes that the first of them takes. Peaks are those of the compiled programs; beside them stands
by how much the process grew while the program ran. Times are the least processor time of several runs, in turns.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import remat
import remat.jax
from benchmarks.one_core import stay_on_one_core
from benchmarks.split_table import table
from remat.jax.peak import peak_of
from remat.running import resident_set

RESULT = Path(__file__).parent / "results" / "jax-split.md"
CHUNKS, RUNS, UPDATES, LAYERS, HEADS = 8, 4, 5, 2, 4
LEVERS = ("recompute", "split")
Params = dict[str, Any]
Loss = Callable[..., Any]


def parameters(words: int, width: int, *, gated: bool) -> Params:
    """Random weights of a decoder, with GPT-2's inner layer and one matrix for both ends, or Llama's."""
    random = np.random.default_rng(0)

    def matrix(rows: int, columns: int, scale: float) -> jax.Array:
        return jnp.asarray(random.normal(size=(rows, columns)) * scale, jnp.float32)

    def block() -> Params:
        made = {"norm_1": jnp.ones(width), "norm_2": jnp.ones(width)}
        sizes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
        if gated:
            sizes["gate"] = (width, 4 * width)
        return made | {name: matrix(*shape, shape[0] ** -0.5) for name, shape in sizes.items()}

    made: Params = {"embedding": matrix(words, width, 0.02), "norm": jnp.ones(width)}
    made["blocks"] = [block() for _ in range(LAYERS)]
    if gated:
        made["head"] = matrix(width, words, 0.02)
    return made


def normalised(x: jax.Array, scale: jax.Array, *, gated: bool) -> jax.Array:
    """Each token's values, their mean square 1; without Llama's layers their mean is 0, too."""
    x = x if gated else x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5) * scale


def hidden(params: Params, tokens: jax.Array) -> jax.Array:
    """What the head reads."""
    gated = "head" in params
    x = params["embedding"][tokens]
    samples, length, width = x.shape
    mask = jnp.tril(jnp.ones((length, length), bool))
    for block in params["blocks"]:
        parts = normalised(x, block["norm_1"], gated=gated) @ block["qkv"]
        q, k, v = parts.reshape(samples, length, 3, HEADS, width // HEADS).transpose(2, 0, 3, 1, 4)
        scores = jnp.where(mask, q @ k.swapaxes(-1, -2) / math.sqrt(width // HEADS), -1e9)
        mixed = (jax.nn.softmax(scores) @ v).swapaxes(1, 2).reshape(samples, length, width)
        x = x + mixed @ block["out"]
        y = normalised(x, block["norm_2"], gated=gated)
        inner = jax.nn.silu(y @ block["gate"]) * (y @ block["up"]) if gated else jax.nn.gelu(y @ block["up"])
        x = x + inner @ block["down"]
    return normalised(x, params["norm"], gated=gated)


def head(params: Params) -> jax.Array:
    """The matrix that makes logits."""
    return params["head"] if "head" in params else params["embedding"].T


def plainly(params: Params, tokens: jax.Array, labels: jax.Array) -> jax.Array:
    """The loss as anyone writes it."""
    logits = hidden(params, tokens) @ head(params)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@jax.custom_vjp
def in_chunks(x: jax.Array, weight: jax.Array, labels: jax.Array) -> Any:
    """The head by hand: each chunk's gradients are computed behind its loss, and scaled in the backward pass."""
    return _in_chunks(x, weight, labels)[0]


def _in_chunks(x: jax.Array, weight: jax.Array, labels: jax.Array) -> Any:
    rows = x.shape[0]

    def one(carry: Any, chunk: Any) -> Any:
        total, weight_gradient = carry
        part, label = chunk
        logits = part @ weight
        top = logits.max(-1, keepdims=True)
        powers = jnp.exp(logits - top)
        sums = powers.sum(-1, keepdims=True)
        losses = jnp.log(sums[:, 0]) + top[:, 0] - jnp.take_along_axis(logits, label[:, None], -1)[:, 0]
        gradient = (powers / sums - (jnp.arange(weight.shape[1]) == label[:, None])) / rows
        return (total + losses.sum(), weight_gradient + part.T @ gradient), gradient @ weight.T

    chunks = x.reshape(CHUNKS, rows // CHUNKS, -1), labels.reshape(CHUNKS, -1)
    (total, weight_gradient), x_gradient = jax.lax.scan(one, (jnp.zeros(()), jnp.zeros_like(weight)), chunks)
    return total / rows, (x_gradient.reshape(x.shape), weight_gradient)


in_chunks.defvjp(_in_chunks, lambda kept, gradient: (kept[0] * gradient, kept[1] * gradient, None))


def in_forward(params: Params, tokens: jax.Array, labels: jax.Array) -> Any:
    """The loss with ``in_chunks``."""
    x = hidden(params, tokens)
    return in_chunks(x.reshape(-1, x.shape[-1]), head(params), labels.reshape(-1))


def by_checkpoints(params: Params, tokens: jax.Array, labels: jax.Array) -> Any:
    """The loss of each chunk under a checkpoint."""
    x, weight = hidden(params, tokens), head(params)

    @jax.checkpoint
    def one(total: Any, chunk: Any) -> Any:
        losses = optax.softmax_cross_entropy_with_integer_labels(chunk[0] @ weight, chunk[1])
        return total + losses.sum(), None

    chunks = x.reshape(CHUNKS, -1, x.shape[-1]), labels.reshape(CHUNKS, -1)
    return jax.lax.scan(one, jnp.zeros(()), chunks)[0] / labels.size


def smallest(loss: Loss, args: tuple[Any, ...], levers: tuple[str, ...], time_limit_s: float) -> Any:
    """The gradient with the smallest peak."""
    gradient = jax.value_and_grad(loss)
    try:
        remat.jax.jit(gradient, budget=1, levers=levers, time_limit_s=time_limit_s).lower(*args)
    except remat.InfeasibleBudget as error:
        return remat.jax.jit(gradient, budget=error.minimum_bytes, levers=levers, time_limit_s=time_limit_s)
    raise AssertionError("no step takes one byte")


def after_updates(gradient: Any, params: Params, data: tuple[Any, ...]) -> list[Any]:
    """The parameters after some steps of AdamW."""
    optimizer: Any = optax.adamw(1e-3)
    state = optimizer.init(params)
    for _ in range(UPDATES):
        updates, state = optimizer.update(gradient(params, *data)[1], state, params)
        params = optax.apply_updates(params, updates)
    return jax.tree.leaves(params)


def lines_of(name: str, words: int, width: int, *, gated: bool, time_limit_s: float) -> list[dict[str, Any]]:
    """A line for each way to run one model."""
    random = np.random.default_rng(1)
    data = tuple(jnp.asarray(random.integers(0, words, (4, 256)), jnp.int32) for _ in range(2))
    params = parameters(words, width, gated=gated)
    args = (params, *data)
    ways: dict[str, Any] = {
        "plain": jax.jit(jax.value_and_grad(plainly)),
        f"by hand, gradients in the forward pass, {CHUNKS} chunks": jax.jit(jax.value_and_grad(in_forward)),
        f"by hand, {CHUNKS} checkpointed chunks": remat.jax.jit(jax.value_and_grad(by_checkpoints)),
    }
    by_hand = list(ways.values())[1].lower(*args).compile()
    ways["remat, smallest peak by recomputation"] = smallest(plainly, args, ("recompute",), time_limit_s)
    ways["remat, smallest peak with slices"] = smallest(plainly, args, LEVERS, time_limit_s)
    ways["remat, within the first one's bytes"] = remat.jax.jit(
        jax.value_and_grad(plainly),
        budget=peak_of(by_hand.memory_analysis()),
        levers=LEVERS,
        time_limit_s=time_limit_s,
    )
    return measured(name, ways, params, data)


def measured(name: str, ways: dict[str, Any], params: Params, data: tuple[Any, ...]) -> list[dict[str, Any]]:
    """A line for each way to compute one model's gradients, the first being plain."""
    args = (params, *data)
    wait: Any = jax.block_until_ready
    peaks, grown = {}, {}
    for way, gradient in ways.items():
        peaks[way] = peak_of(gradient.lower(*args).compile().memory_analysis())
        wait(gradient(*args))
        before_bytes = resident_set.start_new_peak()
        wait(gradient(*args))
        grown[way] = resident_set.peak_bytes() - before_bytes
    times = dict.fromkeys(ways, float("inf"))
    for _ in range(RUNS):
        for way, gradient in ways.items():
            started = time.process_time()
            wait(gradient(*args))
            times[way] = min(times[way], time.process_time() - started)
    expected = after_updates(ways["plain"], params, data)
    lines = []
    for way, gradient in ways.items():
        found = after_updates(gradient, params, data)
        pairs = zip(found, expected, strict=True)
        plan = getattr(gradient, "plan", None)
        split = None if plan is None else plan.split
        lines.append(
            {
                "model": name,
                "way": way,
                "peak_bytes": peaks[way],
                "grown_bytes": grown[way],
                "time_s": times[way],
                "slices": "" if split is None else str(split.slices),
                "recomputed": "" if plan is None else str(plan.recomputed),
                "difference": max(float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) for a, b in pairs),
            }
        )
    return lines


def written(lines: list[dict[str, Any]]) -> str:
    """The table as Markdown."""
    about = (
        f"jax {jax.__version__}; float32. Peak: arguments, results and what lies between, of the compiled program. "
        "Grown: what the process took while the program ran, arguments left out. Difference: of the parameters after "
        f"{UPDATES} steps of AdamW from plain, relative, the largest one."
    )
    return table("Slices of the head in JAX", about, lines)


MODELS = {
    "gpt2": ("GPT-2's head, 50,257 words", 50_257, False),
    "llama": ("Llama's head, 128,256 words", 128_256, True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small vocabularies; keeps no result")
    parser.add_argument("--model", choices=MODELS, help="one model alone; keeps no result")
    options = parser.parse_args()
    stay_on_one_core()
    lines = []
    for name, words, gated in [MODELS[options.model]] if options.model else MODELS.values():
        sizes = (words // 16, 32) if options.quick else (words, 128)
        lines += lines_of(name, *sizes, gated=gated, time_limit_s=0.3)
    text = written(lines)
    if not options.quick and options.model is None:
        RESULT.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
