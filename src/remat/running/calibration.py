"""Times operations for the cost model, whatever the framework; ``remat measure`` makes a device profile of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from remat.running.cost_model import OpSample

# All of these are judgements. Together they keep a calibration to a few seconds on two cores.
_LEAST_TIME_S: Final = (
    0.02  # An operation is repeated until it takes this long, so that reading the clock does not count.
)
_ROUNDS: Final = 5  # Of which the quickest counts.

MATRICES: Final = (256, 512, 1024, 2048)
"""Edges of the square matrices that are multiplied on a CPU. Below 256 launches weigh more than arithmetic."""

VECTORS: Final = (2**20, 2**22, 2**24)
"""Elements of the vectors that are added on a CPU: 4 to 64 MiB each, more than the caches of most machines hold."""

WIDER_ON_GPU: Final = (4, 8)
"""How many times longer edges and vectors are on a GPU. With a CPU's sizes all but the largest are over before the next
launch: an H200 came out at .55 TB/s, a ninth of its data sheet's, and no time for a launch. The largest vectors have
512 MiB."""

TINY: Final = 8
"""Edge of matrices whose product takes no time beside its launch."""

CHAIN: Final = 64
"""How many of those products run in a row, so that what is timed is the launch and not the call from Python."""


class TimedOps(Protocol):
    """The operations of one framework that are timed.

    Each method makes an operation: a function without arguments that starts it and returns its result, for which
    ``wait`` then waits.
    """

    def dtypes(self) -> Sequence[str]:
        """The types of numbers that models compute with on this device: "float32", "bfloat16"."""

    def on_gpu(self) -> bool:
        """Is the device a GPU?"""

    def product(self, edge: int, dtype: str) -> Callable[[], Any]:
        """A product of two square matrices."""

    def addition(self, elements: int) -> Callable[[], Any]:
        """A sum of two float32 vectors."""

    def chain(self, edge: int, length: int) -> Callable[[], Any]:
        """``length`` products of square matrices, each with the result of the one before, in one compiled step."""

    def wait(self, result: Any) -> None:
        """Wait until the device has computed a result."""


@dataclass(frozen=True)
class _Operation:
    """An operation to time, and what one of its ``times`` repetitions computes and moves."""

    run: Callable[[], Any]
    flops: float
    bytes_moved: float
    dtype: str
    times: int = 1


def op_samples(ops: TimedOps, on_sample: Callable[[int, int], None] | None = None) -> list[OpSample]:
    """Time products, additions and launches; takes a few seconds.

    Args:
        ops: of the framework.
        on_sample: called after each operation with the number timed so far and the number of all.
    """
    todo = []
    wider, longer = WIDER_ON_GPU if ops.on_gpu() else (1, 1)
    for dtype in ops.dtypes():
        size = 8 if dtype == "float64" else 4 if dtype == "float32" else 2
        for edge in (wider * edge for edge in MATRICES):
            todo.append(_Operation(ops.product(edge, dtype), 2.0 * edge**3, 3.0 * size * edge**2, dtype))
    for elements in (longer * elements for elements in VECTORS):
        todo.append(_Operation(ops.addition(elements), float(elements), 12.0 * elements, "float32"))
    chain = _Operation(ops.chain(TINY, CHAIN), 2.0 * TINY**3, 12.0 * TINY**2, "float32", CHAIN)
    found = []
    for number, one in enumerate([*todo, chain]):
        time_s = _least_time_s(one.run, ops.wait) / one.times
        found.append(OpSample(one.flops, one.bytes_moved, one.dtype, time_s))
        if on_sample is not None:
            on_sample(number + 1, len(todo) + 1)
    return found


def cached_bytes_per_s(samples: Sequence[OpSample], cache_bytes: int) -> float | None:
    """Bandwidth of those additions whose vectors fit into a cache together; None where none do.

    Args:
        samples: of ``op_samples``.
        cache_bytes: what the last-level cache holds, half of which counts: a framework needs some of it, too.
    """
    fitting = [one for one in samples if one.flops < one.bytes_moved <= cache_bytes / 2 and one.bytes_moved >= 2**20]
    return max((one.bytes_moved / one.time_s for one in fitting), default=None)


def _least_time_s(run: Callable[[], Any], wait: Callable[[Any], None]) -> float:
    """The least seconds of a run over some rounds. Whatever disturbs a run makes it longer, never shorter."""
    wait(run())  # The first run may compile.
    repeats = 1
    while (spent_s := _time_of_s(run, wait, repeats)) < _LEAST_TIME_S:
        repeats *= 2
    return min(spent_s, *(_time_of_s(run, wait, repeats) for _ in range(_ROUNDS - 1))) / repeats


def _time_of_s(run: Callable[[], Any], wait: Callable[[Any], None], repeats: int) -> float:
    """Wall seconds of some runs, one after the other."""
    started = time.perf_counter()
    for _ in range(repeats):
        result = run()
    wait(result)
    return time.perf_counter() - started
