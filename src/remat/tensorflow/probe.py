"""What ``remat doctor`` asks TensorFlow: its devices, their counters, and whether oneDNN is on."""

from __future__ import annotations

import tensorflow as tf

from remat.running.examination import DeviceFacts, Probe
from remat.running.machine import memory_bytes
from remat.tensorflow import _private
from remat.tensorflow.peak.device import Device


def probe() -> Probe:
    """The devices of this process."""
    devices = [_facts(kind, number) for kind in ("CPU", "GPU") for number in range(len(_logical_devices(kind)))]
    return Probe(tuple(devices), onednn=_private.uses_onednn())


def _logical_devices(kind: str) -> list[tf.config.LogicalDevice]:
    found: list[tf.config.LogicalDevice] = tf.config.list_logical_devices(kind)
    return found


def _facts(kind: str, number: int) -> DeviceFacts:
    device = Device(f"{kind}:{number}")
    description = ""
    if device.is_gpu:
        physical = tf.config.list_physical_devices(kind)[number]
        description = str(tf.config.experimental.get_device_details(physical).get("device_name", ""))
    size = _private.memory_limit_bytes(device.name) if device.is_gpu else memory_bytes()
    counter = "tf.config.experimental.get_memory_info" if device.has_counter else ""
    return DeviceFacts(device.name, description, size, counter)
