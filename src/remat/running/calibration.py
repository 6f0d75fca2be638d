"""Times operations for the cost model: what to time, and how to time it, whatever the framework."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from remat.running.cost_model import OpSample

_LEAST_TIME_S: Final = 0.02
_ROUNDS: Final = 5
# Edges of square matrices, elements of vectors, and the length of a chain of tiny products, which shows launch times.
MATRICES: Final = (256, 512, 1024, 2048)
VECTORS: Final = (2**20, 2**22, 2**24)
TINY: Final = 8
CHAIN: Final = 64


class Kernels(Protocol):
    """The operations of one framework that are timed. Each returns a function that runs the op and does not wait."""

    def dtypes(self) -> Sequence[str]:
        """Dtypes of arithmetic that matter on this device."""

    def product(self, edge: int, dtype: str) -> Callable[[], Any]:
        """A product of two square matrices."""

    def addition(self, elements: int) -> Callable[[], Any]:
        """A sum of two float32 vectors."""

    def chain(self, edge: int, length: int) -> Callable[[], Any]:
        """As many products of small matrices, one after the other, in one compiled step."""

    def wait(self, result: Any) -> None:
        """Wait until the device has computed a result."""


@dataclass(frozen=True)
class _Timed:
    run: Callable[[], Any]
    flops: float
    bytes_moved: float
    dtype: str
    times: int = 1


def op_samples(kernels: Kernels, on_sample: Callable[[int, int], None] | None = None) -> list[OpSample]:
    """Time products, additions and launches; takes a few seconds.

    Args:
        kernels: of the framework.
        on_sample: called with how many were timed, and of how many.
    """
    todo = []
    for dtype in kernels.dtypes():
        size = 8 if dtype == "float64" else 4 if dtype == "float32" else 2
        for edge in MATRICES:
            todo.append(_Timed(kernels.product(edge, dtype), 2.0 * edge**3, 3.0 * size * edge**2, dtype))
    for elements in VECTORS:
        todo.append(_Timed(kernels.addition(elements), float(elements), 12.0 * elements, "float32"))
    chain = _Timed(kernels.chain(TINY, CHAIN), 2.0 * TINY**3, 12.0 * TINY**2, "float32", CHAIN)
    found = []
    for number, timed in enumerate([*todo, chain]):
        seconds = _seconds(timed.run, kernels.wait) / timed.times
        found.append(OpSample(timed.flops, timed.bytes_moved, timed.dtype, seconds))
        if on_sample is not None:
            on_sample(number + 1, len(todo) + 1)
    return found


def _seconds(run: Callable[[], Any], wait: Callable[[Any], None]) -> float:
    """The least seconds of a run over some rounds: what disturbs a run only makes it longer."""
    wait(run())
    repeats = 1
    while (spent := _timed(run, wait, repeats)) < _LEAST_TIME_S:
        repeats *= 2
    return min(spent, *(_timed(run, wait, repeats) for _ in range(_ROUNDS - 1))) / repeats


def _timed(run: Callable[[], Any], wait: Callable[[Any], None], repeats: int) -> float:
    started = time.perf_counter()
    for _ in range(repeats):
        result = run()
    wait(result)
    return time.perf_counter() - started
