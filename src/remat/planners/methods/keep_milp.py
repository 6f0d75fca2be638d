"""Keep MILP: which forward tensors to keep, which to recompute once, solved to a small gap by HiGHS."""

from __future__ import annotations

import time
from typing import Final

import numpy as np

from remat.planners.linear.keep import KeepModel
from remat.planners.registry import strategy
from remat.planners.search import Search
from remat.planners.view.problem import BoolArray, FloatArray, IntArray, Problem

_DEFLATIONS: Final = (0.99, 0.95, 0.9)
"""Shares of the budget that are solved for, since the model leaves out what recomputation itself needs; a judgement."""
_GAP: Final = 0.005
"""With half a percent HiGHS ended within two seconds on steps of 3,000 to 11,000 ops, measured on the prototype."""
_KEEP_COST: Final = 1e-7
"""Of the dearest op: nothing is kept for nothing. A judgement; larger, and values are recomputed to save this cost."""
_ROWS: Final = 250
"""Backward steps that limit the bytes; a judgement. Fewer: eviction has more to mend; more: the MILP takes longer."""
_MOST_S: Final = 2.5
_SHARE: Final = 0.4
"""Seconds for one solution, and its share of the time that is left, so that each deflation gets some; judgements."""


@strategy("keep_milp", default_limit_s=10.0)
def keep_milp(search: Search) -> None:
    """Solve the keep MILP for several deflated budgets, repair by eviction, then undrop.

    For each forward tensor v, y_v keeps it to its last backward demand, r_v recomputes it once and holds it from
    its first to its last backward demand. Where the backward part reads v, y_v + r_v >= 1; to recompute v, each
    input u of its op must be there: r_v <= y_u + r_u. One memory row per sampled backward step;
    minimise the seconds of what is recomputed. A coarser model than Checkmate's (Jain et al. 2020,
    arXiv:1910.02653), which lets thousands of ops be solved; optimal within it up to 0.5 %.
    """
    pinned = search.problem.graph.pinned_bytes
    model = _KeepModel(search.problem)
    for deflation in _DEFLATIONS if model.forward else ():
        left_s = _MOST_S if search.deadline_s is None else min(_MOST_S, _SHARE * (search.deadline_s - time.monotonic()))
        if left_s <= 0:
            return
        drop = model.drops(pinned + int(deflation * (search.budget_bytes - pinned)), left_s)
        if drop is not None:
            search.offer_decision(drop, search.budget_bytes)


class _KeepModel:
    """The MILP of one problem; only the right-hand side depends on the budget."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.turn = turn = problem.turning_point
        self.forward = [
            s for s in problem.storages if problem.made_by[s] <= turn and not problem.small[s] and problem.droppable[s]
        ]
        self.place = {s: i for i, s in enumerate(self.forward)}
        self.first, self.last, self.is_read = self._demands()
        self.needed = [i for i in range(len(self.forward)) if self.last[i] > turn]
        self.steps = self._sampled_steps()

    def _demands(self) -> tuple[list[int], list[int], list[bool]]:
        """First and last backward step that may ask for a tensor, and whether the backward part itself reads it."""
        problem, turn, never = self.problem, self.turn, self.problem.count + 1
        first, last, is_read = [never] * len(self.forward), [-1] * len(self.forward), [False] * len(self.forward)
        for i in reversed(range(len(self.forward))):
            s = self.forward[i]
            backward = [use for use in problem.uses[s] if use > turn]
            if backward:
                first[i], last[i], is_read[i] = backward[0], backward[-1], True
            for op in problem.consumers[s]:
                for made in problem.storages_made[op] if op <= turn else ():
                    j = self.place.get(made)
                    if j is not None and last[j] > turn:
                        # A recomputation of the reader asks for the tensor, too. How early, counts only where the
                        # backward part itself never reads it: passed on along chains, this would have everything
                        # recomputed at the first backward op.
                        last[i] = max(last[i], first[j])
                        if not is_read[i]:
                            first[i] = min(first[i], first[j])
        return first, last, is_read

    def _sampled_steps(self) -> IntArray:
        backward = np.arange(self.turn, self.problem.count)
        load = np.array(self.problem.plain.bytes, dtype=np.int64)[backward]
        heavy = backward[load > 0.05 * load.max()] if len(load) else backward
        # The heaviest step of each stretch stands for it.
        return np.array(
            [int(part[np.argmax(load[part - self.turn])]) for part in np.array_split(heavy, min(_ROWS, len(heavy)))],
            dtype=np.int64,
        )

    def drops(self, budget_bytes: int, time_limit_s: float) -> BoolArray | None:
        """The decision about gaps for a budget; None where HiGHS finds none in time."""
        problem, needed = self.problem, self.needed
        count = len(needed)
        if not count or not len(self.steps):
            return None
        column = {i: k for k, i in enumerate(needed)}
        size = np.array([problem.size[self.forward[i]] for i in needed], dtype=np.float64)
        cost = np.array([problem.op_time_s[problem.made_by[self.forward[i]]] for i in needed], dtype=np.float64)
        first, last = np.array([self.first[i] for i in needed]), np.array([self.last[i] for i in needed])
        load = np.array(problem.plain.bytes, dtype=np.float64)[self.steps] - self._stored(size, needed)
        model = KeepModel([_KEEP_COST] * count, (cost / max(cost.max(), 1e-300)).tolist(), range(count))
        for k, i in enumerate(needed):
            if self.is_read[i]:
                model.require(k)
            for u in problem.storages_read[problem.made_by[self.forward[i]]]:
                j = column.get(self.place.get(u, -1))
                if j is not None:
                    model.require_read(k, j)
        share = (size / size.max()).tolist()
        for step, other in zip(self.steps, load, strict=True):
            kept = np.flatnonzero(last >= step)
            held = kept[first[kept] <= step]
            room = (budget_bytes - other) / size.max()
            model.limit([(k, share[k]) for k in kept.tolist()], [(k, share[k]) for k in held.tolist()], room)
        found = model.solve(time_limit_s=time_limit_s, gap=_GAP)
        return None if found is None else self._decision(found[0])

    def _stored(self, size: FloatArray, needed: list[int]) -> FloatArray:
        """Bytes of modelled tensors that the plain schedule holds at the sampled steps."""
        stored = np.zeros(len(self.steps))
        for k, i in enumerate(needed):
            uses = self.problem.uses[self.forward[i]]
            stored[(self.steps >= uses[0]) & (self.steps <= uses[-1])] += size[k]
        return stored

    def _decision(self, keep: BoolArray) -> BoolArray:
        problem = self.problem
        drop = problem.no_drops()
        for k, i in enumerate(self.needed):
            s = self.forward[i]
            last = sum(use <= self.turn for use in problem.uses[s]) - 1
            gap = problem.first_gap[s] + last
            drop[gap] = not keep[k] and (problem.may_drop[gap] or problem.is_tail[gap])
        return drop
