"""Real peak bytes and seconds of a step."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import paddle

from remat.paddle import _private
from remat.running.measurement import Measurement, check_repeats, median_time_s


def measure(fn: Callable[..., Any], *args: Any, repeats: int = 3, **kwargs: Any) -> Measurement:
    """Run a step and read Paddle's own counter of allocated memory.

    The counter sees everything that Paddle's allocator gives out in this process: parameters, optimizer state, the
    batch, gradients, what lies between, and the kernels' scratch. What libraries allocate by themselves is not seen. On
    a CPU another thread of Paddle's frees what is no longer read, and is late at times; the peak is therefore the
    smallest of the runs.

    Args:
        fn: one step: a function that returns a loss, whose gradients are then computed and thrown away, or one that
            does all of it, such as ``lambda: exe.run(main, feed=feed, fetch_list=[loss])``. It runs ``repeats + 1``
            times, the first time to warm up.
        *args: its arguments.
        repeats: measured runs, 1 or more.
        **kwargs: further arguments of ``fn``.

    Raises:
        ValueError: for fewer than one run.
    """
    check_repeats(repeats)
    _run(fn, args, kwargs)
    peaks: list[int] = []

    def start() -> None:
        gc.collect()  # What an earlier run left in circles is no part of this one.
        _private.wait()
        _private.reset_peak()

    def run(_: None) -> None:
        _run(fn, args, kwargs)
        peaks.append(_private.peak_bytes())

    time_s = median_time_s(run, repeats, start)
    return Measurement(min(peaks), time_s)


def _run(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """One step. Gradients that it made for a returned loss are taken away again."""
    result = fn(*args, **kwargs)
    if isinstance(result, paddle.Tensor) and result.size == 1 and not result.stop_gradient:
        with _private.gradients_put_aside():
            result.backward()
