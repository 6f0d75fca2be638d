"""Fences: places in a program where a step waits until what it no longer reads is freed.

On a CPU Paddle's executor hands a tensor that nothing reads any more to a thread that frees it. Where operators are
short or cores are few this thread falls behind, by many operators at times: steps of a small Transformer took up to
30 % more than was planned. So a planned program has an operator that calls a function of ours wherever a late release
would break the plan's peak. It reads Paddle's counter, and goes on as soon as the counter has fallen to what the plan
says. On a GPU the executor frees at once, and there are no fences.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Collection, Sequence
from typing import Any, Final

import numpy as np

from remat.core.simulator import StorageLifetimes, bytes_alive
from remat.paddle import _private
from remat.paddle.trace.program import TracedProgram

_log = logging.getLogger("remat")

_SLACK: Final = 0.005
"""The share of the peak that may still wait to be freed: the allocator rounds small tensors up. Much less, and a fence
waits for what never comes; more, and it takes from the reserve of ``ProgramCandidate``."""
_LONGEST_WAIT_S: Final = 0.05
"""Other processes may hold a core for some milliseconds. A fence that waited so long was told something wrong, or
another thread of the program allocates."""
_MISSES: Final = 8  # In a row; a judgement. Then the fences of this half of the program wait no more.
_YIELDS: Final = 20  # About 10 us, in which the thread that frees is mostly done; after that the step sleeps.
_NAP_S: Final = 20e-6

_numbers = itertools.count()


class Fences:
    """The fences of a program in its new order.

    Args:
        traced: the program.
        order: its ops as they will run, recomputations included.
        starts: the positions at which a half of the program starts; the first is 0.
        closed: the positions before which no fence may stand.

    Attributes:
        before: the positions before which a fence stands, those of ``starts`` included.
    """

    def __init__(
        self, traced: TracedProgram, order: Sequence[int], starts: Collection[int], closed: Collection[int]
    ) -> None:
        alive = traced.alive_bytes(order)
        between, freed = _between_ops(traced.lifetimes(order), len(order))
        for position in sorted(closed, reverse=True):
            alive[position - 1] = max(alive[position - 1], alive[position])
        limit_bytes = int(alive.max(initial=0))
        needed = _needed(alive, freed, limit_bytes, starts, closed)
        self.before: dict[int, _private.PythonOp] = {}
        ends = [*sorted(starts)[1:], len(order)]
        for start, end in zip(sorted(starts), ends, strict=True):
            inside = [position for position in needed if start < position < end]
            if inside:
                half = _Half([int(between[p] - between[start]) for p in inside], int(_SLACK * limit_bytes))
                number = next(_numbers)
                self.before[start] = _private.PythonOp(f"remat_start_{number}", half.start)
                wait = _private.PythonOp(f"remat_wait_{number}", half.wait)
                self.before.update(dict.fromkeys(inside, wait))


def _between_ops(lives: StorageLifetimes, count: int) -> tuple[Any, Any]:
    """The bytes alive just before each position, pinned ones left out, and those that each position frees."""
    # A storage is there from the position behind its birth up to its last use.
    gone = np.where(lives.kept, count, lives.last + 1)
    between = bytes_alive(np.minimum(lives.birth + 1, count), gone, lives.size_bytes, count)
    freed = np.zeros(count, dtype=np.int64)
    is_freed = ~lives.kept
    is_freed[lives.taken_over[lives.taken_over >= 0]] = False
    np.add.at(freed, lives.last[is_freed], lives.size_bytes[is_freed])
    return between, freed


def _needed(alive: Any, freed: Any, limit_bytes: int, starts: Collection[int], closed: Collection[int]) -> list[int]:
    """The positions before which everything must be freed that was not read any more since the fence before."""
    found: list[int] = []
    late_bytes = 0
    for position, (bytes_here, freed_here) in enumerate(zip(alive.tolist(), freed.tolist(), strict=True)):
        if position in starts:
            late_bytes = 0
        if late_bytes and position not in closed and bytes_here + late_bytes > limit_bytes:
            found.append(position)
            late_bytes = 0
        late_bytes += freed_here
    return found


class _Half:
    """What the fences of one half of a program do, which pass one after the other.

    Args:
        expected: for each fence, the bytes that are alive there beyond those at the start.
        slack_bytes: how many more may be alive.
    """

    def __init__(self, expected: Sequence[int], slack_bytes: int) -> None:
        self._expected = list(expected)
        self._slack_bytes = slack_bytes
        self._passed = 0
        self._misses = 0
        self._at_start = 0
        self._usual: int | None = None
        self._other_starts = 0

    def start(self) -> None:
        """Note what is allocated before the first operator, when what went before is freed."""
        self._passed = 0
        self._at_start = settled_bytes()
        if self._usual is not None and self._other_starts < _MISSES:
            usual = self._usual + self._slack_bytes
            if self._at_start > usual and not _wait_for(usual):
                self._other_starts += 1  # More is held than before an earlier step.
            self._at_start = _private.allocated_bytes()
        self._usual = self._at_start

    def wait(self) -> None:
        """Let the step go on when nothing waits to be freed."""
        place = self._passed % len(self._expected)
        self._passed += 1
        if self._misses >= _MISSES:
            return
        expected = self._expected[place]
        if _wait_for(self._at_start + expected + self._slack_bytes):
            self._misses = 0
            return
        self._misses += 1
        # More is held than the program itself holds: by whoever started it, say. The fences behind expect it.
        more = _private.allocated_bytes() - self._at_start - expected
        self._expected[place:] = [bytes_ + more for bytes_ in self._expected[place:]]
        if self._misses == _MISSES:
            _log.info(
                "%d bytes more than expected are allocated; from here on the step does not wait for Paddle to free",
                more,
            )


def _wait_for(bytes_: int) -> bool:
    """Wait until no more than so many bytes are allocated; False where that takes too long."""
    for _ in range(_YIELDS):
        if _private.allocated_bytes() <= bytes_:
            return True
        _let_others_run()
    until = time.monotonic() + _LONGEST_WAIT_S
    while time.monotonic() < until:
        if _private.allocated_bytes() <= bytes_:
            return True
        time.sleep(_NAP_S)
    return False


def settled_bytes() -> int:
    """The allocated bytes, when the release of what went before is over."""
    found = _private.allocated_bytes()
    for _ in range(_YIELDS):
        _let_others_run()
        found = min(found, _private.allocated_bytes())
    return found


def _let_others_run() -> None:
    if hasattr(os, "sched_yield"):
        os.sched_yield()
    else:
        time.sleep(0)
