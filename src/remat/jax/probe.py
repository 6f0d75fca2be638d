"""What ``remat doctor`` asks JAX: its devices, and whether compiled programs say how much memory they need."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from remat.core.errors import UnsupportedStep
from remat.jax.peak import peak_of
from remat.running.examination import DeviceFacts, Probe
from remat.running.machine import memory_bytes


def probe() -> Probe:
    """The devices of this process."""
    devices = jax.devices()
    if devices[0].platform != "cpu":
        devices = [*jax.devices("cpu"), *devices]
    return Probe(tuple(_facts(device) for device in devices))


def _facts(device: Any) -> DeviceFacts:
    statistics = device.memory_stats() or {}
    size = memory_bytes() if device.platform == "cpu" else statistics.get("bytes_limit")
    kind = str(device.device_kind)
    name = f"{device.platform}:{device.id}"
    return DeviceFacts(name, "" if kind == device.platform else kind, size, _counter(device))


def _counter(device: Any) -> str:
    # One kilobyte in, one out: a platform that says less does not tell.
    with jax.default_device(device):
        compiled = jax.jit(jnp.sin).lower(jnp.ones(256)).compile()
    try:
        return "memory_analysis" if peak_of(compiled.memory_analysis()) >= 2048 else ""
    except UnsupportedStep:
        return ""
