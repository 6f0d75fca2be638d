"""Turns decisions about gaps into a schedule: lazy recomputation, and eviction where a budget is exceeded.

The ops run in program order. A storage that a decision drops is gone after its use; when an op reads it
next, its op runs again just before the reader, after whatever that op itself misses. A recomputed storage
is held until its next use in program order, unless the budget says otherwise. Where the bytes would exceed
the budget, the storage with the least recompute time per byte (and per step until it is read) is evicted
and recomputed later in the same way.

Source of the eviction rule: Kirisame et al. 2021, "Dynamic Tensor Rematerialization" (arXiv:2006.09616);
here the future is known, so the distance to the next use stands in for staleness. On a chain of N ops it
reaches O(sqrt N) memory with O(N) runs. Complexity: O(steps + reads) and O(storages) per eviction, in numpy.
"""

from __future__ import annotations

import math
import time
from typing import Final

import numpy as np

from remat.planners.problem import BoolArray, Problem

_NEVER: Final = 1e30
_NEARLY: Final = 1 + 1e-9
_MOST_REFUSED: Final = 32
_MOST_VISITS_PER_OP: Final = 150
_MOST_VISITS: Final = 400_000
_MOST_LOOKED_AT: Final = 300


class TooManyRuns(Exception):
    """The budget is so tight that evicted storages are recomputed over and over."""


def rematerialize(
    problem: Problem,
    drop: BoolArray,
    budget_bytes: int | None = None,
    *,
    distance_power: float = 1.0,
    forward_share: float = 1.0,
    patience: float = 0.25,
    max_runs: int | None = None,
    deadline_s: float | None = None,
) -> tuple[int, ...]:
    """The schedule that follows a decision about gaps.

    Args:
        problem: the graph.
        drop: one bool per gap of ``problem``; a kept tail stays available for later recomputations.
        budget_bytes: evict to stay within this many bytes; None follows the decision alone. Where even
            eviction does not suffice the schedule exceeds the budget.
        distance_power: weight of the distance to the next use in the eviction rule; 0 ignores it.
        forward_share: the forward part may fill only this share of the budget, so that the backward part
            finds room to recompute in.
        patience: what takes longer to remake than this share of the plain step is not evicted, even if
            the budget is exceeded. Gradients are such: all the backward ops before them would run again.
        max_runs: give up beyond this many runs; None allows ten per op.
        deadline_s: ``time.monotonic()`` at which to give up; None for no end.

    Returns:
        A legal schedule. First runs stand in program order; every other run stands as late as possible.

    Raises:
        TooManyRuns: where ``max_runs``, the deadline or a fixed amount of work per op is exceeded.
    """
    return _Replay(
        problem, drop, budget_bytes, distance_power, forward_share, patience, max_runs, deadline_s
    ).schedule()


class _Replay:
    def __init__(
        self,
        problem: Problem,
        drop: BoolArray,
        budget_bytes: int | None,
        distance_power: float,
        forward_share: float,
        patience: float,
        max_runs: int | None,
        deadline_s: float | None,
    ) -> None:
        self.problem = problem
        self.drop = drop.tolist()
        self.budget = budget_bytes
        self.forward_share = forward_share
        self.patience_s = patience * problem.graph.time_s
        self.distance_power = distance_power
        self.max_runs = max_runs if max_runs is not None else 10 * problem.count + 100
        count = len(problem.graph.tensors)
        self.deadline_s = deadline_s
        self.visits = 0
        self.runs: list[int] = []
        self.bytes = problem.graph.pinned_bytes
        self.available = [False] * count
        self.live = [False] * count
        self.held = [False] * count
        self.locks = [0] * count
        self.stubborn = [not d for d in problem.droppable]
        self.ran = [False] * problem.count
        self.gap = dict.fromkeys(problem.storages, -1)
        # Candidates for eviction, side by side so that one numpy expression scores them all.
        self.slot = {s: i for i, s in enumerate(s for s in problem.storages if problem.size[s])}
        self.owner = list(self.slot)
        self.slot_size = np.array([problem.size[s] for s in self.owner], dtype=np.float64)
        self.next_use = np.full(len(self.owner), _NEVER)
        self.estimate = np.array([problem.op_time_s[problem.made_by[s]] for s in self.owner], dtype=np.float64)
        self.evictable = np.zeros(len(self.owner), dtype=np.bool_)
        self.last_demand = problem.last_demand
        self.last_use = {s: uses[-1] for s, uses in problem.uses.items()}
        self.expiring: dict[int, list[int]] = {}
        for s, step in self.last_demand.items():
            self.expiring.setdefault(step, []).append(s)

    def schedule(self) -> tuple[int, ...]:
        problem = self.problem
        for index in range(problem.count):
            self._execute(index, index)
            for s in problem.storages_made[index]:
                self._advance(s, index)
            for s in problem.storages_read[index]:
                self._advance(s, index)
            for s in self.expiring.get(index, ()):
                if self.live[s] and not problem.small[s]:
                    self._release(s)
        self._restore_outputs()
        return tuple(self.runs)

    def _restore_outputs(self) -> None:
        end = self.problem.count
        outputs = [t for t in dict.fromkeys(self.problem.graph.outputs) if not self.problem.is_pinned[t]]
        roots = self.problem.graph.roots
        for t in outputs:
            self._lock(roots[t])
        while missing := [t for t in outputs if not self.available[t]]:
            self._execute(self.problem.made_by[missing[0]], end)

    def _execute(self, target: int, now: int) -> None:
        """Run an op after recomputing what it misses; a stack, since chains are longer than Python recurses."""
        problem = self.problem
        stack = [target]
        for s in problem.storages_read[target]:
            self._lock(s)
        while stack:
            op = stack[-1]
            missing = next((t for t in problem.reads[op] if not self.available[t]), None)
            if missing is not None:
                stack.append(problem.made_by[missing])
                for s in problem.storages_read[stack[-1]]:
                    self._lock(s)
                continue
            self._run(op, now)
            stack.pop()
            for s in problem.storages_read[op]:
                self._unlock(s)
            if stack:
                for s in (*problem.storages_read[op], *problem.storages_made[op]):
                    self._settle(s)

    def _run(self, op: int, now: int) -> None:
        problem = self.problem
        late = self.deadline_s is not None and len(self.runs) % 64 == 0 and time.monotonic() > self.deadline_s
        if late or len(self.runs) >= self.max_runs:
            raise TooManyRuns
        made = problem.storages_made[op]
        if self.budget is not None:
            need = sum(problem.size[s] for s in made if not self.live[s]) + problem.graph.ops[op].workspace_bytes
            limit = self.budget if now > problem.turning_point else int(self.budget * self.forward_share)
            if self.bytes + need > limit:
                self._evict(self.bytes + need - limit - self._taken_over(op), now)
        self.runs.append(op)
        again = self.ran[op]
        self.ran[op] = True
        for s in made:
            for t in problem.family[s]:
                self.available[t] = False
            if not self.live[s]:
                self.live[s] = True
                self.bytes += problem.size[s]
                self._refresh(s)
            self.held[s] = again
            self._mark(s)
        for t in problem.graph.ops[op].outputs:
            self.available[t] = True

    def _taken_over(self, op: int) -> int:
        """Bytes saved by outputs that take over the storage of inputs which are read for the last time."""
        saved, used = 0, set()
        problem = self.problem
        for source, target in problem.graph.ops[op].in_place:
            s = problem.graph.roots[source]
            last = not problem.is_pinned[source] and self.locks[s] == 1 and self._next(s) >= _NEVER
            if last and s not in used and target not in used:
                used |= {s, target}
                saved += min(problem.size[s], problem.size[target])
        return saved

    def _evict(self, excess: int, now: int) -> None:
        candidates = np.flatnonzero(self.evictable)
        if not len(candidates):
            return
        distance = np.maximum(self.next_use[candidates] - now, 1.0) ** self.distance_power
        weight = 1.0 / (self.slot_size[candidates] * distance)
        score = self.estimate[candidates] * weight
        refused = 0
        while excess > 0:
            best = int(np.argmin(score))
            if score[best] == np.inf or refused > _MOST_REFUSED:
                return
            s = self.owner[int(candidates[best])]
            # Estimates miss what was evicted further up: look again with the true time before acting.
            exact = self._time_to_remake(s)
            if exact > self.patience_s:
                score[best] = np.inf
                refused += 1
            elif exact > self.estimate[candidates[best]] * _NEARLY:
                self.estimate[candidates[best]] = exact
                score[best] = exact * weight[best]
            else:
                excess -= self.problem.size[s]
                self._release(s)
                score = np.maximum(score, self.estimate[candidates] * weight)
                score[~self.evictable[candidates]] = np.inf

    def _time_to_remake(self, s: int) -> float:
        """Seconds to make a storage again when it is next used, with all that will be missing for it by then.

        What lives now but is used up earlier counts as missing. Infinite beyond the patience, or where more ops than
        are ever worth running again would have to be looked at.
        """
        problem = self.problem
        when = min(self._next(s), float(problem.count))
        pending = [problem.made_by[s]]
        seen = set(pending)
        total = 0.0
        while pending:
            if total > self.patience_s or len(seen) > _MOST_LOOKED_AT:
                total = math.inf
                break
            op = pending.pop()
            total += problem.op_time_s[op]
            for u in problem.storages_read[op]:
                there = self.live[u] and (self.last_use[u] >= when or self.stubborn[u] or problem.small[u])
                if not there and problem.made_by[u] not in seen:
                    seen.add(problem.made_by[u])
                    pending.append(problem.made_by[u])
        self.visits += len(seen)
        if self.visits > min(_MOST_VISITS, _MOST_VISITS_PER_OP * problem.count + 10_000):
            raise TooManyRuns
        return total

    def _next(self, s: int) -> float:
        uses, gap = self.problem.uses[s], self.gap[s]
        # Before its first run an op's output stands before use 0, which is its birth.
        return uses[gap + 1] if 0 <= gap < len(uses) - 1 else (uses[1] if gap < 0 and len(uses) > 1 else _NEVER)

    def _advance(self, s: int, now: int) -> None:
        uses = self.problem.uses[s]
        while self.gap[s] + 1 < len(uses) and uses[self.gap[s] + 1] <= now:
            self.gap[s] += 1
            self.held[s] = False
        self._settle(s)
        self._mark(s)

    def _settle(self, s: int) -> None:
        """Release a storage that nothing wants to keep."""
        problem = self.problem
        if not self.live[s] or self.locks[s] or problem.small[s] or self.gap[s] < 0:
            return
        gap = problem.first_gap[s] + self.gap[s]
        is_tail = self.gap[s] == len(problem.uses[s]) - 1
        if not self.drop[gap] or (self.held[s] and not is_tail):
            return
        if not self.stubborn[s] or (is_tail and self._retire(s)):
            self._release(s)

    def _retire(self, s: int) -> bool:
        """May a storage that cannot be made again go? If so, what is recomputed from it now becomes as stubborn.

        True where no recomputation can ask for it, or where keeping what was made from it is no dearer.
        """
        problem = self.problem
        frozen: set[int] = set()
        pending, seen = [s], {s}
        while pending:
            for op in problem.consumers[pending.pop()]:
                if not problem.graph.ops[op].recomputable:
                    continue
                if problem.views_elsewhere[op]:
                    # A view of another storage is made again with that storage, and reads this one then.
                    return False
                for made in problem.storages_made[op]:
                    if made in seen:
                        continue
                    seen.add(made)
                    if self.live[made] and self.available[made]:
                        frozen.add(made)
                    elif self._next(made) < _NEVER:
                        return False
                    else:
                        pending.append(made)
        if sum(problem.size[f] for f in frozen if not self.stubborn[f]) > problem.size[s]:
            return False
        for f in frozen:
            self.stubborn[f] = True
            self._mark(f)
        return True

    def _release(self, s: int) -> None:
        self.live[s] = False
        self.bytes -= self.problem.size[s]
        for t in self.problem.family[s]:
            self.available[t] = False
        self._mark(s)
        self._refresh(s)

    def _refresh(self, s: int) -> None:
        """Bring the recompute times of what is made from ``s`` up to date after it came or went."""
        problem, limit = self.problem, self.problem.graph.time_s
        for op in problem.consumers[s]:
            if self.ran[op]:
                missing = (self.slot.get(u) for u in problem.storages_read[op] if not self.live[u])
                total = problem.op_time_s[op] + sum(float(self.estimate[i]) for i in missing if i is not None)
                for made in problem.storages_made[op]:
                    if made in self.slot:
                        self.estimate[self.slot[made]] = min(total, limit)

    def _lock(self, s: int) -> None:
        self.locks[s] += 1
        self._mark(s)

    def _unlock(self, s: int) -> None:
        self.locks[s] -= 1
        self._mark(s)

    def _mark(self, s: int) -> None:
        slot = self.slot.get(s)
        if slot is not None:
            blocked = self.locks[s] or self.stubborn[s] or self.problem.small[s]
            self.evictable[slot] = self.live[s] and not blocked
            self.next_use[slot] = self._next(s)
