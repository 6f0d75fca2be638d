"""Sublinear checkpointing: keep about sqrt(N) cuts of the forward part, recompute between them."""

from __future__ import annotations

import itertools
import math

import numpy as np

from remat.core.simulator import bytes_alive
from remat.planners.registry import strategy
from remat.planners.replay.rematerialize import rematerialize
from remat.planners.replay.residents import TooManyRuns
from remat.planners.search import Search
from remat.planners.view.problem import BoolArray, IntArray, Problem


@strategy("sqrt_n", has_fallbacks=True)
def sqrt_n(search: Search) -> None:
    """Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost" (arXiv:1604.06174).

    The forward part ends where the plain schedule holds most idle bytes (``Problem.turning_point``). It is split
    into k segments of about equal bytes; what is still needed later *in the forward part* at a cut is kept, and
    everything else is recomputed, one segment at a time, when the backward part first reads it. Cuts move to
    the narrowest place near their even position, which in a residual net is between two blocks. Every k
    around sqrt(N) on a doubling scale is tried; the cheapest that fits wins.

    On a chain of N equal ops: O(sqrt N) memory for one extra forward. No optimality elsewhere. Complexity:
    O(steps) for each of O(log N) numbers of segments.
    """
    for segments in numbers_of_segments(search.problem):
        try:
            schedule = rematerialize(search.problem, segment_drops(search.problem, segments))
        except TooManyRuns:
            continue
        search.fallbacks.append(schedule)
        search.offer(schedule)


def numbers_of_segments(problem: Problem) -> list[int]:
    """Numbers of segments worth trying: around the square root of the forward part's length, on a doubling scale."""
    root = math.isqrt(max(problem.turning_point, 1))
    scale = (0.125, 0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0)
    return sorted({max(1, round(root * factor)) for factor in scale})


def segment_drops(problem: Problem, segments: int, *, shrinking: bool = False, skips: bool = False) -> BoolArray:
    """For each gap, whether it is dropped when the forward part is cut into so many segments.

    Args:
        problem: the graph.
        segments: how many.
        shrinking: make each segment smaller than the one before by about one checkpoint, instead of all alike. When
            the backward part recomputes segment j, j checkpoints are alive, so the peak is then even: on a chain of N
            ops about sqrt(2 N) instead of 2 sqrt(N), for the same one extra forward.
        skips: also drop what the forward part itself reads again only far behind the cut (the skip connections of a
            U-Net), and recompute it there.
    """
    if not problem.count:
        return problem.no_drops()
    turn = problem.turning_point
    crossing = _forward_crossing_bytes(problem)
    made = np.cumsum([sum(problem.size[s] for s in problem.storages_made[op]) for op in range(turn + 1)])
    cuts: set[int] = set()
    less = float(np.median(crossing)) if shrinking else 0.0
    sizes = [made[-1] / segments + less * ((segments - 1) / 2 - number) for number in range(segments)]
    for end in np.cumsum(np.maximum(sizes, 0.0))[:-1]:
        middle = int(np.searchsorted(made, min(end, made[-1])))
        reach = max(1, turn // (3 * segments))
        low, high = max(0, middle - reach), min(turn, middle + reach + 1)
        if low < high:
            place = min(range(low, high), key=lambda op: (int(crossing[op]), abs(op - middle)))
            cuts.add(place)
    drop = problem.no_drops()
    far = max(2, turn // segments) if skips else problem.count
    for s in problem.storages:
        uses = problem.uses[s]
        if uses[0] > turn:
            continue
        first = problem.first_gap[s]
        inside = [(first + n, a, b) for n, (a, b) in enumerate(itertools.pairwise(uses)) if b <= turn]
        if skips and not any(a <= cut < b for _, a, b in inside if b - a <= far for cut in cuts):
            for gap, a, b in inside:
                drop[gap] |= problem.may_drop[gap] and b - a > far
            drop[first + len(inside)] |= problem.may_drop[first + len(inside)]
            continue
        # The last read in the forward part: where the storage is still wanted at a cut, it is a checkpoint.
        last = max(use for use in uses if use <= turn)
        if not any(uses[0] <= cut < last for cut in cuts):
            gap = problem.first_gap[s] + uses.index(last)
            drop[gap] |= problem.may_drop[gap]
        else:
            # Recomputations read it even where the backward part itself does not.
            drop[problem.first_gap[s] + len(uses) - 1] = False
    return drop


def _forward_crossing_bytes(problem: Problem) -> IntArray:
    """For each forward op, bytes that the forward part itself still needs after it."""
    turn = problem.turning_point
    forward = [s for s in problem.storages if problem.made_by[s] <= turn]
    born = np.array([problem.made_by[s] for s in forward], dtype=np.int64)
    last = np.array([max(use for use in problem.uses[s] if use <= turn) for s in forward], dtype=np.int64)
    size = np.array([problem.size[s] for s in forward], dtype=np.int64)
    return bytes_alive(born, last, size, turn + 2)
