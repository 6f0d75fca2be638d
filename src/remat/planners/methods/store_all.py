"""Store everything: the plain schedule, the baseline of every comparison."""

from __future__ import annotations

from remat.core.graph import Graph
from remat.planners.registry import register


@register("store_all")
def store_all(graph: Graph, budget_bytes: int, *, time_limit_s: float | None = None) -> tuple[int, ...]:
    """Every op once, in program order, whatever the budget. Optimal wherever it fits; O(ops)."""
    return graph.plain_schedule
