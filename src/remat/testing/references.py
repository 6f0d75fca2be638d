"""The best that any planner can do: on graphs of up to nine ops, and on uniform chains."""

from __future__ import annotations

import math
from functools import cache
from heapq import heappop, heappush

from remat.core.graph import Graph
from remat.core.schedule import Schedule


def exhaustive(graph: Graph, budget_bytes: int) -> Schedule | None:
    """The cheapest of all legal schedules within a budget, by search over every state of memory; None if none fits.

    Order moves are among them where the graph leaves the order free. Dijkstra over pairs of what has run and what is
    in memory: 2^(ops + tensors) states at worst.

    Raises:
        ValueError: for more than nine ops, views, or in-place pairs.
    """
    if len(graph.ops) > 9:
        raise ValueError(f"the graph has {len(graph.ops)} ops; an exhaustive search ends in time for 9 at most")
    if any(t.alias_of is not None for t in graph.tensors) or any(op.in_place for op in graph.ops):
        raise ValueError("the graph has views or in-place pairs, which the exhaustive search does not know")
    pinned = set(graph.inputs)
    reads = [frozenset(t for t in op.inputs if t not in pinned) for op in graph.ops]
    wanted = frozenset(t for t in graph.outputs if t not in pinned)
    everything = frozenset(range(len(graph.ops)))
    start: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset())
    cost = {start: 0.0}
    came: dict[object, tuple[object, int]] = {}
    queue: list[tuple[float, int, tuple[frozenset[int], frozenset[int]]]] = [(0.0, 0, start)]
    count = 0
    while queue:
        time_s, _, state = heappop(queue)
        if time_s > cost[state]:
            continue
        ran, live = state
        if ran == everything and wanted <= live:
            return _path(came, state)
        following: list[tuple[float, tuple[frozenset[int], frozenset[int]], int]] = [
            (time_s, (ran, live - {t}), -1) for t in live
        ]
        for index, op in enumerate(graph.ops):
            first = index not in ran
            legal = not reads[index] - live and (
                (ran.issuperset(op.after) and (graph.free_order or index == len(ran))) if first else op.recomputable
            )
            after = live | frozenset(op.outputs)
            size_bytes = sum(graph.tensors[t].size_bytes for t in after) + graph.pinned_bytes + op.workspace_bytes
            if legal and size_bytes <= budget_bytes:
                following.append((time_s + op.time_s, (ran | {index}, after), index))
        for total_s, state_after, index in following:
            if total_s < cost.get(state_after, math.inf):
                cost[state_after] = total_s
                came[state_after] = (state, index)
                count += 1
                heappush(queue, (total_s, count, state_after))
    return None


def _path(came: dict[object, tuple[object, int]], state: object) -> Schedule:
    runs = []
    while state in came:
        state, op = came[state]
        if op >= 0:
            runs.append(op)
    return tuple(reversed(runs))


def revolve(n: int, slots: int) -> Schedule:
    """The schedule for ``chain(n)`` that keeps at most so many activations beside the batch, with fewest forward runs.

    Griewank and Walther 2000, "Algorithm 799: revolve" (doi:10.1145/347837.347846). Optimal; the number of forward
    runs is ``revolve_runs(n, slots)``.
    """
    fewest = _fewest_forward_runs
    result: list[int] = []

    def backward(layer: int) -> None:
        if layer == n:
            result.append(n - 1)
        result.append(2 * n - layer)

    def reverse(low: int, high: int, left: int) -> None:
        if high - low == 1:
            backward(high)
        elif left == 0:
            for layer in range(high, low, -1):
                result.extend(range(low, layer - 1))
                backward(layer)
        else:
            length = high - low
            ahead = min(range(1, length), key=lambda m: m + fewest(length - m, left - 1) + fewest(m, left))
            result.extend(range(low, low + ahead))
            reverse(low + ahead, high, left - 1)
            reverse(low, low + ahead, left)

    if n:
        reverse(0, n, slots)
    return tuple(result)


def revolve_runs(n: int, slots: int) -> int:
    """The fewest forward runs that reverse a chain of ``n`` steps: the closed form of Griewank and Walther.

    ``r n - C(s + r, s + 1)`` with s = slots + 1 (the batch is one) and the least r for which C(s + r, s) >= n; and one
    for the last layer, whose activation stands for the loss.
    """
    if n == 0:
        return 0
    s = slots + 1
    r = next(r for r in range(n + 1) if math.comb(s + r, s) >= n)
    return r * n - math.comb(s + r, s + 1) + 1


@cache
def _fewest_forward_runs(length: int, slots: int) -> int:
    if length == 1:
        return 0
    if slots == 0:
        return length * (length - 1) // 2
    return min(
        m + _fewest_forward_runs(length - m, slots - 1) + _fewest_forward_runs(m, slots) for m in range(1, length)
    )
