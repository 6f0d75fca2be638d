"""Plans for whoever names no budget: the user's own checkpoints, the smallest peak, or the best trade between the two.

They are what ``checkpoints=`` of the gradient-checkpointing library asks for: a collection of tensors, ``"memory"``,
and nothing at all.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection
from typing import Any, Final

from remat.core.errors import InfeasibleBudget
from remat.core.graph import Graph
from remat.core.plan import Plan, plan_for_schedule
from remat.core.simulator import simulate
from remat.planners.methods.sqrt_n import numbers_of_segments, segment_drops
from remat.planners.replay.rematerialize import rematerialize
from remat.planners.replay.residents import TooManyRuns
from remat.planners.view.problem import Problem
from remat.planning.find import find
from remat.planning.prove import prove

_MOST_RUNS_PER_OP: Final = 4
"""One extra forward pass, and room for what skip connections need a second time; a cut that takes more is no use."""

_LARGE: Final = 4000
"""Ops from which fewer cuts are tried: a judgement, so that a plan without a budget takes seconds."""

_SHARES: Final = (0.85, 0.7, 0.55, 0.4, 0.3, 0.2, 0.12)
"""Of the plain peak, the budgets among which the knee is looked for: a judgement. More points, a sharper knee."""


def plan_with_checkpoints(graph: Graph, kept: Collection[int], turning_point: int | None = None) -> Plan:
    """The plan that keeps the given tensors for the backward part and recomputes what else it reads.

    What may not run twice is kept too. A recomputation stands just before its first reader and is held until the
    last, so that one segment between two checkpoints is alive at a time.

    Args:
        graph: the training step.
        kept: ids of the tensors to keep; a view keeps its storage.
        turning_point: index of the last op of the forward part; None takes the op with the most idle bytes.

    Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost" (arXiv:1604.06174).
    """
    started = time.perf_counter()
    problem = Problem.of(graph)
    turn = problem.turning_point if turning_point is None else turning_point
    storages = {graph.roots[tensor] for tensor in kept}
    drop = problem.no_drops()
    for storage in problem.storages:
        uses = problem.uses[storage]
        if storage in storages:
            # Recomputations read it even where the backward part itself does not.
            drop[problem.first_gap[storage] + len(uses) - 1] = False
            continue
        if uses[0] > turn:
            continue
        last = max(use for use in uses if use <= turn)
        gap = problem.first_gap[storage] + uses.index(last)
        drop[gap] |= problem.may_drop[gap]
    schedule = rematerialize(problem, drop)
    return plan_for_schedule(graph, schedule, planner="checkpoints", started=started)


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
    ways = [(False, False), (True, False)] if problem.count > _LARGE else [*itertools.product((False, True), repeat=2)]
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

    plain = at(max(1, simulate(graph, graph.plain_schedule).peak_bytes))
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
