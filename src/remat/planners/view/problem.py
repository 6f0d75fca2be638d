"""A graph as planners see it: what may be dropped, and the gaps between uses in which it is.

A *gap* lies between two consecutive uses of a storage, the first of which is its birth; the last gap (the *tail*) is
open. Every method decides about gaps: keep the storage across, or drop it and recompute it when it is next read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from remat.core.graph import Graph
from remat.core.simulator import bytes_alive
from remat.planners.view.liveness import BoolArray, FloatArray, IntArray, Liveness

__all__ = ["BoolArray", "FloatArray", "IntArray", "Problem"]

_SMALL_SHARE: Final = 1e-4
_SMALL_TOTAL_SHARE: Final = 5e-3
"""Of the plain peak: a storage up to the first, as long as all such together stay below the second, is never dropped.

Both are judgements, not measured. Larger: planning gets faster and the smallest reachable peak rises by up to the
second. Smaller: ops that cannot matter are searched, too.
"""

_TIED_SHARE: Final = 0.95
"""A judgement: a chain has 1, layered graphs far less. Lower, and orders that save memory are not looked for."""


@dataclass(frozen=True, eq=False)
class Problem(Liveness):
    """A step with what planners decide about it: each property is computed once."""

    @classmethod
    def of(cls, graph: Graph) -> Problem:
        """The problem of this graph, kept with it as its cached properties are: one graph is often planned again."""
        known: Problem | None = vars(graph).get("_problem")
        if known is None:
            known = vars(graph)["_problem"] = cls(graph)
        return known

    def in_order(self, order: Sequence[int]) -> Problem:
        """The same step with its ops in another order: op i is ``order[i]`` of this one."""
        graph = self.graph
        if tuple(order) == graph.plain_schedule:
            return self
        number = {op: i for i, op in enumerate(order)}
        ops = tuple(
            dataclasses.replace(graph.ops[op], after=tuple(number[other] for other in graph.ops[op].after))
            for op in order
        )
        return Problem.of(dataclasses.replace(graph, ops=ops, turning_point=None))

    @cached_property
    def droppable(self) -> list[bool]:
        """For each tensor, whether it is a storage that can be made again together with all its views."""
        ops, roots = self.graph.ops, self.graph.roots
        touched = [{roots[t] for t in op.outputs if not self.is_pinned[t]} for op in ops]
        result = [False] * len(self.graph.tensors)
        for s in self.storages:
            result[s] = all(ops[self.made_by[t]].recomputable for t in self.family[s])
        # A second run of an op makes all its outputs anew: where one of them must not be made twice, none can be.
        changed = True
        while changed:
            changed = False
            for made, storages in zip(self.storages_made, touched, strict=True):
                if not all(result[s] for s in made):
                    changed |= any(result[s] for s in storages)
                    for s in storages:
                        result[s] = False
        return result

    @cached_property
    def small(self) -> list[bool]:
        """For each tensor, whether its storage is too small to be worth dropping.

        Together the small storages stay below half a percent of the plain peak, so keeping them costs next to nothing
        and makes the problem smaller.
        """
        result = [False] * len(self.graph.tensors)
        largest = self.plain.peak_bytes - self.graph.pinned_bytes
        total = 0
        for s in sorted(self.storages, key=lambda s: self.size[s]):
            total += self.size[s]
            if self.size[s] > _SMALL_SHARE * largest or total > _SMALL_TOTAL_SHARE * largest:
                break
            result[s] = True
        return result

    @cached_property
    def views_elsewhere(self) -> list[bool]:
        """For each op, whether it makes a view of one storage and reads another one that is not small."""
        roots = self.graph.roots
        result = []
        for index, op in enumerate(self.graph.ops):
            viewed = {roots[t] for t in op.outputs if roots[t] != t and not self.is_pinned[t]}
            viewed -= set(self.storages_made[index])
            others = [s for s in self.storages_read[index] if not self.small[s]]
            result.append(any(v != s for v in viewed for s in others))
        return result

    @cached_property
    def last_demand(self) -> dict[int, int]:
        """For each storage, the last op at which its bytes can be asked for, recomputations included."""
        last: dict[int, int] = {}
        ops = self.graph.ops
        for s in reversed(self.storages):
            step = self.uses[s][-1]
            for op in self.consumers[s]:
                if self.views_elsewhere[op]:
                    step = self.count
                elif ops[op].recomputable:
                    step = max([step, *(last[made] for made in self.storages_made[op])])
            last[s] = step
        return last

    @cached_property
    def first_gap(self) -> dict[int, int]:
        """For each storage, the number of its first gap; gap ``first_gap[s] + k`` follows use k of s."""
        first, number = {}, 0
        for s in self.storages:
            first[s] = number
            number += len(self.uses[s])
        return first

    @cached_property
    def gap_storage(self) -> IntArray:
        """For each gap, its storage."""
        return np.array([s for s in self.storages for _ in self.uses[s]], dtype=np.int64)

    @cached_property
    def gap_start(self) -> IntArray:
        """For each gap, the op at which it opens."""
        return np.array([use for s in self.storages for use in self.uses[s]], dtype=np.int64)

    @cached_property
    def gap_end(self) -> IntArray:
        """For each gap, the op that reads the storage next; ``count + 1`` for a tail."""
        last = self.count + 1
        return np.array([u for s in self.storages for u in [*self.uses[s][1:], last]], dtype=np.int64)

    @cached_property
    def gap_size(self) -> IntArray:
        """For each gap, the bytes of its storage."""
        return np.array(self.size, dtype=np.int64)[self.gap_storage] if self.storages else np.zeros(0, np.int64)

    @cached_property
    def is_tail(self) -> BoolArray:
        """For each gap, whether it is the open last one."""
        return np.equal(self.gap_end, self.count + 1)

    @cached_property
    def may_drop(self) -> BoolArray:
        """For each gap, whether dropping is allowed and worth a decision."""
        worth = np.array([d and not s for d, s in zip(self.droppable, self.small, strict=True)], dtype=np.bool_)
        inner = (self.gap_end - self.gap_start > 1) & ~self.is_tail
        if not self.storages:
            return np.zeros(0, np.bool_)
        return np.logical_and(worth[self.gap_storage], inner)

    def no_drops(self) -> BoolArray:
        """The decision of the plain schedule: every gap kept, tails dropped because nobody reads there."""
        return self.is_tail.copy()

    @cached_property
    def kept_bytes(self) -> IntArray:
        """For each op, bytes of storages that lie idle across it in the plain schedule."""
        inner = ~self.is_tail
        return bytes_alive(self.gap_start[inner] + 1, self.gap_end[inner], self.gap_size[inner], self.count)

    @cached_property
    def turning_point(self) -> int:
        """The op that ends the forward part.

        Where the graph does not say, it is found by bytes. Idle bytes rise while activations are stored and fall while
        the backward ops use them up, so the forward part ends where they are most.
        """
        if self.graph.turning_point is not None:
            return self.graph.turning_point
        return int(np.argmax(self.kept_bytes)) if self.count else 0

    @cached_property
    def order_is_tied(self) -> bool:
        """Whether nearly every op reads what the one before it makes: then there is no order to look for."""
        tied = sum(any(self.made_by[t] == op - 1 for t in self.graph.ops[op].inputs) for op in range(1, self.count))
        return tied >= _TIED_SHARE * (self.count - 1)
