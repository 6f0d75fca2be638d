"""Which operations of a planned step may run in any order.

A schedule is cut into spans: between two barriers operations run as soon as their inputs are there, and even if all of
them run at once, and nothing is freed before the last has ended, they hold less than the schedule's own peak. The sum
of the tensors is the same then. What the heap makes of their coming and going is not.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from remat.core.graph import Graph
from remat.core.simulator import simulate, storage_lifetimes

_SPARE: Final = 0.05
"""The share of the peak that a span of several operations leaves unused.

An allocator loses another part of its blocks in every order. A judgement, under which no step in
docs/tensorflow_peaks.md went above its budget; the order that is left costs 1 to 3 % of a step (docs/tensorflow.md).
Smaller, steps may go above their budget; larger, spans are shorter and cores wait.
"""

_MOST_LOST: Final = 0.3
_MOST_LOST_S: Final = 20e-6
"""What an operation that has none beside it loses at most: a share of its time, and seconds for each further thread.

Measured on two cores: six plans of the demo's networks, a GPT-2 and residual blocks, held one by one in turns with the
same plans in spans, took 11, 5, 3, 3, 0 and 0 % more of a plain step, and 11, 11, 4, 3, 9 and 1 by this
(docs/tensorflow.md). Too small, plans are held one by one for bytes that do not pay for it; too large, dearer plans are
taken in their place.
"""

_LONGER_ALONE: Final = 0.18
_MOST_LONGER_S: Final = 100e-6
"""How much longer an operation takes alone, cut into pieces for two cores, than beside another one of its size: a share
of its time, and seconds at most.

Measured on two cores: six plans of the demo, medians of five runs, were predicted 7 points too low in the mean without
this, and are at most 4 off with it; eight plans of six other models 4.1 off in the mean without a limit in seconds, 3.3
with it (docs/tensorflow.md). Too small, plans that hold an order seem cheaper than they are; too large, dearer. It
decides nothing: plans show it.
"""


def span_starts(graph: Graph, schedule: Sequence[int]) -> list[int]:
    """Where the spans of a schedule begin: whatever stands behind such a position waits for all that stands before it.

    Spans are as long as they can be, from the first operation on. Near the schedule's peak each operation is a span of
    its own, and the order is the schedule's.

    Args:
        graph: the step.
        schedule: op indices.

    Returns:
        Rising positions in the schedule, the first 0; empty for an empty schedule. In O(operations + storages).
    """
    if not len(schedule):
        return []
    held, made = _held_and_made(graph, schedule)
    limit = (1 - _SPARE) * simulate(graph, schedule).peak_bytes - graph.pinned_bytes
    starts = [0]
    in_span = 0
    for position in range(len(schedule)):
        in_span += made[position]
        if position > starts[-1] and held[starts[-1]] + in_span > limit:
            starts.append(position)
            in_span = made[position]
    return starts


def _held_and_made(graph: Graph, schedule: Sequence[int]) -> tuple[list[int], list[int]]:
    """For each position: bytes that live on from before it, and bytes that its operation makes or works with.

    What an operation may write in place is counted as new: in another order it may find its input still in use.
    """
    lives = storage_lifetimes(graph, schedule)
    change = np.zeros(len(schedule) + 1, dtype=np.int64)
    np.add.at(change, lives.birth + 1, lives.size_bytes)
    ends = ~lives.kept
    np.subtract.at(change, lives.last[ends] + 1, lives.size_bytes[ends])
    made = np.array([graph.ops[index].workspace_bytes for index in schedule], dtype=np.int64)
    np.add.at(made, lives.birth, lives.size_bytes)
    return np.cumsum(change)[:-1].tolist(), made.tolist()


def alone_time_s(graph: Graph, schedule: Sequence[int], starts: Sequence[int]) -> float:
    """Seconds that operations take longer since they have none beside them, though two may run at a time.

    Args:
        graph: the step.
        schedule: op indices.
        starts: where its spans begin.
    """
    return sum(
        alone_s / span_s * _capped_s(graph, ops, _LONGER_ALONE, _MOST_LONGER_S)
        for ops, span_s, alone_s in _times(graph, schedule, starts)
        if span_s
    )


def order_time_s(graph: Graph, schedule: Sequence[int], threads: int) -> float:
    """Seconds that a schedule takes longer one by one than in its spans.

    Args:
        graph: the step.
        schedule: op indices.
        threads: operations that run at a time, at most.
    """
    most_s = _MOST_LOST_S * (threads - 1)
    return sum(
        (1 - alone_s / span_s) * _capped_s(graph, ops, _MOST_LOST, most_s)
        for ops, span_s, alone_s in _times(graph, schedule, span_starts(graph, schedule))
        if alone_s < span_s
    )


def _capped_s(graph: Graph, ops: Sequence[int], share: float, most_s: float) -> float:
    """A share of the seconds of operations, of each at most so many."""
    return sum(min(share * graph.ops[index].time_s, most_s) for index in ops)


def _times(
    graph: Graph, schedule: Sequence[int], starts: Sequence[int]
) -> Iterator[tuple[Sequence[int], float, float]]:
    """Of each span its operations, the seconds of all of them, and those in which one has none beside it.

    The latter are what twice its longest chain of operations, each of which reads what another makes, exceeds all of
    them by.
    """
    for start, end in itertools.pairwise((*starts, len(schedule))):
        span_s = longest_s = 0.0
        done_s: dict[int, float] = {}  # tensor -> when its newest instance is there, at the earliest
        for index in schedule[start:end]:
            op = graph.ops[index]
            now_s = max((done_s[tensor] for tensor in op.inputs if tensor in done_s), default=0.0) + op.time_s
            done_s.update(dict.fromkeys(op.outputs, now_s))
            span_s += op.time_s
            longest_s = max(longest_s, now_s)
        yield schedule[start:end], span_s, max(0.0, 2 * longest_s - span_s)
