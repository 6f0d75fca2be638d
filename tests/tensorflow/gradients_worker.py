"""Answers what networks need under several ways to take their gradients.

A process of its own, because the device's counter of memory sees everything that the process ever holds.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

import remat.tensorflow
from remat.tensorflow.peak.device import current_device
from worker_process import serve

# The allocator of the CPU keeps regions of whole MiB: tensors of 1 MiB fill them and leave no scraps to count.
ELEMENTS = 1 << 18
DEPTH = 100
LEVELS = 20


def chain(x: tf.Tensor) -> tf.Tensor:
    for number in range(DEPTH):
        x = tf.tanh(x)
        if number % 10 == 9:
            tf.compat.v1.add_to_collection("checkpoints", x)
    return x


def residual_chain(x: tf.Tensor) -> tf.Tensor:
    for _ in range(DEPTH):
        x = x + tf.tanh(x)
    return x


def u_net(x: tf.Tensor) -> tf.Tensor:
    """Two activations on each level of each side, as in the original."""
    skips = []
    for _ in range(LEVELS):
        x = tf.tanh(tf.tanh(x))
        skips.append(x)
    for skip in reversed(skips):
        x = tf.tanh(tf.tanh(x + skip))
    return x


def thin_u_net(x: tf.Tensor) -> tf.Tensor:
    """One activation on each level of each side: half of all is what the skip connections hold."""
    skips = []
    for _ in range(LEVELS):
        x = tf.tanh(x)
        skips.append(x)
    for skip in reversed(skips):
        x = tf.tanh(x + skip)
    return x


def dense_net(x: tf.Tensor) -> tf.Tensor:
    """Each layer reads all before it and has three activations, as batch norm, ReLU and convolution are."""
    before = [x]
    for _ in range(LEVELS):
        before.append(tf.tanh(tf.tanh(tf.tanh(tf.add_n(before)))))
    return before[-1]


def two_towers(x: tf.Tensor) -> tf.Tensor:
    left, right = x, tf.sin(x)
    for _ in range(DEPTH // 2):
        left, right = tf.tanh(left), tf.sin(right)
    return left * right


def two_devices(x: tf.Tensor) -> tf.Tensor:
    """A chain that changes devices every ten operations."""
    for number in range(DEPTH):
        with tf.device(f"/CPU:{number // 10 % 2}"):
            x = tf.tanh(x)
    return x


NETWORKS: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
    f.__name__: f for f in (chain, residual_chain, u_net, thin_u_net, dense_net, two_towers, two_devices)
}


Way = dict[str, Any] | None


def gradients(way: Way, y: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    return tf.gradients(y, x)[0] if way is None else remat.tensorflow.gradients(y, x, **way)[0]


def in_a_function(network: str, way: Way, values: np.ndarray[Any, Any]) -> tuple[Callable[[], Any], float, tf.Graph]:
    x = tf.constant(values)

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        y = NETWORKS[network](x)
        return gradients(way, y, x)

    started = time.perf_counter()
    graph = step.get_concrete_function(x).graph
    return lambda: step(x).numpy(), time.perf_counter() - started, graph


def in_a_session(network: str, way: Way, values: np.ndarray[Any, Any]) -> tuple[Callable[[], Any], float, tf.Graph]:
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [ELEMENTS])
        started = time.perf_counter()
        gradient = gradients(way, NETWORKS[network](x), x)
        built_s = time.perf_counter() - started
        session = tf.compat.v1.Session()
    return lambda: session.run(gradient, {x: values}), built_s, graph


def copies_by_device(graph: tf.Graph) -> dict[str, int]:
    return dict(Counter(op.device[-5:] for op in graph.get_operations() if "/recomputed_" in op.name))


def measured(network: str, kind: str, ways: dict[str, Way]) -> dict[str, dict[str, Any]]:
    """What one network came to, by the name of the way.

    Args:
        network: a name in ``NETWORKS``.
        kind: "function" or "session".
        ways: arguments of ``remat.tensorflow.gradients`` by a name of one's own, None for TensorFlow's own function.
            The first says what the others are compared with.
    """
    device = current_device()
    values = np.random.default_rng(0).normal(size=ELEMENTS).astype("float32")
    plain = None
    found = {}
    for name, way in ways.items():
        run, built_s, graph = (in_a_function if kind == "function" else in_a_session)(network, way, values)
        run()
        in_use_bytes = device.in_use_bytes
        device.reset_peak()
        gradient = run().copy()
        peak_bytes = device.peak_bytes
        plain = gradient if plain is None else plain
        plan = remat.tensorflow.last_plan()
        found[name] = {
            "peak_bytes": peak_bytes,
            "in_use_before_bytes": in_use_bytes,
            "built_s": built_s,
            "difference": float(np.max(np.abs(gradient - plain)) / np.max(np.abs(plain))),
            "recomputed": plan.recomputed if plan else 0,
            "budget_bytes": plan.budget_bytes if plan else 0,
            "overhead": plan.overhead if plan else 0.0,
            "copies_by_device": copies_by_device(graph),
        }
        del run
    return found


def measured_on_two_devices(network: str, kind: str, ways: dict[str, Way]) -> dict[str, dict[str, Any]]:
    """The same where TensorFlow has two devices, which has to be settled before it does anything."""
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    return measured(network, kind, ways)


if __name__ == "__main__":
    serve({"measured": measured, "measured_on_two_devices": measured_on_two_devices})
