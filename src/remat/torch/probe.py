"""What ``remat doctor`` asks PyTorch: its devices, their counters, and whether oneDNN is on."""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile

from remat.running.examination import DeviceFacts, Probe
from remat.running.machine import memory_bytes
from remat.torch import _private

_ASKED_BYTES = 1 << 20  # Any size does that nothing else is likely to have.


def probe() -> Probe:
    """The devices of this process."""
    devices = [DeviceFacts("cpu", "", memory_bytes(), "torch.profiler" if _profiler_counts() else "")]
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        devices.append(
            DeviceFacts(
                f"cuda:{number}",
                properties.name,
                properties.total_memory,
                _counter_of_gpu(torch.device("cuda", number)),
            )
        )
    return Probe(tuple(devices), onednn=torch.backends.mkldnn.is_available())


def _profiler_counts() -> bool:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        torch.empty(_ASKED_BYTES, dtype=torch.uint8)
    return _ASKED_BYTES in [size for _, size in _private.memory_events(profiled)]


def _counter_of_gpu(device: torch.device) -> str:
    before = torch.cuda.memory_allocated(device)
    held = torch.empty(_ASKED_BYTES, dtype=torch.uint8, device=device)
    counted = torch.cuda.memory_allocated(device) - before
    del held
    return "torch.cuda.max_memory_allocated" if counted == _ASKED_BYTES else ""
