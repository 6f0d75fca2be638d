"""The smallest peak that one extra forward pass can buy, by cutting the forward part at its narrowest places."""

from __future__ import annotations

import itertools
import time
from typing import Final

from remat.core.graph import Graph
from remat.core.plan import Plan, plan_for_schedule
from remat.core.simulator import simulate
from remat.planners.methods.sqrt_n import numbers_of_segments, segment_drops
from remat.planners.replay.rematerialize import rematerialize
from remat.planners.replay.residents import TooManyRuns
from remat.planners.view.problem import Problem

# One extra forward pass, and what skip connections need a second time.
_MOST_RUNS_PER_OP: Final = 4
_LARGE: Final = 4000  # Ops from which only the numbers of segments near the square root are tried.
_WAYS: Final = tuple(itertools.product((False, True), (False, True)))


def plan_with_cuts(graph: Graph) -> Plan:
    """The plan of smallest peak among cuts into many or few segments, of equal or of shrinking size.

    Cuts lie where least crosses them: at articulation points where the network has such. Where it has none, what
    crosses is kept, or, if it is read only far behind the cut, recomputed there. On a chain of N equal ops the peak is
    about sqrt(2 N) for one extra forward pass.

    Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost" (arXiv:1604.06174); the shrinking
    segments follow from counting what is alive when a segment is recomputed. Complexity: O(steps) for each of O(log N)
    numbers of segments.
    """
    started = time.perf_counter()
    problem = Problem.of(graph)
    best = graph.plain_schedule
    least_bytes = simulate(graph, best).peak_bytes
    numbers = numbers_of_segments(problem)
    if problem.count > _LARGE:
        numbers = numbers[len(numbers) // 2 - 1 : len(numbers) // 2 + 3]
    ways = [(False, False), (True, False)] if problem.count > _LARGE else _WAYS
    for segments in numbers:
        for shrinking, skips in ways:
            drop = segment_drops(problem, segments, shrinking=shrinking, skips=skips)
            try:
                schedule = rematerialize(problem, drop, max_runs=_MOST_RUNS_PER_OP * problem.count)
            except TooManyRuns:
                continue
            peak_bytes = simulate(graph, schedule).peak_bytes
            if peak_bytes < least_bytes:
                best, least_bytes = schedule, peak_bytes
    return plan_for_schedule(graph, best, planner="cuts", started=started)
