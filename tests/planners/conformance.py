"""What every planner must do, as one function, so that a broken planner can be shown to fail it."""

from __future__ import annotations

from remat import Graph, simulate, validate
from remat.planners import Planner


def check_planner(planner: Planner, graph: Graph, budget_bytes: int) -> tuple[int, ...]:
    """Assert the contract of a planner for one graph and budget; return its schedule."""
    schedule = planner(graph, budget_bytes)
    assert isinstance(schedule, tuple)
    peak_bytes = validate(graph, schedule)
    assert peak_bytes == simulate(graph, schedule).peak_bytes
    repeated = {op for op in schedule if schedule.count(op) > 1}
    assert all(graph.ops[op].recomputable for op in repeated)
    plain = simulate(graph, graph.plain_schedule)
    if budget_bytes >= plain.peak_bytes:
        assert simulate(graph, schedule).time_s == plain.time_s
        assert peak_bytes <= budget_bytes
    if peak_bytes > budget_bytes:
        again = planner(graph, peak_bytes)
        assert validate(graph, again) <= peak_bytes, "the smallest peak is not reached when asked for"
    return schedule
