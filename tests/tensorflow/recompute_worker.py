"""Answers what steps need under ``recompute``, in a process of its own."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

from remat.tensorflow import recompute
from remat.tensorflow.peak.device import current_device
from worker_process import serve

# The allocator of the CPU keeps regions of whole MiB: tensors of 1 MiB fill them and leave no scraps to count.
CHAIN_ELEMENTS = 1 << 18
BATCH, WIDTH, HIDDEN = 2048, 256, 1024

Block = Callable[[tf.Tensor], tf.Tensor]
Wrap = Callable[[Block], Block]
WRAPS: dict[str, Wrap] = {
    "plain": lambda block: block,
    "recompute": recompute,
    "recompute_grad": tf.recompute_grad,
}


def tanhs(length: int) -> Block:
    def segment(x: tf.Tensor) -> tf.Tensor:
        for _ in range(length):
            x = tf.tanh(x)
        return x

    return segment


def residual_block(random: np.random.Generator) -> tuple[Block, list[tf.Variable]]:
    """LayerNorm, dense with gelu, dense."""
    scale, offset = tf.Variable(tf.ones([WIDTH])), tf.Variable(tf.zeros([WIDTH]))
    wide, narrow = (
        tf.Variable(random.normal(size=shape).astype("float32") * shape[0] ** -0.5)
        for shape in ((WIDTH, HIDDEN), (HIDDEN, WIDTH))
    )

    def block(x: tf.Tensor) -> tf.Tensor:
        mean, variance = tf.nn.moments(x, [-1], keepdims=True)
        h = (x - mean) * tf.math.rsqrt(variance + 1e-5) * scale + offset
        return x + tf.nn.gelu(h @ wide) @ narrow

    return block, [scale, offset, wide, narrow]


def in_a_row(blocks: Sequence[Block]) -> Block:
    def row(x: tf.Tensor) -> tf.Tensor:
        for block in blocks:
            x = block(x)
        return x

    return row


def network(name: str, wrap: Wrap) -> tuple[list[Block], list[tf.Variable], np.ndarray[Any, Any]]:
    """The blocks as the step calls them, their variables and a batch."""
    random = np.random.default_rng(0)
    if name in ("blocks", "model"):
        made = [residual_block(random) for _ in range(12)]
        variables = [variable for _, own in made for variable in own]
        blocks = [block for block, _ in made]
        whole = functools.partial(recompute, in_segments=True) if wrap is recompute else wrap
        used = [whole(in_a_row(blocks))] if name == "model" else [wrap(block) for block in blocks]
        return used, variables, random.normal(size=(BATCH, WIDTH))
    batch = random.normal(size=100_000 if name == "segments" else CHAIN_ELEMENTS)
    if name == "segments":
        return [wrap(tanhs(200))] * 200, [], batch
    if name == "one_call":
        return [recompute(tanhs(100), in_segments=True)], [], batch
    if name == "nested_chain":
        return [wrap(in_a_row([wrap(tanhs(5))] * 4))] * 5, [], batch
    return [wrap(tanhs(10))] * 10, [], batch


def in_a_session(used: list[Block], batch: np.ndarray[Any, Any]) -> Callable[[], list[tf.Tensor]]:
    with tf.Graph().as_default():
        h = x = tf.compat.v1.placeholder(tf.float32, batch.shape)
        for block in used:
            h = block(h)
        gradients = tf.gradients(tf.reduce_sum(h * h), x)
        session = tf.compat.v1.Session()
    return lambda: [tf.convert_to_tensor(g) for g in session.run(gradients, {x: batch})]


def measured(name: str, mode: str, kind: str) -> dict[str, Any]:
    """The peak of one step beside what was in use before, and the sums of its gradients.

    Args:
        name: chain, one_call, nested_chain, segments, blocks or model.
        mode: eager, graph, xla, split or session.
        kind: plain, recompute or recompute_grad.
    """
    used, variables, batch = network(name, WRAPS[kind])
    if mode == "split":  # Each block in a function of its own, the tape outside.
        used = [tf.function(block, autograph=False) for block in used]
    x = tf.Variable(batch.astype("float32"))

    def step() -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            h = x.read_value()
            for block in used:
                h = block(h)
            loss = tf.reduce_sum(h * h)
            del h
        gradients: list[tf.Tensor] = tape.gradient(loss, [x, *variables])
        return gradients

    if mode in ("graph", "xla"):
        step = tf.function(step, jit_compile=mode == "xla", autograph=False)
    if mode == "session":
        step = in_a_session(used, batch.astype("float32"))
    device = current_device()
    if name != "segments":
        step()
    in_use_bytes = device.in_use_bytes
    device.reset_peak()
    gradients = step()
    return {
        "peak_bytes": device.peak_bytes - in_use_bytes,
        "tensor_bytes": 4 * batch.size,
        "sums": [float(np.abs(gradient.numpy()).sum(dtype="float64")) for gradient in gradients],
    }


if __name__ == "__main__":
    serve({"measured": measured})
