"""One core for a process of which processor time is compared, whatever threads its framework starts."""

from __future__ import annotations

import os


def stay_on_one_core() -> None:
    """Keep this process, and those that it starts, on the last core that it may use; taskset chooses another.

    A setting of a framework's threads does not do that. XLA on a CPU has products made by a library that uses all
    cores, whatever ``--xla_cpu_multi_thread_eigen`` says, and whose threads wait for one another in a loop: a decoder's
    step took 283 ms of one core, and 380 to 480 of two. Call it before the framework starts its threads. Does nothing
    where the system knows no such thing.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
