"""The storages in memory while a schedule is replayed, and which of them are evicted where room is needed.

Source of the eviction rule: Kirisame et al. 2021, "Dynamic Tensor Rematerialization" (arXiv:2006.09616);
here the future is known, so the distance to the next use stands in for staleness.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from remat.planners.view.problem import Problem

_NEVER: Final = 1e30
"""The next use of a storage that has none: later than every step, and finite for the arithmetic."""
_NEARLY: Final = 1 + 1e-9
"""Rounding of sums of seconds: within it an estimate counts as exact."""
# Judgements, not measured. Smaller ones end a hopeless replay sooner, and some that would have come to an end.
_MOST_REFUSED: Final = 32
"""Candidates for one eviction that may turn out too dear, before the budget is exceeded instead."""
_MOST_LOOKED_AT: Final = 300
"""Ops that one storage may need again; more is never worth it."""
_MOST_VISITS_PER_OP: Final = 150
_MOST_VISITS: Final = 400_000
"""Ops that may be looked at in one replay, for each op of the graph and in all."""


class TooManyRuns(Exception):
    """The budget is so tight that evicted storages are recomputed over and over."""


class Residents:
    """The storages of a step that is being replayed.

    Attributes:
        bytes: what lives now, with what is pinned.
        live: for each storage, whether it lives.
        available: for each tensor, whether its value can be read.
        locks: for each storage, how many runs are about to read it.
        stubborn: for each storage, whether it must not go as long as anything asks for it.
        ran: for each op, whether it has run.
        gap: for each storage, the number of its last use in program order so far, -1 before its birth.
    """

    def __init__(self, problem: Problem, distance_power: float, patience_s: float) -> None:
        self.problem = problem
        self.patience_s = patience_s
        self.distance_power = distance_power
        self.visits = 0
        count = len(problem.graph.tensors)
        self.bytes = problem.graph.pinned_bytes
        self.available = [False] * count
        self.live = [False] * count
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
        self.last_use = {s: uses[-1] for s, uses in problem.uses.items()}

    def evict(self, excess: int, now: int) -> None:
        """Release the storages that cost least to make again, until so many bytes are free or none may go."""
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
            exact = self.time_to_remake(s)
            if exact > self.patience_s:
                score[best] = np.inf
                refused += 1
            elif exact > self.estimate[candidates[best]] * _NEARLY:
                self.estimate[candidates[best]] = exact
                score[best] = exact * weight[best]
            else:
                excess -= self.problem.size[s]
                self.release(s)
                score = np.maximum(score, self.estimate[candidates] * weight)
                score[~self.evictable[candidates]] = np.inf

    def time_to_remake(self, s: int) -> float:
        """Seconds to make a storage again when it is next used, with all that will be missing for it by then.

        What lives now but is used up earlier counts as missing. Infinite beyond the patience, or where more ops than
        are ever worth running again would have to be looked at.
        """
        problem = self.problem
        when = min(self.next_read(s), float(problem.count))
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

    def taken_over(self, op: int) -> int:
        """Bytes saved by outputs that take over the storage of inputs which are read for the last time."""
        saved, used = 0, set()
        for source, target, saved_bytes in self.problem.takeovers[op]:
            is_last = self.locks[source] == 1 and self.next_read(source) >= _NEVER
            if is_last and source not in used and target not in used:
                used |= {source, target}
                saved += saved_bytes
        return saved

    def retire(self, s: int) -> bool:
        """Let a storage go that must not be made twice, if no recomputation needs it; whether it may go.

        It may where everything that is still wanted and made from it is in memory, and is no larger. Those storages
        become stubborn in its place, since they cannot be made again without it.
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
                    elif self.next_read(made) < _NEVER:
                        return False
                    else:
                        pending.append(made)
        if sum(problem.size[f] for f in frozen if not self.stubborn[f]) > problem.size[s]:
            return False
        for f in frozen:
            self.stubborn[f] = True
            self.mark(f)
        return True

    def next_read(self, s: int) -> float:
        """The next use of a storage in program order, beyond all steps where there is none."""
        uses, gap = self.problem.uses[s], self.gap[s]
        # Before its first run an op's output stands before use 0, which is its birth.
        return uses[gap + 1] if 0 <= gap < len(uses) - 1 else (uses[1] if gap < 0 and len(uses) > 1 else _NEVER)

    def release(self, s: int) -> None:
        """Let a storage go, and the views of it."""
        self.live[s] = False
        self.bytes -= self.problem.size[s]
        for t in self.problem.family[s]:
            self.available[t] = False
        self.mark(s)
        self.refresh(s)

    def refresh(self, s: int) -> None:
        """Bring the recompute times of what is made from ``s`` up to date after it came or went."""
        problem, limit = self.problem, self.problem.graph.time_s
        for op in problem.consumers[s]:
            if self.ran[op]:
                missing = (self.slot.get(u) for u in problem.storages_read[op] if not self.live[u])
                total = problem.op_time_s[op] + sum(float(self.estimate[i]) for i in missing if i is not None)
                for made in problem.storages_made[op]:
                    if made in self.slot:
                        self.estimate[self.slot[made]] = min(total, limit)

    def lock(self, s: int) -> None:
        """Hold a storage for one run more that is about to read it."""
        self.locks[s] += 1
        self.mark(s)

    def unlock(self, s: int) -> None:
        """One of the runs that a storage was held for has read it."""
        self.locks[s] -= 1
        self.mark(s)

    def mark(self, s: int) -> None:
        """Note whether a storage may be evicted, and when it is used next."""
        slot = self.slot.get(s)
        if slot is not None:
            blocked = self.locks[s] or self.stubborn[s] or self.problem.small[s]
            self.evictable[slot] = self.live[s] and not blocked
            self.next_use[slot] = self.next_read(s)
