"""Measures a chain under ``recompute`` in a process of its own, and prints what happened as JSON.

python recompute_worker.py eager|graph|v1|split|segments plain|recompute
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

from remat.tensorflow import recompute
from remat.tensorflow.device import current_device


def gradient_of_chain(x: tf.Tensor, segment: Any, segments: int) -> tf.Tensor:
    def loss() -> tf.Tensor:
        h = x
        for _ in range(segments):
            h = segment(h)
        return tf.reduce_sum(h * h)

    with tf.GradientTape() as tape:
        tape.watch(x)
        value = loss()
    return tape.gradient(value, x)


def main(mode: str, kind: str) -> dict[str, Any]:
    elements, segments, length = (100_000, 200, 200) if mode == "segments" else (250_000, 10, 10)

    def segment(x: tf.Tensor) -> tf.Tensor:
        for _ in range(length):
            x = tf.tanh(x)
        return x

    used = recompute(segment) if kind == "recompute" else segment
    if mode == "split":  # Each segment in a function of its own, the tape outside.
        used = tf.function(used, autograph=False)
    x = tf.constant(np.random.default_rng(0).normal(size=elements).astype("float32"))
    device = current_device()

    def step() -> Any:
        return gradient_of_chain(x, used, segments)

    if mode == "graph":
        step = tf.function(step, autograph=False)
    if mode != "segments":
        step()
    in_use_bytes = device.in_use_bytes
    device.reset_peak()
    gradient = step().numpy()
    return {
        "peak_bytes": device.peak_bytes,
        "in_use_before_bytes": in_use_bytes,
        "tensor_bytes": 4 * elements,
        "sum": float(np.abs(gradient).sum()),
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2])))
