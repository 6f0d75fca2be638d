"""Real peak bytes and seconds of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from remat.running import resident_set
from remat.running.measurement import Measurement, check_repeats, median_time_s
from remat.tensorflow.peak.device import current_device
from remat.tensorflow.trace.sizes import HANDLES


def measure(fn: Callable[..., Any], *args: Any, repeats: int = 3, **kwargs: Any) -> Measurement:
    """Run a step and read the device's own counter of memory.

    The counter is TensorFlow's. On a CPU it exists only while oneDNN is on (``TF_ENABLE_ONEDNN_OPTS=1``), and it leaves
    out blocks under 256 KiB. Where there is none, the peak set size of the process stands in (on Linux): what the
    process holds beyond what it held before the step, and the tensors and variables that Python holds. The kernels'
    scratch memory and the heap's holes are in it, which are megabytes whatever the size of a step.

    Args:
        fn: a ``tf.function`` (or any callable) that runs one step; it is called ``repeats + 1`` times, the first call
            to trace and warm up.
        *args: its arguments.
        repeats: measured calls, 1 or more.
        **kwargs: further arguments of ``fn``.

    Returns:
        Peak bytes and seconds; ``counter`` says where the peak set size stood in.

    Raises:
        ValueError: for fewer than one run.
        UnsupportedStep: where neither exists; nothing was run.
    """
    check_repeats(repeats)
    device = current_device()
    device.reset_peak()  # Where nothing can be measured this says so, before anything has run.
    _finish(fn(*args, **kwargs))
    device.reset_peak()
    time_s = median_time_s(lambda _: _finish(fn(*args, **kwargs)), repeats, lambda: None)
    return Measurement(device.peak_bytes, time_s, "" if device.has_counter else resident_set.NAME)


def _finish(result: Any) -> None:
    """Wait until the device has computed the result."""
    for tensor in tf.nest.flatten(result, expand_composites=True):
        if isinstance(tensor, tf.Tensor) and tensor.dtype not in HANDLES:
            tensor.numpy()
            return
