"""What ``remat doctor`` asks Paddle: its devices, their counters, and whether oneDNN is on."""

from __future__ import annotations

import paddle

from remat.paddle import _private
from remat.running.examination import DeviceFacts, Probe
from remat.running.machine import memory_bytes

_ASKED_ELEMENTS = 1 << 18  # Any size does that nothing else is likely to have.


def probe() -> Probe:
    """The devices of this process."""
    devices = [DeviceFacts("cpu", "", memory_bytes(), _counter_of_cpu())]
    for number in range(paddle.device.cuda.device_count()):
        properties = paddle.device.cuda.get_device_properties(number)
        counter = "paddle.device.cuda.max_memory_allocated"
        devices.append(DeviceFacts(f"gpu:{number}", properties.name, properties.total_memory, counter))
    return Probe(tuple(devices), onednn=_private.uses_onednn())


def _counter_of_cpu() -> str:
    before = _private.allocated_bytes()
    held = paddle.zeros([_ASKED_ELEMENTS], dtype="float32")
    counted = _private.allocated_bytes() - before
    del held
    return "paddle's host memory statistics" if counted >= 4 * _ASKED_ELEMENTS else ""
