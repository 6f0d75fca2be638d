"""The smallest peak that one extra forward pass can buy, by cutting the forward part at its narrowest places."""

from __future__ import annotations

import time

from remat.graph import Graph
from remat.plan import Plan, plan_for_schedule
from remat.planners.problem import Problem
from remat.planners.rematerialize import TooManyRuns, rematerialize
from remat.planners.sqrt_n import numbers_of_segments, segment_drops
from remat.simulator import simulate


def plan_with_cuts(graph: Graph) -> Plan:
    """The plan of smallest peak among cuts into many or few segments, of equal or of shrinking size.

    Cuts lie where least crosses them: at articulation points where the network has such, and where it has none, what
    crosses is kept. On a chain of N equal ops the peak is about sqrt(2 N) for one extra forward pass.

    Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost" (arXiv:1604.06174); the shrinking
    segments follow from counting what is alive when a segment is recomputed. Complexity: O(steps) for each of O(log N)
    numbers of segments.
    """
    started = time.perf_counter()
    problem = Problem.of(graph)
    best = graph.plain_schedule
    least_bytes = simulate(graph, best).peak_bytes
    for segments in numbers_of_segments(problem):
        for shrinking in (False, True):
            try:
                schedule = rematerialize(problem, segment_drops(problem, segments, shrinking=shrinking))
            except TooManyRuns:
                continue
            peak_bytes = simulate(graph, schedule).peak_bytes
            if peak_bytes < least_bytes:
                best, least_bytes = schedule, peak_bytes
    return plan_for_schedule(graph, best, planner="cuts", started=started)
