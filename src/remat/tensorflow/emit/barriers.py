"""Where a schedule needs its order, and where any order will do.

Operations that wait for one another leave cores idle: two small ones side by side finish sooner than one after the
other, each cut into pieces for all cores. Only where memory is short does an order matter. So a schedule is cut into
spans: between two barriers operations run as soon as their inputs are there, and even if all of them run at once, and
nothing is freed before the last has ended, they hold less than the schedule's own peak.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from remat.core.graph import Graph
from remat.core.simulator import simulate, storage_lifetimes

# An allocator loses another share of its blocks in every order; a span of several operations leaves it this much.
_RESERVE = 0.05


def span_starts(graph: Graph, schedule: Sequence[int]) -> list[int]:
    """The positions of a schedule behind which everything waits for all that stands before them.

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
    limit = (1 - _RESERVE) * simulate(graph, schedule).peak_bytes - graph.pinned_bytes
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
