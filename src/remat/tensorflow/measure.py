"""Real peak bytes and seconds of a step."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from remat.running import resident_set
from remat.running.measurement import Measurement, check_repeats, median_time_s
from remat.tensorflow.peak.device import Device, current_device
from remat.tensorflow.trace.sizes import HANDLES, shape_bytes


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
    device = _with_a_peak(current_device())
    device.reset_peak()  # Where nothing can be measured this says so, before anything has run.
    _finish(fn(*args, **kwargs))
    device.reset_peak()
    time_s = median_time_s(lambda _: _finish(fn(*args, **kwargs)), repeats, lambda: None)
    return Measurement(device.peak_bytes, time_s, resident_set.NAME if isinstance(device, _Process) else "")


def _with_a_peak(device: Device) -> Device | _Process:
    """The device, or on a CPU without a counter the process, where its peak can be told."""
    if device.has_counter or device.is_gpu or not resident_set.can_be_measured():
        return device
    return _Process()


class _Process:
    """Stands in for a device without a counter: what the process holds beyond what it held when the peak was started.

    What Python held then, its tensors and variables, is added: a device's counter has it in its peak, too.
    """

    def __init__(self) -> None:
        self._set_bytes = self._held_bytes = 0

    def reset_peak(self) -> None:
        self._set_bytes = resident_set.start_new_peak()
        self._held_bytes = _held_bytes()

    @property
    def peak_bytes(self) -> int:
        return self._held_bytes + max(0, resident_set.peak_bytes() - self._set_bytes)


def _held_bytes() -> int:
    """Bytes of the tensors and variables that Python holds. Two names for one buffer count twice."""
    held = 0
    for one in gc.get_objects():
        if isinstance(one, (tf.Variable, tf.Tensor)) and hasattr(one, "numpy") and one.dtype not in HANDLES:
            held += shape_bytes(one.shape, one.dtype)
    return held


def _finish(result: Any) -> None:
    """Wait until the device has computed the result."""
    for tensor in tf.nest.flatten(result, expand_composites=True):
        if isinstance(tensor, tf.Tensor) and tensor.dtype not in HANDLES:
            tensor.numpy()
            return
