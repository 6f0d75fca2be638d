"""The first run of a planned function, held against its budget by the device's own counter."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import tensorflow as tf

from remat.core.plan import Plan
from remat.fit.first_step import broken_budget, exceeds, tell
from remat.tensorflow._private import FuncGraph
from remat.tensorflow._traces import around_first_call
from remat.tensorflow.peak.device import Device, current_device
from remat.tensorflow.replicas import Replica, measured_by_all, plans_of_replicas


def watch_first_run(graph: FuncGraph, plan: Plan, *, strict: bool = False, replica: Replica | None = None) -> None:
    """Note what the first call of a function takes, and say so if that is more than its budget.

    Only a call from Python counts. Where another function calls this one, the peak is that of both. Where the device
    has no counter, nothing is measured.

    Args:
        graph: the function, whose trace is about to end.
        plan: that was written into it.
        strict: raise an error from that call, in place of a warning.
        replica: whose plan it is; None where there is one device only.
    """
    device = current_device() if replica is None else replica.memory
    plans = [plan]
    if replica is not None and replica.has_others_in(graph):
        plans = plans_of_replicas.of(graph)
        if len(plans) < len(replica.local_devices):
            return  # The last one is waited for: one call runs the parts of all.
    if device.has_counter:
        around_first_call(graph, lambda: _measured(device, plans, replica, strict=strict))


@contextlib.contextmanager
def _measured(device: Device, plans: Sequence[Plan], replica: Replica | None, *, strict: bool) -> Iterator[None]:
    _ = device.in_use_bytes  # Collects garbage, as it did when the step was planned.
    device.reset_peak()
    yield
    _wait_for(replica)
    measured_bytes = device.peak_bytes
    for plan in plans:
        plan.set_measured_peak(measured_bytes)
    tightest = min(plans, key=lambda plan: plan.budget_bytes)
    # An error in one process alone would leave the others waiting for it in the next collective.
    most_bytes = measured_by_all(replica, measured_bytes)
    if exceeds(tightest, most_bytes):
        tell(broken_budget(tightest, most_bytes, None, compared=False), strict=strict)


def _wait_for(replica: Replica | None) -> None:
    """Wait for what runs on the devices of this process; those of others are no business of ours."""
    if replica is None:
        tf.test.experimental.sync_devices()
        return
    for device in replica.local_devices:
        with tf.device(device):
            tf.raw_ops.SyncDevice()
