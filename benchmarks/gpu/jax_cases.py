"""The cases in JAX: plans in place of ``jax.value_and_grad``, beside ``jax.checkpoint``."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import remat
import remat.jax
from benchmarks.gpu.cases import DTYPES, MODELS, SHARES, UNTIMED, Case, speed_of
from remat.jax.peak import peak_of
from remat.jax.timed_ops import TimedOps
from remat.running.calibration import op_samples
from remat.running.cost_model import calibrate, save_measured

Line = dict[str, Any]
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
TURNS = 5


def run(case: Case, device: str, small: bool) -> Iterator[Line]:
    """The lines of one case, each as soon as it is known."""
    if case.part == "calibration":
        yield from calibration(small)
        return
    loss, args = step_of(case.model, case.dtype, small)
    bench = Bench(args, is_timed=case.part not in UNTIMED)
    plain = bench.line("plain", jax.value_and_grad(loss))
    yield plain
    if case.part in SHARES:
        yield bench.line("plain again", jax.value_and_grad(loss))
        wanted = [(f"remat, {share:.0%}", int(share * plain["peak_bytes"])) for share in SHARES[case.part]]
        for name, budget in [*wanted, ("remat, smallest", 1)]:
            yield planned_line(bench, loss, name, budget, smallest=budget == 1)
        return
    for policy in ("nothing_saveable", "dots_saveable"):
        checkpointed, _ = step_of(
            case.model, case.dtype, small, partial(jax.checkpoint, policy=getattr(jax.checkpoint_policies, policy))
        )
        line = bench.line(f"jax.checkpoint, {policy}", jax.value_and_grad(checkpointed))
        yield line
        yield planned_line(bench, loss, f"remat, bytes of {policy}", line["peak_bytes"])


def planned_line(bench: Bench, loss: Any, name: str, budget: int, *, smallest: bool = False) -> Line:
    """The step within a budget; an infeasible one is a line that names the smallest."""
    started = time.perf_counter()
    try:
        found, least = within(bench, loss, name, budget)
        if found is None and smallest:
            budget = least
            found, least = within(bench, loss, name, budget)
    except Exception as error:
        said = str(error).strip().splitlines() or [""]
        return {"name": name, "error": f"{type(error).__name__}: {said[0][:200]}"}
    if found is None:
        return {"name": name, "budget_bytes": budget, "error": "refused", "smallest_bytes": least}
    line, gradient = found
    plan = gradient.plan
    return {
        **line,
        "budget_bytes": budget,
        "predicted_bytes": plan.peak_bytes,
        "predicted_time": 1 + plan.overhead,
        "recomputed": plan.recomputed,
        "planning_s": time.perf_counter() - started,
    }


def within(bench: Bench, loss: Any, name: str, budget: int) -> tuple[tuple[Line, Any] | None, int]:
    """A line and the gradient's function within a budget, and that; for one that is too small None and the smallest.

    Nothing of a refused plan is left when this returns: an error holds what its frames held, on the device, too.
    """
    gradient = remat.jax.value_and_grad(loss, budget=budget)
    try:
        return (bench.line(name, gradient), gradient), budget
    except remat.InfeasibleBudget as error:
        return None, error.minimum_bytes


class Bench:
    """Measures gradients of one model beside the first of them, which is the plain one.

    Args:
        args: weights and batch.
        is_timed: are steps timed?
    """

    def __init__(self, args: tuple[Any, ...], *, is_timed: bool = True) -> None:
        self.args = args
        self._is_timed = is_timed
        self._plain: Any = None
        self._expected: list[Any] = []

    def line(self, name: str, gradient: Callable[..., Any]) -> Line:
        """Peak of the compiled program, time beside plain steps in turns, and the difference of the gradients."""
        step: Any = remat.jax.jit(lambda *args: gradient(*args))
        compiled = step.lower(*self.args).compile()
        peak_bytes = peak_of(compiled.memory_analysis())
        found = [np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(compiled(*self.args)[1])]
        if self._plain is None:
            self._plain, self._expected = compiled, found
        pairs = list(zip(found, self._expected, strict=True))
        line = {
            "name": name,
            "peak_bytes": peak_bytes,
            "difference": max(np.abs(a - b).max() for a, b in pairs).item()
            / max(np.abs(b).max() for _, b in pairs).item(),
            "equal_bits": all(np.array_equal(a, b) for a, b in pairs),
        }
        if self._is_timed:
            times = [(self._seconds(compiled), self._seconds(self._plain)) for _ in range(TURNS)]
            line["step_s"] = statistics.median(own for own, _ in times)
            line["relative_time"] = statistics.median(own / plain for own, plain in times)
        return line

    def _seconds(self, compiled: Any) -> float:
        started = time.perf_counter()
        jax.block_until_ready(compiled(*self.args))
        return time.perf_counter() - started


def calibration(small: bool) -> Iterator[Line]:
    """The device's speed, timed now, and each model's plain step as the cost model sees it with that."""
    profile = calibrate(op_samples(TimedOps()))
    yield speed_of(profile)
    save_measured(profile)  # In a folder of this process: the user's own stays as it is.
    for model in MODELS:
        for dtype in DTYPES:
            loss, args = step_of(model, dtype, small)
            graph = remat.jax.trace(jax.value_and_grad(loss), *args, device="measured")
            line = Bench(args).line(f"{model} {dtype}", jax.value_and_grad(loss))
            yield {**line, "predicted_step_s": graph.time_s}


def step_of(model: str, dtype: str, small: bool, wrap: Wrap = lambda block: block) -> tuple[Any, tuple[Any, ...]]:
    """The loss of a model with random weights, dropout included, and its arguments."""
    if model == "resnet50":
        return resnet(jnp.dtype(dtype), small, wrap)
    return decoder(jnp.dtype(dtype), small, model == "llama", wrap)


def decoder(dtype: Any, small: bool, is_llama: bool, wrap: Wrap) -> tuple[Any, tuple[Any, ...]]:
    """GPT-2, with dropout, or Llama, with grouped heads, unrolled."""
    layers, width, heads, length, batch, words = (2, 64, 4, 32, 2, 101) if small else (12, 768, 12, 1024, 8, 50257)
    if is_llama and not small:
        layers, width, heads, length, batch, words = 8, 2048, 16, 2048, 2, 32000
    head, groups = width // heads, max(1, heads // 4) if is_llama else heads
    random = np.random.default_rng(0)

    def weight(*shape: int) -> Any:
        return jnp.asarray(random.normal(size=shape) * 0.02, dtype)

    blocks = [
        {
            "qkv": weight(width, width + 2 * groups * head),
            "out": weight(width, width),
            "up": weight(width, (6 if is_llama else 4) * width),
            "down": weight((3 if is_llama else 4) * width, width),
        }
        for _ in range(layers)
    ]
    params = {"words": weight(words, width), "blocks": blocks}
    tokens = jnp.asarray(random.integers(0, words, (batch, length + 1)))
    key = jax.random.key(0)

    def norm(x: Any) -> Any:
        wide = x.astype(jnp.float32)
        wide = wide if is_llama else wide - wide.mean(-1, keepdims=True)
        return (wide * lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-5)).astype(x.dtype)

    def drop(x: Any, key: Any) -> Any:
        return x if is_llama else jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0).astype(x.dtype)

    def block(x: Any, p: Any, key: Any) -> Any:
        q, k, v = jnp.split(norm(x) @ p["qkv"], (width, width + groups * head), -1)
        parts = (part.reshape(*part.shape[:2], -1, head) for part in (q, k, v))
        mixed = jax.nn.dot_product_attention(*parts, is_causal=True)
        first, second = jax.random.split(key)
        x = x + drop(mixed.reshape(x.shape) @ p["out"], first)
        wide = norm(x) @ p["up"]
        if is_llama:
            gate, up = jnp.split(wide, 2, -1)
            wide = jax.nn.silu(gate) * up
        else:
            wide = jax.nn.gelu(wide)
        return x + drop(wide @ p["down"], second)

    call = wrap(block)

    def loss(params: Any, tokens: Any, key: Any) -> Any:
        x = params["words"][tokens[:, :-1]]
        for number, p in enumerate(params["blocks"]):
            x = call(x, p, jax.random.fold_in(key, number))
        logits = (norm(x) @ params["words"].T).astype(jnp.float32)
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1))

    return loss, (params, tokens, key)


def resnet(dtype: Any, small: bool, wrap: Wrap) -> tuple[Any, tuple[Any, ...]]:
    """ResNet-50 with batch statistics, which are computed and not kept."""
    depths, width, batch, edge = ((1, 1), 8, 4, 32) if small else ((3, 4, 6, 3), 64, 64, 224)
    random = np.random.default_rng(0)

    def kernel(size: int, inputs: int, outputs: int) -> Any:
        scale = (2 / (size * size * inputs)) ** 0.5
        return jnp.asarray(random.normal(size=(size, size, inputs, outputs)) * scale, dtype)

    blocks, strides, inputs = [], [], width
    for stage, depth in enumerate(depths):
        inner = width << stage
        for number in range(depth):
            p = {"a": kernel(1, inputs, inner), "b": kernel(3, inner, inner), "c": kernel(1, inner, 4 * inner)}
            stride = 2 if stage and not number else 1
            if stride > 1 or inputs != 4 * inner:
                p["shortcut"] = kernel(1, inputs, 4 * inner)
            blocks.append(p)
            strides.append(stride)
            inputs = 4 * inner
    params = {"stem": kernel(7, 3, width), "blocks": blocks, "head": kernel(1, inputs, 10)[0, 0]}
    images = jnp.asarray(random.normal(size=(batch, edge, edge, 3)), dtype)
    labels = jnp.asarray(random.integers(0, 10, batch))

    def convolved(x: Any, weights: Any, stride: int = 1) -> Any:
        return lax.conv_general_dilated(
            x, weights, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def normal(x: Any) -> Any:
        wide = x.astype(jnp.float32)
        mean, variance = wide.mean((0, 1, 2)), wide.var((0, 1, 2))
        return ((wide - mean) * lax.rsqrt(variance + 1e-5)).astype(x.dtype)

    def block(x: Any, p: Any, stride: int) -> Any:
        hidden = jax.nn.relu(normal(convolved(x, p["a"])))
        hidden = jax.nn.relu(normal(convolved(hidden, p["b"], stride)))
        shortcut = normal(convolved(x, p["shortcut"], stride)) if "shortcut" in p else x
        return jax.nn.relu(normal(convolved(hidden, p["c"])) + shortcut)

    calls = {stride: wrap(partial(block, stride=stride)) for stride in set(strides)}

    def loss(params: Any, images: Any, labels: Any) -> Any:
        x = jax.nn.relu(normal(convolved(images, params["stem"], 2)))
        x = lax.reduce_window(x, -np.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        for p, stride in zip(params["blocks"], strides, strict=True):
            x = calls[stride](x, p)
        logits = (x.mean((1, 2)) @ params["head"]).astype(jnp.float32)
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], -1))

    return loss, (params, images, labels)
