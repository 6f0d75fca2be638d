"""Which gaps to drop, chosen greedily: at each peak the gap that costs least time per byte to compute again."""

from __future__ import annotations

import time
from bisect import bisect_left

import numpy as np

from remat.planners.view.problem import BoolArray, FloatArray, IntArray, Problem


def greedy_drops(problem: Problem, budget_bytes: int, deadline_s: float | None = None) -> BoolArray:
    """The gaps to drop so that the stored bytes fit; what recomputation itself needs is not counted.

    At ``deadline_s``, in ``time.monotonic()``, the gaps chosen so far come back.
    """
    drop = problem.no_drops()
    if not problem.count:
        return drop
    load = np.array(problem.plain.bytes, dtype=np.int64)
    start, end, size = problem.gap_start, problem.gap_end, problem.gap_size
    open_ = problem.may_drop & (size > 0)
    cost = np.array([problem.op_time_s[problem.made_by[int(s)]] for s in problem.gap_storage], dtype=np.float64)
    settled = np.zeros(problem.count, dtype=np.bool_)
    while True:
        peak = int(np.argmax(np.where(settled, -1, load)))
        expired = deadline_s is not None and time.monotonic() > deadline_s
        if settled[peak] or load[peak] <= budget_bytes or expired:
            return drop
        candidates = np.flatnonzero(open_ & (start < peak) & (end > peak))
        if not len(candidates):
            settled[peak] = True
            continue
        gap = cheapest_gap(problem, drop, candidates, cost)
        open_[gap] = False
        drop[gap] = True
        load[start[gap] + 1 : end[gap]] -= size[gap]


def cheapest_gap(problem: Problem, drop: BoolArray, candidates: IntArray, cost: FloatArray) -> int:
    """The candidate with the least time per byte; ``cost`` is brought up to date for those that come first."""
    score = cost[candidates] / problem.gap_size[candidates]
    for _ in range(len(candidates)):
        best = int(np.argmin(score))
        gap = int(candidates[best])
        exact = _time_to_remake(problem, drop, gap)
        if exact <= cost[gap] * (1 + 1e-9):
            break
        cost[gap] = exact
        score[best] = exact / problem.gap_size[gap]
    return int(candidates[int(np.argmin(score))])


def _time_to_remake(problem: Problem, drop: BoolArray, gap: int) -> float:
    """Seconds to recompute a gap's storage at its end, with the ancestors that are missing there."""
    when = int(problem.gap_end[gap])
    pending = [problem.made_by[int(problem.gap_storage[gap])]]
    seen = set(pending)
    total, limit = 0.0, problem.graph.time_s
    while pending and total < limit:
        op = pending.pop()
        total += problem.op_time_s[op]
        for s in problem.storages_read[op]:
            maker = problem.made_by[s]
            if maker in seen or problem.small[s] or not problem.droppable[s]:
                continue
            last_use = bisect_left(problem.uses[s], when) - 1
            if drop[problem.first_gap[s] + last_use]:
                seen.add(maker)
                pending.append(maker)
    return total
