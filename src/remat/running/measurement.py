"""What ``measure`` returns in every front end, and how it times a step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Measurement:
    """What a step really needed.

    Attributes:
        peak_bytes: the largest number of bytes in use, by the framework's own counter. TensorFlow counts everything on
            the device, PyTorch what the step reads or allocates (on a GPU, everything in the process), and JAX the
            program that the compiler made: its arguments, its results and all between them.
        time_s: median wall seconds of a step.
        counter: what showed the peak, where it was no counter of the framework; empty where it was.
    """

    peak_bytes: int
    time_s: float
    counter: str = ""


def check_repeats(repeats: int) -> None:
    """Refuse a number of measured runs that measures nothing, before anything is run.

    Raises:
        ValueError: for fewer than one run.
    """
    if repeats < 1:
        raise ValueError(f"repeats={repeats} measures nothing; give 1 or more")


def median_time_s(run: Callable[[T], None], repeats: int, prepare: Callable[[], T]) -> float:
    """The median wall seconds of a step.

    Args:
        run: runs the step once, with what ``prepare`` returned; it comes back when the device has finished.
        repeats: timed runs, 1 or more. The caller has warmed the step up.
        prepare: called before each run, outside the timed part: it copies arguments, or waits for the device.
    """
    check_repeats(repeats)
    times_s = []
    for _ in range(repeats):
        prepared = prepare()
        started = time.perf_counter()
        run(prepared)
        times_s.append(time.perf_counter() - started)
    return statistics.median_high(times_s)
