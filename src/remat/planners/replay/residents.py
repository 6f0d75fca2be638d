"""The storages in memory while a schedule is replayed, and which of them are evicted where room is needed.

Source of the eviction rule: Kirisame et al. 2021, "Dynamic Tensor Rematerialization" (arXiv:2006.09616);
here the future is known, so the distance to the next use stands in for staleness.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
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
_FEWEST_OPS_REMEMBERED: Final = 6000
"""Ops from which on a storage that turned out too dear is not looked at again until what it is made from comes or goes.
Of three unrolled LSTMs of 11,000 to 17,000 ops replays look at 1 to 30 times fewer ops so, and two come to an end at
budgets at which they gave up; where both end, the schedules are nearly all the same. On smaller steps there is time to
look again, and near the smallest peak it finds more: DenseNet121 at a quarter ends at 37 % in place of 41."""


class TooManyRuns(Exception):
    """The budget is so tight that evicted storages are recomputed over and over."""


@dataclass(frozen=True, eq=False)
class _Readers:
    """What a replay asks of the ops over and over, worked out once for a problem.

    Attributes:
        slot: for each storage that takes bytes, its number among these.
        sources: for each op, the storages that it reads, each with the op that makes it and its last use; what is small
            is never used up.
        consumers: for each storage, the ops that read it: number, seconds, what they read of the storages with a slot,
            each with the slot, and the slots of what they make.
    """

    slot: dict[int, int]
    sources: list[tuple[tuple[int, int, float], ...]]
    consumers: dict[int, tuple[tuple[int, float, tuple[tuple[int, int], ...], tuple[int, ...]], ...]]

    @classmethod
    def of(cls, problem: Problem) -> _Readers:
        """Those of a problem, kept with it: one step is replayed a hundred times."""
        known: _Readers | None = vars(problem).get("_readers")
        if known is None:
            known = vars(problem)["_readers"] = cls._made(problem)
        return known

    @classmethod
    def _made(cls, problem: Problem) -> _Readers:
        slot = {s: i for i, s in enumerate(s for s in problem.storages if problem.size[s])}
        sources = [
            tuple((s, problem.made_by[s], math.inf if problem.small[s] else problem.uses[s][-1]) for s in read)
            for read in problem.storages_read
        ]
        ops = [
            (
                op,
                problem.op_time_s[op],
                tuple((s, slot[s]) for s in problem.storages_read[op] if s in slot),
                tuple(slot[s] for s in problem.storages_made[op] if s in slot),
            )
            for op in range(problem.count)
        ]
        return cls(slot, sources, {s: tuple(ops[op] for op in readers) for s, readers in problem.consumers.items()})


class Residents:
    """The storages of a step that is being replayed.

    What evictions are judged by lies side by side in numpy, so that one expression scores all candidates. Most changes
    lie between two evictions, so they are noted, and brought there when one is due.

    Attributes:
        evicts: may anything be evicted? Else nothing of what evictions are judged by is worked out.
        bytes: what lives now, with what is pinned.
        live: for each storage, whether it lives.
        available: for each tensor, whether its value can be read.
        locks: for each storage, how many runs are about to read it.
        stubborn: for each storage, whether it must not go as long as anything asks for it.
        ran: for each op, whether it has run.
        gap: for each storage, the number of its last use in program order so far, -1 before its birth.
    """

    def __init__(self, problem: Problem, distance_power: float, patience_s: float, *, evicts: bool = True) -> None:
        self.problem = problem
        self.evicts = evicts
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
        self._readers = _Readers.of(problem)
        self._plain_s = problem.graph.time_s
        self._remembers = problem.count >= _FEWEST_OPS_REMEMBERED
        self._slot = self._readers.slot
        self._owner = list(self._slot)
        self._slot_size = np.array([problem.size[s] for s in self._owner], dtype=np.float64)
        self._next_use = np.full(len(self._owner), _NEVER)
        self._evictable = np.zeros(len(self._owner), dtype=np.bool_)
        # Seconds to make each storage again, as far as what came and went says; in numpy since the last eviction.
        self._estimate = [problem.op_time_s[problem.made_by[s]] for s in self._owner]
        self._estimates = np.array(self._estimate, dtype=np.float64)
        self._changed_slots: set[int] = set()
        self._marked: set[int] = set()

    def evict(self, excess: int, now: int) -> None:
        """Release the storages that cost least to make again, until so many bytes are free or none may go."""
        self._catch_up()
        candidates = np.flatnonzero(self._evictable)
        if not len(candidates):
            return
        distance = np.maximum(self._next_use[candidates] - now, 1.0) ** self.distance_power
        weight = 1.0 / (self._slot_size[candidates] * distance)
        score = self._estimates[candidates] * weight
        refused = 0
        while excess > 0:
            best = int(np.argmin(score))
            if score[best] == np.inf or refused > _MOST_REFUSED:
                return
            slot = int(candidates[best])
            s = self._owner[slot]
            # Estimates miss what was evicted further up: look again with the true time before acting.
            exact = self.time_to_remake(s)
            if exact > self.patience_s:
                score[best] = np.inf
                refused += 1
                if self._remembers:
                    self._estimate[slot] = self._estimates[slot] = math.inf
            elif exact > self._estimate[slot] * _NEARLY:
                self._estimate[slot] = self._estimates[slot] = exact
                score[best] = exact * weight[best]
            else:
                excess -= self.problem.size[s]
                self.release(s)
                self._catch_up()
                score = np.maximum(score, self._estimates[candidates] * weight)
                score[~self._evictable[candidates]] = np.inf

    def _catch_up(self) -> None:
        """Bring what was marked, and the estimates that changed, to where evictions read them."""
        blocked, small = self.stubborn, self.problem.small
        for s in self._marked:
            slot = self._slot.get(s)
            if slot is not None:
                self._evictable[slot] = self.live[s] and not (self.locks[s] or blocked[s] or small[s])
                self._next_use[slot] = self.next_read(s)
        self._marked.clear()
        for slot in self._changed_slots:
            self._estimates[slot] = self._estimate[slot]
        self._changed_slots.clear()

    def time_to_remake(self, s: int) -> float:
        """Seconds to make a storage again when it is next used, with all that will be missing for it by then.

        What lives now but is used up earlier counts as missing. Infinite beyond the patience, or where more ops than
        are ever worth running again would have to be looked at.
        """
        problem, live, stubborn, sources = self.problem, self.live, self.stubborn, self._readers.sources
        op_time_s, patience_s = problem.op_time_s, self.patience_s
        when = min(self.next_read(s), float(problem.count))
        pending = [problem.made_by[s]]
        seen = set(pending)
        total = 0.0
        while pending:
            if total > patience_s or len(seen) > _MOST_LOOKED_AT:
                total = math.inf
                break
            op = pending.pop()
            total += op_time_s[op]
            for u, maker, last_use in sources[op]:
                if maker not in seen and not (live[u] and (last_use >= when or stubborn[u])):
                    seen.add(maker)
                    pending.append(maker)
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
        if self.evicts:
            self.mark(s)
            self.refresh(s)

    def refresh(self, s: int) -> None:
        """Bring the recompute times of what is made from ``s`` up to date after it came or went."""
        live, ran, estimate = self.live, self.ran, self._estimate
        for op, time_s, read, made in self._readers.consumers[s]:
            if ran[op]:
                missing_s = 0.0
                for u, slot in read:
                    if not live[u]:
                        missing_s += estimate[slot]
                total = min(time_s + missing_s, self._plain_s)
                for slot in made:
                    if estimate[slot] != total:
                        estimate[slot] = total
                        self._changed_slots.add(slot)

    def lock(self, storages: Iterable[int]) -> None:
        """Hold storages for one run more that is about to read them."""
        for s in storages:
            self.locks[s] += 1
        if self.evicts:
            self._marked.update(storages)

    def unlock(self, storages: Iterable[int]) -> None:
        """One of the runs that storages were held for has read them."""
        for s in storages:
            self.locks[s] -= 1
        if self.evicts:
            self._marked.update(storages)

    def mark(self, s: int) -> None:
        """Note that a storage may be evicted from now on, or no longer, or that it is used at another time."""
        self._marked.add(s)
