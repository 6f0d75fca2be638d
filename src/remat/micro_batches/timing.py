"""Seconds of a few computations, measured on a machine that may do other work, too."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Final

_ALONE: Final = 1.1
"""A run that took this many times as long by the wall as by the processor waited for a core. On an idle machine the two
agree, and several cores make the wall's time the shorter one; the tenth is for the clocks. At a load of 13 on two
cores the wall's seconds led to 8 and 12 micro-batches where 2 and 3 were cheapest."""

_REPEATS: Final = 5
"""Timed runs of each computation. A judgement: the least of five is seldom disturbed, and takes under a second."""


def least_times_s(
    runs: Mapping[int, Callable[[], None]], *, on_processor: bool, repeats: int = _REPEATS
) -> dict[int, float]:
    """The least seconds of each computation, by its key.

    They take turns, so that whatever else the machine does for a while disturbs all of them alike.

    Args:
        runs: what to run; each returns when its work is done. The first run of each warms up.
        on_processor: does the work run on this machine's processor? Then, where even the quickest runs of some
            computation waited for it, seconds are those of the processor.
        repeats: measured runs of each, 1 or more.
    """
    wall_s = dict.fromkeys(runs, math.inf)
    processor_s = dict.fromkeys(runs, math.inf)
    for turn in range(1 + repeats):
        for key, run in runs.items():
            wall, processor = time.perf_counter(), time.process_time()
            run()
            wall, processor = time.perf_counter() - wall, time.process_time() - processor
            if turn:
                wall_s[key] = min(wall_s[key], wall)
                processor_s[key] = min(processor_s[key], processor)
    has_waited = any(wall > _ALONE * processor_s[key] for key, wall in wall_s.items())
    return processor_s if on_processor and has_waited else wall_s
