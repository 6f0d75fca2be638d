"""Measures one step under ``recompute`` in a process of its own, and prints what happened as JSON.

python recompute_worker.py chain|segments|blocks eager|graph|xla|split|session plain|recompute|recompute_grad
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

from remat.tensorflow import recompute
from remat.tensorflow.device import current_device

# The allocator of the CPU keeps regions of whole MiB: tensors of 1 MiB fill them and leave no scraps to count.
CHAIN_ELEMENTS = 1 << 18
BATCH, WIDTH, HIDDEN = 2048, 256, 1024

Block = Callable[[tf.Tensor], tf.Tensor]
WRAPS: dict[str, Callable[[Block], Block]] = {
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


def network(name: str) -> tuple[list[Block], list[tf.Variable], np.ndarray[Any, Any]]:
    """The blocks, their variables and a batch."""
    random = np.random.default_rng(0)
    if name == "blocks":
        made = [residual_block(random) for _ in range(12)]
        variables = [variable for _, own in made for variable in own]
        return [block for block, _ in made], variables, random.normal(size=(BATCH, WIDTH))
    count, length, elements = (10, 10, CHAIN_ELEMENTS) if name == "chain" else (200, 200, 100_000)
    return [tanhs(length)] * count, [], random.normal(size=elements)


def in_a_session(used: list[Block], batch: np.ndarray[Any, Any]) -> Callable[[], list[tf.Tensor]]:
    with tf.Graph().as_default():
        h = x = tf.compat.v1.placeholder(tf.float32, batch.shape)
        for block in used:
            h = block(h)
        gradients = tf.gradients(tf.reduce_sum(h * h), x)
        session = tf.compat.v1.Session()
    return lambda: [tf.convert_to_tensor(g) for g in session.run(gradients, {x: batch})]


def main(name: str, mode: str, kind: str) -> dict[str, Any]:
    blocks, variables, batch = network(name)
    used = [WRAPS[kind](block) for block in blocks]
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
    print(json.dumps(main(*sys.argv[1:])))
