"""The largest batch that trains within a budget, with and without recomputation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from remat.core.errors import InfeasibleBudget, UnsupportedStep
from remat.core.graph import Graph
from remat.core.schedule import Schedule
from remat.core.simulator import simulate
from remat.planning.find import find

_MOST_CORRECTIONS: Final = 8
"""Replays at a smaller batch, where sizes are not quite affine in it; a judgement. Too few, and 0 comes out wrongly."""

_GROWTH: Final = (2.0, 1.4, 1.1)
"""By how much the next batch that is tried exceeds the last that worked: far first, since each try traces and plans.
Judgements; a larger batch than was found may work, by less than the last factor."""


@dataclass(frozen=True)
class LargestBatch:
    """The largest batch for one way of running a step.

    Attributes:
        batch_size: samples; 0 where not even one fits.
        peak_bytes: predicted peak at that batch; at one sample, where none fits.
        overhead: extra time as a fraction of the plain step at the same batch.
    """

    batch_size: int
    peak_bytes: int
    overhead: float


@dataclass(frozen=True)
class LargestBatches:
    """Both ways under one budget."""

    budget_bytes: int
    plain: LargestBatch
    planned: LargestBatch


def largest_batches(
    trace: Callable[[int], Graph],
    budget_bytes: int,
    *,
    batch_size: int = 32,
    smallest: int = 1,
    planner: str = "auto",
    time_limit_s: float | None = None,
) -> LargestBatches:
    """Find the largest batch whose training step fits a budget, plain and planned.

    The step is traced at two batch sizes. Sizes of tensors are affine in the batch, so the bytes of every moment of a
    schedule are, too, and the largest batch of a schedule follows without a search. For the planned step this is
    repeated with the schedules that the planner finds at larger and larger batches, until it finds none. The result is
    traced and replayed, so it works; for the planned step it is not proven to be the largest.

    Args:
        trace: the training step at a batch size.
        budget_bytes: what the peak has to stay within.
        batch_size: where to begin, ``smallest`` or more.
        smallest: the smallest batch to consider; frameworks run other operations on a single sample than on several.
        planner: name of the planner.
        time_limit_s: wall seconds for each run of the planner.

    Raises:
        UnsupportedStep: where the step's operations depend on the batch size, or its memory does not grow with it.
    """
    graphs = trace(batch_size), trace(2 * batch_size)
    _check_same_structure(*graphs, batch_size)
    known = dict(zip((batch_size, 2 * batch_size), graphs, strict=True))

    def traced(samples: int) -> Graph:
        if samples not in known:
            known[samples] = trace(samples)
        return known[samples]

    plain = planned = _largest(traced, graphs, graphs[0].plain_schedule, batch_size, smallest, budget_bytes)
    for growth in _GROWTH:
        while schedule := _within(
            traced(max(smallest, int(planned.batch_size * growth))), budget_bytes, planner, time_limit_s
        ):
            found = _largest(traced, graphs, schedule, batch_size, smallest, budget_bytes)
            if found.batch_size <= planned.batch_size:
                break
            planned = found
    return LargestBatches(budget_bytes, plain, planned)


def _within(graph: Graph, budget_bytes: int, planner: str, time_limit_s: float | None) -> Schedule | None:
    try:
        return find(graph, budget_bytes, planner, time_limit_s).schedule
    except InfeasibleBudget:
        return None


def _check_same_structure(small: Graph, large: Graph, batch_size: int) -> None:
    same = len(small.ops) == len(large.ops) and all(
        (a.kind, a.inputs, a.outputs) == (b.kind, b.inputs, b.outputs)
        for a, b in zip(small.ops, large.ops, strict=True)
    )
    if not same:
        raise UnsupportedStep(
            f"the step has other operations at batch size {batch_size} ({len(small.ops)} ops) than at {2 * batch_size} "
            f"({len(large.ops)}), so its largest batch cannot be told; plan it at the batch sizes of interest"
        )


def _largest(
    traced: Callable[[int], Graph],
    graphs: Sequence[Graph],
    schedule: Schedule,
    batch_size: int,
    smallest: int,
    budget_bytes: int,
) -> LargestBatch:
    small, large = (np.array(simulate(graph, schedule).bytes, dtype=np.float64) for graph in graphs)
    slope = (large - small) / batch_size
    grows = slope > 0
    if not grows.any():
        raise UnsupportedStep(
            f"the step needs as much memory at batch size {2 * batch_size} as at {batch_size}; does the callable use "
            "its batch_size?"
        )
    samples = int(batch_size + np.floor(np.min((budget_bytes - small[grows]) / slope[grows])))
    if small[~grows].max(initial=0) > budget_bytes:
        samples = 0
    for _ in range(_MOST_CORRECTIONS):
        if samples < smallest:
            break
        peak_bytes = simulate(traced(samples), schedule).peak_bytes
        if peak_bytes <= budget_bytes:
            return LargestBatch(samples, peak_bytes, _overhead(traced(samples), schedule))
        samples -= max(1, samples * (peak_bytes - budget_bytes) // peak_bytes)
    return LargestBatch(0, simulate(traced(smallest), schedule).peak_bytes, _overhead(graphs[0], schedule))


def _overhead(graph: Graph, schedule: Schedule) -> float:
    return simulate(graph, schedule).time_s / graph.time_s - 1 if graph.time_s > 0 else 0.0
