"""A user's own checkpoints: keep the named tensors, recompute everything else of the forward part."""

from __future__ import annotations

import time
from collections.abc import Collection

from remat.core.graph import Graph
from remat.core.plan import Plan, plan_for_schedule
from remat.planners.replay.rematerialize import rematerialize
from remat.planners.view.problem import Problem


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
            # Kept for what is made from it again, even if the backward part itself never reads it.
            drop[problem.first_gap[storage] + len(uses) - 1] = False
            continue
        if uses[0] > turn:
            continue
        last = max(use for use in uses if use <= turn)
        gap = problem.first_gap[storage] + uses.index(last)
        drop[gap] |= problem.may_drop[gap]
    schedule = rematerialize(problem, drop)
    return plan_for_schedule(graph, schedule, planner="checkpoints", started=started)
