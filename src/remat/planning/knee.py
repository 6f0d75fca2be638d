"""The plan at the knee of the frontier: where saving more memory begins to cost much more time."""

from __future__ import annotations

from typing import Any

from remat.core.errors import InfeasibleBudget
from remat.core.graph import Graph
from remat.core.plan import Plan
from remat.planning.find import find
from remat.planning.prove import prove

_SHARES = (0.85, 0.7, 0.55, 0.4, 0.3, 0.2, 0.12)


def knee_plan(graph: Graph, planner: str = "auto", time_limit_s: float | None = None, **options: Any) -> Plan:
    """The plan that is farthest below the straight line from the plain step to the smallest peak.

    Args:
        graph: the training step.
        planner: the name of the planner that finds each point of the frontier.
        time_limit_s: wall seconds for one point.
        options: passed on to the planner.

    Returns:
        One of about seven plans at evenly falling shares of the plain peak, the plain step and the smallest peak among
        them. Peak and overhead are scaled to [0, 1] first; the method is that of Satopaa et al. 2011, "Finding a
        Kneedle in a Haystack" (doi:10.1109/ICDCSW.2011.20).
    """

    def at(budget: int) -> Plan:
        return find(graph, budget, planner=planner, time_limit_s=time_limit_s, **options)

    plain = at(max(1, graph_peak_bytes(graph)))
    points = [plain]
    for share in _SHARES:
        try:
            points.append(at(max(1, int(plain.peak_bytes * share))))
        except InfeasibleBudget as error:
            points.append(at(error.minimum_bytes))
            break
    points.sort(key=lambda point: -point.peak_bytes)
    last = points[-1]
    saved = max(1, plain.peak_bytes - last.peak_bytes)
    most = max(point.overhead for point in points) or 1.0

    def below_the_line(point: Plan) -> float:
        return (plain.peak_bytes - point.peak_bytes) / saved - point.overhead / most

    return prove(max(points, key=below_the_line), graph, time_limit_s)


def graph_peak_bytes(graph: Graph) -> int:
    """The predicted peak of the plain step."""
    from remat.core.simulator import simulate

    return simulate(graph, graph.plain_schedule).peak_bytes
