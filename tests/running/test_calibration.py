"""What a calibration makes of a device whose launches take longer than small operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from remat.running import calibration
from remat.running.calibration import op_samples
from remat.running.cost_model import calibrate

FLOPS_PER_S = {"float32": 45e12, "bfloat16": 750e12}
BYTES_PER_S = 4.2e12
LAUNCH_S = {"product": 12e-6, "addition": 7e-6}


class Simulated:
    """A GPU like an H200, in round figures: operations take as long as their launch, or as their work."""

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu

    def dtypes(self) -> Sequence[str]:
        return tuple(FLOPS_PER_S)

    def on_gpu(self) -> bool:
        return self._on_gpu

    def product(self, edge: int, dtype: str) -> Callable[[], Any]:
        moved = 3 * (4 if dtype == "float32" else 2) * edge**2
        return self._of(max(LAUNCH_S["product"], 2 * edge**3 / FLOPS_PER_S[dtype], moved / BYTES_PER_S))

    def addition(self, elements: int) -> Callable[[], Any]:
        return self._of(max(LAUNCH_S["addition"], 12 * elements / BYTES_PER_S))

    def chain(self, edge: int, length: int) -> Callable[[], Any]:
        return self._of(length * LAUNCH_S["product"])

    def _of(self, time_s: float) -> Callable[[], Any]:
        return lambda: time_s

    def wait(self, result: Any) -> None:
        pass


@pytest.fixture(autouse=True)
def simulated_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_least_time_s", lambda run, wait: run())


def test_a_gpu_is_timed_on_operations_that_outlast_their_launch() -> None:
    found = calibrate(op_samples(Simulated(on_gpu=True)))
    assert found.bytes_per_s == pytest.approx(BYTES_PER_S, rel=0.15)
    assert found.flops_per_s["float32"] == pytest.approx(FLOPS_PER_S["float32"], rel=0.15)
    assert found.flops_per_s["bfloat16"] == pytest.approx(FLOPS_PER_S["bfloat16"], rel=0.15)
    assert found.overhead_s == pytest.approx(LAUNCH_S["product"])


def test_with_the_sizes_for_a_cpu_it_would_not_be() -> None:
    found = calibrate(op_samples(Simulated(on_gpu=False)))
    assert found.bytes_per_s != pytest.approx(BYTES_PER_S, rel=0.15)
