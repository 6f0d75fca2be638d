"""Real peak bytes and seconds of a step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from remat.tensorflow.peak.device import current_device


@dataclass(frozen=True)
class Measurement:
    """What a step really needed.

    Attributes:
        peak_bytes: largest number of bytes in use on the device, everything resident there counted.
        time_s: median wall seconds of a step.
    """

    peak_bytes: int
    time_s: float


def measure(fn: Callable[..., Any], *args: Any, repeats: int = 3, **kwargs: Any) -> Measurement:
    """Run a step and read the device's own counter of memory.

    Args:
        fn: a ``tf.function`` (or any callable) that runs one step; it is called ``repeats + 1`` times, the first call
            to trace and warm up.
        *args: its arguments.
        repeats: measured calls, 1 or more.
        **kwargs: further arguments of ``fn``.

    The counter is TensorFlow's allocator statistics. On a CPU they need oneDNN (the default) and leave out
    blocks under 256 KiB.
    """
    device = current_device()
    _finish(fn(*args, **kwargs))
    times = []
    peak = 0
    for _ in range(repeats):
        device.reset_peak()
        started = time.perf_counter()
        _finish(fn(*args, **kwargs))
        times.append(time.perf_counter() - started)
        peak = max(peak, device.peak_bytes)
    return Measurement(peak, sorted(times)[len(times) // 2])


def _finish(result: Any) -> None:
    """Wait until the device has computed the result."""
    for tensor in tf.nest.flatten(result, expand_composites=True):
        if isinstance(tensor, tf.Tensor) and tensor.dtype not in (tf.resource, tf.variant, tf.string):
            tensor.numpy()
            return
