"""What users would write around the blocks of a step: a cut between any two, or ``jax.checkpoint`` around each."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence

from remat.core.graph import Graph
from remat.core.plan import Plan, plan_for_schedule
from remat.planners.chain.programme import BlockChain
from remat.planners.replay.improve import without_idle_runs
from remat.planners.replay.residents import TooManyRuns
from remat.planners.view.board import Condensed
from remat.planners.view.problem import Problem
from remat.planning.checkpoints import plan_with_checkpoints


def plans_of_blocks(graph: Graph, problem: Problem) -> Iterator[Plan]:
    """A cut between any two blocks of a step, and ``jax.checkpoint`` around each, but none that another one beats."""
    plans = _plans_of_blocks(graph, problem)
    for plan in plans:
        if not any(_is_beaten(plan, other) for other in plans if other is not plan):
            yield plan


def _plans_of_blocks(graph: Graph, problem: Problem) -> list[Plan]:
    condensed = Condensed.of(problem)
    inner = condensed.problem
    blocks = BlockChain.of(inner).blocks
    if not blocks:
        return []
    # As under jax.checkpoint around each block: all that a block reads again is made at once, and held until then. This
    # holds for the small values that the condensed step leaves out, too: 2 kB in each block of a Mamba.
    ends = [0, *(condensed.ops[block.forward[-1]] + 1 for block in blocks)]
    regions = [
        (condensed.ops[block.backward[0]], range(start, stop))
        for block, (start, stop) in zip(blocks, itertools.pairwise(ends), strict=True)
        if block.backward
    ]
    schedule = without_idle_runs(problem, with_regions(graph, regions))
    plans = [plan_for_schedule(graph, schedule, planner="blocks")]
    # What lies between two blocks may read so far back that this cut is no use.
    with contextlib.suppress(TooManyRuns):
        cut = plan_with_checkpoints(inner.graph, {storage for block in blocks for storage in block.checkpoint})
        plans.append(plan_for_schedule(graph, condensed.expand(cut.schedule), planner=cut.planner))
    return plans


def _is_beaten(plan: Plan, other: Plan) -> bool:
    """Does another plan take fewer bytes, or as many, in less time?"""
    return other.peak_bytes <= plan.peak_bytes and other.time_s < plan.time_s


def with_regions(graph: Graph, regions: Sequence[tuple[int, Sequence[int]]]) -> list[int]:
    """The schedule in which each region computes again what it does not keep, right before its backward part."""
    before: dict[int, list[int]] = {}
    for at, again in regions:
        before.setdefault(at, []).extend(number for number in again if graph.ops[number].recomputable)
    return [number for op in range(len(graph.ops)) for number in (*before.get(op, ()), op)]
