"""Every schedule of a tiny graph with few recomputations, by plain enumeration."""

from __future__ import annotations

from collections.abc import Iterator

from remat import Graph, InvalidSchedule, simulate, validate


def program_order_schedules(graph: Graph, extra_runs: int) -> Iterator[tuple[int, ...]]:
    """All schedules with first runs in program order and up to ``extra_runs`` recomputations."""

    def extend(prefix: tuple[int, ...], next_op: int, left: int) -> Iterator[tuple[int, ...]]:
        if next_op == len(graph.ops):
            yield prefix
        else:
            yield from extend((*prefix, next_op), next_op + 1, left)
        if left:
            for op in range(next_op):
                if graph.ops[op].recomputable:
                    yield from extend((*prefix, op), next_op, left - 1)

    yield from extend((), 0, extra_runs)


def least_time_s(graph: Graph, budget_bytes: int, extra_runs: int) -> float | None:
    """Seconds of the cheapest of those schedules that fits the budget; None where none fits."""
    best: float | None = None
    for schedule in program_order_schedules(graph, extra_runs):
        try:
            peak_bytes = validate(graph, schedule)
        except InvalidSchedule:
            continue
        if peak_bytes <= budget_bytes:
            time_s = simulate(graph, schedule).time_s
            best = time_s if best is None else min(best, time_s)
    return best
