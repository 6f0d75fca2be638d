"""Runs of a schedule as TensorFlow's executor may make them: several operations at a time, in an order of chance.

Between two barriers (``spans.py``) an operation begins as soon as what it reads is there and a thread is free. So
blocks come and go in another order at each step, and the heap loses another part of them.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from remat.core.graph import Graph

_CALL_S: Final = 5e-6
"""What an operation takes beside its work. A judgement: it keeps operations without work from ending at once."""

_SPREAD: Final = 0.3
"""Of the logarithm of what an operation takes. A judgement: enough to exchange operations of like size."""


@dataclass(frozen=True)
class Run:
    """One run of a schedule.

    Attributes:
        order: op indices, as the operations begin.
        events: what begins and ends, one after the other: a position in ``order`` where its operation begins, its
            complement (``~position``) where it ends.
    """

    order: Sequence[int]
    events: Sequence[int]


def one_by_one(schedule: Sequence[int]) -> Run:
    """The run in which each operation waits for the end of the one before it."""
    return Run(schedule, [event for position in range(len(schedule)) for event in (position, ~position)])


def side_by_side(graph: Graph, schedule: Sequence[int], starts: Sequence[int], threads: int, seed: int) -> Run:
    """A run on several threads, in which each operation finds what it found before.

    A thread goes on with what it has just made ready, and takes what waits elsewhere where it has nothing. How often
    the newest comes first is drawn once for each run.

    Args:
        graph: the step.
        schedule: op indices.
        starts: where its spans begin.
        threads: operations that run at a time, at most.
        seed: of the draws.
    """
    draw = random.Random(seed)
    newest_first = draw.random()
    order: list[int] = []
    events: list[int] = []
    now_s = 0.0
    for start, end in itertools.pairwise((*starts, len(schedule))):
        span = schedule[start:end]
        waits, behind = _waits(graph, span)
        ready = [position for position, count in enumerate(waits) if not count]
        running: list[tuple[float, int, int]] = []  # (end, position in the order, position in the span)
        while ready or running:
            while ready and len(running) < threads:
                own = ready.pop(-1 if draw.random() < newest_first else draw.randrange(len(ready)))
                takes_s = (graph.ops[span[own]].time_s + _CALL_S) * draw.lognormvariate(0.0, _SPREAD)
                heapq.heappush(running, (now_s + takes_s, len(order), own))
                events.append(len(order))
                order.append(span[own])
            now_s, position, own = heapq.heappop(running)
            events.append(~position)
            for other in behind[own]:
                waits[other] -= 1
                if not waits[other]:
                    ready.append(other)
    return Run(order, events)


def _waits(graph: Graph, span: Sequence[int]) -> tuple[list[int], list[list[int]]]:
    """For each position of a span: how many others of it have to end before, and which others wait for it.

    An operation waits for those that make what it reads, and for those that read what it makes anew.
    """
    waits = [0] * len(span)
    behind: list[list[int]] = [[] for _ in span]
    made: dict[int, int] = {}  # tensor -> the position of its newest instance
    read: dict[int, list[int]] = {}  # tensor -> the positions that read this instance
    ran: dict[int, int] = {}
    for position, index in enumerate(span):
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
    return waits, behind
