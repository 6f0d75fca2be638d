"""Runs of a schedule as TensorFlow's executor may make them: several operations at a time, in an order of chance.

Between two barriers (``spans.py``) an operation begins as soon as what it reads is there and a thread is free. So
blocks come and go in another order at each step, and the heap loses another part of them.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from remat.core.graph import Graph

_CALL_S: Final = 5e-6
"""What an operation takes beside its work. A judgement: it keeps operations without work from ending at once."""

_SPREAD: Final = 0.3
"""Of the logarithm of what an operation takes. A judgement: enough to exchange operations of like size."""

Run: TypeAlias = list[int]
"""One run of a schedule: what begins and ends, one after the other. A position of the schedule where the operation that
stands there begins, its complement (``~position``) where it ends."""


def one_by_one(schedule: Sequence[int]) -> Run:
    """The run in which each operation waits for the end of the one before it."""
    return [event for position in range(len(schedule)) for event in (position, ~position)]


def side_by_side(
    graph: Graph, schedule: Sequence[int], starts: Sequence[int], threads: int, seeds: Iterable[int]
) -> Iterator[Run]:
    """Runs on several threads, in which each operation finds what it found before.

    A thread goes on with what it has just made ready, and takes what waits elsewhere where it has nothing. How often
    the newest comes first is drawn once for each run.

    Args:
        graph: the step.
        schedule: op indices.
        starts: where its spans begin.
        threads: operations that run at a time, at most.
        seeds: of the draws, one for each run.
    """
    spans = [
        (start, _Span.of(graph, schedule[start:end])) for start, end in itertools.pairwise((*starts, len(schedule)))
    ]
    time_s = np.array([graph.ops[index].time_s for index in schedule]) + _CALL_S
    for seed in seeds:
        draw = random.Random(seed)
        newest_first = draw.random()
        takes_s = (time_s * np.random.default_rng(seed).lognormal(0.0, _SPREAD, len(schedule))).tolist()
        run: Run = []
        for start, span in spans:
            span.append_to(run, start, takes_s, threads, newest_first, draw)
        yield run


@dataclass(frozen=True)
class _Span:
    """Operations between two barriers; what has no name of its own is a position in it.

    Attributes:
        waits: how many others have to end before an operation begins.
        behind: the positions that wait for an operation.
    """

    waits: Sequence[int]
    behind: Sequence[Sequence[int]]

    @classmethod
    def of(cls, graph: Graph, ops: Sequence[int]) -> _Span:
        """An operation waits for those that make what it reads, and for those that read what it makes anew."""
        waits = [0] * len(ops)
        behind: list[list[int]] = [[] for _ in ops]
        made: dict[int, int] = {}  # tensor -> the position of its newest instance
        read: dict[int, list[int]] = {}  # tensor -> the positions that read this instance
        ran: dict[int, int] = {}
        for position, index in enumerate(ops):
            op = graph.ops[index]
            before = {made[tensor] for tensor in op.inputs if tensor in made}
            before |= {ran[other] for other in (*op.after, index) if other in ran}
            for tensor in op.outputs:
                before.update(read.pop(tensor, ()))
                made[tensor] = position
            for tensor in op.inputs:
                read.setdefault(tensor, []).append(position)
            ran[index] = position
            before.discard(position)
            waits[position] = len(before)
            for other in before:
                behind[other].append(position)
        return cls(waits, behind)

    def append_to(
        self, run: Run, start: int, takes_s: Sequence[float], threads: int, newest_first: float, draw: random.Random
    ) -> None:
        """Let all operations begin and end, after all of those in the run so far have ended.

        Args:
            run: so far.
            start: the position of the first operation in the schedule.
            takes_s: by position in the schedule.
            threads: operations that run at a time, at most.
            newest_first: how often a thread goes on with what it has just made ready.
            draw: what is left to chance.
        """
        if len(self.waits) == 1:
            run += (start, ~start)
            return
        waits = list(self.waits)
        ready = [position for position, count in enumerate(waits) if not count]
        running: list[tuple[float, int]] = []  # (end, position in the span)
        now_s = 0.0
        while ready or running:
            while ready and len(running) < threads:
                is_newest = len(ready) == 1 or draw.random() < newest_first
                own = ready.pop() if is_newest else ready.pop(draw.randrange(len(ready)))
                heapq.heappush(running, (now_s + takes_s[start + own], own))
                run.append(start + own)
            now_s, own = heapq.heappop(running)
            run.append(~(start + own))
            for other in self.behind[own]:
                waits[other] -= 1
                if not waits[other]:
                    ready.append(other)
