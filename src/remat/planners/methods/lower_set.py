"""Dynamic programme over lower sets of the forward part (approximate Kusumoto)."""

from __future__ import annotations

from typing import Final

import numpy as np

from remat.planners.registry import strategy
from remat.planners.replay.rematerialize import rematerialize
from remat.planners.replay.residents import TooManyRuns
from remat.planners.search import Search
from remat.planners.view.problem import BoolArray, FloatArray, IntArray, Problem

# Judgements, not measured.
_FAMILY: Final = 120
"""Lower sets that are considered; the programme is quadratic in them. Fewer: segments end at worse places."""
_LEVELS: Final = 100
"""Levels of overhead; a chain of sets costs up to one level more for each set than it is counted."""
_SHARES: Final = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
"""Of the plain peak, the budgets that are tried whatever the user's is; the smallest peak is one of theirs."""
_SHARES_OF_BUDGET: Final = (1.3, 1.1, 1.0, 0.9, 0.75, 0.6)
"""Of the user's budget, those that are tried beside: what the method counts for a segment is only roughly its peak."""


@strategy("lower_set", has_fallbacks=True)
def lower_set(search: Search) -> None:
    """Kusumoto et al. 2019, "A Graph Theoretic Framework of Recomputation" (arXiv:1905.11722).

    The approximate method: lower sets are ancestor closures of single forward ops. A chain of lower sets cuts the
    forward part into segments; the boundary of each set is kept, the rest is recomputed segment by
    segment. The programme finds, for each overhead on a scale of 100 levels, the chain that keeps the fewest
    bytes while each segment fits beside what is kept (counted twice, for its gradients). The forward part
    ends at ``Problem.turning_point``. At most 120 closures are considered, the largest tensors first.

    Optimal within its family, up to the scale, on graphs whose backward part mirrors the forward one. Complexity:
    O(family^2 * levels) in numpy.
    """
    problem = search.problem
    programme = _Programme(problem)
    pinned = problem.graph.pinned_bytes
    # Budgets that do not depend on the one asked for, so that the smallest peak can be reached again.
    scale = [int(share * (problem.plain.peak_bytes - pinned)) for share in _SHARES]
    near = [int(share * (search.budget_bytes - pinned)) for share in _SHARES_OF_BUDGET if not search.expired]
    decisions: set[bytes] = set()
    for bytes_ in [*near, *scale]:
        drop = programme.drops(bytes_)
        key = np.packbits(drop).tobytes()
        if key in decisions and bytes_ not in scale:
            continue
        decisions.add(key)
        try:
            schedule = rematerialize(problem, drop)
        except TooManyRuns:
            continue
        search.offer(schedule)
        if bytes_ in scale:
            search.fallbacks.append(schedule)


class _Programme:
    """The family of lower sets and, for each nested pair, what a step from one to the other costs."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        turn = problem.turning_point
        self.forward = [s for s in problem.storages if problem.made_by[s] <= turn and not problem.small[s]]
        place = {s: i for i, s in enumerate(self.forward)}
        members = self._closures(place)
        size = np.array([problem.size[s] for s in self.forward], dtype=np.float64)
        time_s = np.array([problem.op_time_s[problem.made_by[s]] for s in self.forward], dtype=np.float64)
        self.boundary = self._boundaries(members, place)
        outside = (~members).astype(np.float64)
        self.segment_bytes: FloatArray = outside @ (members * size).T
        self.kept_bytes: FloatArray = outside @ (self.boundary * size).T
        self.segment_time: FloatArray = outside @ ((members & ~self.boundary) * time_s).T
        inside = members.astype(np.float64) @ outside.T
        self.nested: BoolArray = inside == 0
        self.members = members

    def _closures(self, place: dict[int, int]) -> BoolArray:
        problem = self.problem
        above = np.zeros((len(problem.graph.tensors), len(self.forward)), dtype=np.bool_)
        for op in range(min(problem.turning_point + 1, problem.count)):
            closure = np.zeros(len(self.forward), dtype=np.bool_)
            for s in problem.storages_read[op]:
                closure |= above[s]
            for s in problem.storages_made[op]:
                if s in place:
                    closure[place[s]] = True
            for s in problem.storages_made[op]:
                above[s] = closure
        largest = sorted(self.forward, key=lambda s: -problem.size[s])
        step = max(1, len(self.forward) // _FAMILY)
        # Half of the family is the largest tensors, half is spread evenly over the forward part.
        chosen = sorted({*largest[: _FAMILY // 2], *self.forward[:: 2 * step]})
        rows = [np.zeros(len(self.forward), dtype=np.bool_), *(above[s] for s in chosen)]
        rows.append(np.ones(len(self.forward), dtype=np.bool_))
        family = np.unique(np.array(rows), axis=0)
        return family[np.argsort(family.sum(axis=1), kind="stable")]

    def _boundaries(self, members: BoolArray, place: dict[int, int]) -> BoolArray:
        problem = self.problem
        boundary = np.zeros_like(members)
        for s, i in place.items():
            for op in problem.consumers[s]:
                for made in problem.storages_made[op]:
                    if made in place:
                        boundary[:, i] |= ~members[:, place[made]]
        return boundary & members

    def drops(self, budget_bytes: int) -> BoolArray:
        """The decision about gaps of the best chain of lower sets for so many bytes beside the pinned ones."""
        sets = self._best_chain(budget_bytes)
        problem = self.problem
        drop = problem.no_drops()
        turn = problem.turning_point
        kept = np.zeros(len(self.forward), dtype=np.bool_)
        if len(sets):
            kept = np.logical_or.reduce(self.boundary[sets], axis=0)
        for s, keep in zip(self.forward, kept, strict=True):
            last = sum(use <= turn for use in problem.uses[s]) - 1
            gap = problem.first_gap[s] + last
            drop[gap] |= problem.may_drop[gap] and not keep
        return drop

    def _best_chain(self, budget_bytes: int) -> IntArray:
        count = len(self.members)
        total = max(float(self.segment_time.max(initial=0.0)), 1e-300)
        fewest = np.full((count, _LEVELS + 1), np.inf)
        origin = np.full((count, _LEVELS + 1), -1, dtype=np.int64)
        fewest[0, 0] = 0.0
        for upper in range(1, count):
            for lower in np.flatnonzero(self.nested[:upper, upper]).tolist():
                level = int(np.ceil(self.segment_time[lower, upper] / total * _LEVELS))
                if level > _LEVELS:
                    continue
                before = fewest[lower, : _LEVELS + 1 - level]
                fits = before + 2 * self.segment_bytes[lower, upper] <= budget_bytes
                after = np.where(fits, before + self.kept_bytes[lower, upper], np.inf)
                better = after < fewest[upper, level:]
                fewest[upper, level:][better] = after[better]
                origin[upper, level:][better] = lower
        reached = np.flatnonzero(np.isfinite(fewest[-1]))
        if not len(reached):
            return np.zeros(0, dtype=np.int64)
        chain, at, level = [], count - 1, int(reached[0])
        while at > 0:
            chain.append(at)
            below = int(origin[at, level])
            level -= int(np.ceil(self.segment_time[below, at] / total * _LEVELS))
            at = below
        return np.array(chain[::-1], dtype=np.int64)
