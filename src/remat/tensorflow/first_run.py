"""The first run of a planned function, held against its budget by the device's own counter."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from remat.core.plan import Plan
from remat.fit.first_step import broken_budget, exceeds, tell
from remat.tensorflow import _private
from remat.tensorflow.peak.device import Device, current_device


def watch_first_run(graph: _private.FuncGraph, plan: Plan, *, strict: bool = False) -> None:
    """Note what the first call of a function takes, and say so if that is more than its budget.

    Only a call from Python counts. Where another function calls this one, the peak is that of both. Where the device
    has no counter, nothing is measured.

    Args:
        graph: the function, whose trace is about to end.
        plan: that was written into it.
        strict: raise an error from that call, in place of a warning.
    """
    device = current_device()
    if device.has_counter:
        _private.around_first_call(graph, lambda: _measured(device, plan, strict=strict))


@contextlib.contextmanager
def _measured(device: Device, plan: Plan, *, strict: bool) -> Iterator[None]:
    _ = device.in_use_bytes  # Collects garbage, as it did when the step was planned.
    device.reset_peak()
    yield
    tf.test.experimental.sync_devices()
    measured_bytes = device.peak_bytes
    plan.set_measured_peak(measured_bytes)
    if exceeds(plan, measured_bytes):
        tell(broken_budget(plan, measured_bytes, None, compared=False), strict=strict)
