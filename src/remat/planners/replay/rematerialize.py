"""Turns decisions about gaps into a schedule: lazy recomputation, and eviction where a budget is exceeded.

The ops run in program order. A storage that a decision drops is gone after its use; when an op reads it
next, its op runs again just before the reader, after whatever that op itself misses. A recomputed storage
is held until its next use in program order, unless the budget says otherwise. Where the bytes would exceed
the budget, the storage with the least recompute time per byte (and per step until it is read) is evicted
and recomputed later in the same way (see :mod:`remat.planners.replay.residents`). On a chain of N ops it
reaches O(sqrt N) memory with O(N) runs. Complexity: O(steps + reads) and O(storages) per eviction, in numpy.
"""

from __future__ import annotations

import time

from remat.planners.replay.residents import Residents, TooManyRuns
from remat.planners.view.problem import BoolArray, Problem


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


class _Replay(Residents):
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
        super().__init__(problem, distance_power, patience * problem.graph.time_s, evicts=budget_bytes is not None)
        self.drop = drop.tolist()
        self.budget = budget_bytes
        self.forward_share = forward_share
        self.max_runs = max_runs if max_runs is not None else 10 * problem.count + 100
        self.deadline_s = deadline_s
        self.runs: list[int] = []
        self.held = [False] * len(problem.graph.tensors)
        self.last_demand = problem.last_demand
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
                    self.release(s)
        self._restore_outputs()
        return tuple(self.runs)

    def _restore_outputs(self) -> None:
        end = self.problem.count
        outputs = [t for t in dict.fromkeys(self.problem.graph.outputs) if not self.problem.is_pinned[t]]
        roots = self.problem.graph.roots
        self.lock([roots[t] for t in outputs])
        while missing := [t for t in outputs if not self.available[t]]:
            self._execute(self.problem.made_by[missing[0]], end)

    def _execute(self, target: int, now: int) -> None:
        """Run an op after recomputing what it misses; a stack, since chains are longer than Python recurses."""
        problem, available, made_by = self.problem, self.available, self.problem.made_by
        reads, storages_read = problem.reads, problem.storages_read
        stack = [target]
        self.lock(storages_read[target])
        while stack:
            op = stack[-1]
            for t in reads[op]:
                if not available[t]:
                    stack.append(made_by[t])
                    self.lock(storages_read[made_by[t]])
                    break
            else:
                self._run(op, now)
                stack.pop()
                self.unlock(storages_read[op])
                if stack:
                    for s in (*storages_read[op], *problem.storages_made[op]):
                        self._settle(s)

    def _run(self, op: int, now: int) -> None:
        problem, live, available = self.problem, self.live, self.available
        size, family = problem.size, problem.family
        late = self.deadline_s is not None and len(self.runs) % 64 == 0 and time.monotonic() > self.deadline_s
        if late or len(self.runs) >= self.max_runs:
            raise TooManyRuns
        made, own = problem.storages_made[op], problem.graph.ops[op]
        if self.budget is not None:
            need = own.workspace_bytes
            for s in made:
                if not live[s]:
                    need += size[s]
            limit = self.budget if now > problem.turning_point else int(self.budget * self.forward_share)
            if self.bytes + need > limit:
                self.evict(self.bytes + need - limit - self.taken_over(op), now)
        self.runs.append(op)
        again = self.ran[op]
        self.ran[op] = True
        for s in made:
            for t in family[s]:
                available[t] = False
            if not live[s]:
                live[s] = True
                self.bytes += size[s]
                if self.evicts:
                    self.refresh(s)
            self.held[s] = again
            if self.evicts:
                self.mark(s)
        for t in own.outputs:
            available[t] = True

    def _advance(self, s: int, now: int) -> None:
        uses, gap = self.problem.uses[s], self.gap[s] + 1
        while gap < len(uses) and uses[gap] <= now:
            self.gap[s] = gap
            self.held[s] = False
            gap += 1
        self._settle(s)
        if self.evicts:
            self.mark(s)

    def _settle(self, s: int) -> None:
        """Release a storage that nothing wants to keep."""
        if not self.live[s] or self.locks[s]:
            return
        problem, gap = self.problem, self.gap[s]
        if gap < 0 or problem.small[s] or not self.drop[problem.first_gap[s] + gap]:
            return
        is_tail = gap == len(problem.uses[s]) - 1
        if self.held[s] and not is_tail:
            return
        if not self.stubborn[s] or (is_tail and self.retire(s)):
            self.release(s)
