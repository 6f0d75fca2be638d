"""A graph as planners see it: storages, their uses in program order, and the gaps between uses.

A *storage* is a root tensor that is not pinned; it goes by the root's tensor id. Views are fused into
it: whatever reads a view uses the storage. A *gap* lies between two consecutive uses of a storage, the
first of which is its birth; the last gap (the *tail*) is open. Every method decides about gaps: keep
the storage across, or drop it and recompute it when it is next read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from remat.core.graph import Graph
from remat.core.simulator import Timeline, simulate

BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

_SMALL_SHARE = 1e-4
_SMALL_TOTAL_SHARE = 5e-3
_TIED_SHARE = 0.95


@dataclass(frozen=True, eq=False)
class Problem:
    """Derived views of a graph that every planner needs; each is computed once.

    Attributes:
        graph: the graph to plan.
    """

    graph: Graph

    @classmethod
    def of(cls, graph: Graph) -> Problem:
        """The views of this graph, kept with it as its cached properties are: one graph is often planned again."""
        known: Problem | None = vars(graph).get("_problem")
        if known is None:
            known = vars(graph)["_problem"] = cls(graph)
        return known

    @cached_property
    def count(self) -> int:
        """Number of ops; also the position of the virtual last use of the graph's outputs."""
        return len(self.graph.ops)

    @cached_property
    def plain(self) -> Timeline:
        """The timeline of the plain schedule."""
        return simulate(self.graph, self.graph.plain_schedule)

    @cached_property
    def is_pinned(self) -> list[bool]:
        """For each tensor, whether its storage is an input of the step."""
        roots = self.graph.roots
        pinned = {roots[t] for t in self.graph.inputs}
        return [roots[t] in pinned for t in range(len(self.graph.tensors))]

    @cached_property
    def size(self) -> list[int]:
        """For each tensor, the bytes of the storage that it owns; 0 for views and pinned tensors."""
        return [
            0 if pinned or tensor.alias_of is not None else tensor.size_bytes
            for tensor, pinned in zip(self.graph.tensors, self.is_pinned, strict=True)
        ]

    @cached_property
    def reads(self) -> list[tuple[int, ...]]:
        """For each op, the tensors it reads that may be dropped, each once."""
        return [tuple(t for t in dict.fromkeys(op.inputs) if not self.is_pinned[t]) for op in self.graph.ops]

    @cached_property
    def storages_read(self) -> list[tuple[int, ...]]:
        """For each op, the storages it reads, directly or through views, each once."""
        roots = self.graph.roots
        return [tuple(dict.fromkeys(roots[t] for t in tensors)) for tensors in self.reads]

    @cached_property
    def storages_made(self) -> list[tuple[int, ...]]:
        """For each op, the storages it makes."""
        tensors = self.graph.tensors
        return [tuple(t for t in op.outputs if tensors[t].alias_of is None) for op in self.graph.ops]

    @cached_property
    def storages(self) -> list[int]:
        """All storages in the order in which they are first made."""
        return [s for made in self.storages_made for s in made]

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
    def family(self) -> dict[int, list[int]]:
        """For each storage, the tensors that live in it, itself first."""
        roots = self.graph.roots
        found: dict[int, list[int]] = {s: [s] for s in self.storages}
        for op in self.graph.ops:
            for t in op.outputs:
                if roots[t] != t and not self.is_pinned[t]:
                    found[roots[t]].append(t)
        return found

    @cached_property
    def consumers(self) -> dict[int, list[int]]:
        """For each storage, the ops that read it, directly or through views, rising."""
        found: dict[int, list[int]] = {s: [] for s in self.storages}
        for index, read in enumerate(self.storages_read):
            for s in read:
                found[s].append(index)
        return found

    @cached_property
    def made_by(self) -> list[int]:
        """For each tensor, the op that makes it; -1 for an input of the step."""
        return [-1 if op is None else op for op in self.graph.producer]

    @cached_property
    def op_time_s(self) -> list[float]:
        """For each op, its seconds."""
        return [op.time_s for op in self.graph.ops]

    @cached_property
    def droppable(self) -> list[bool]:
        """For each tensor, whether it is a storage that can be made again together with all its views."""
        ops, roots = self.graph.ops, self.graph.roots
        touched = [{roots[t] for t in op.outputs if not self.is_pinned[t]} for op in ops]
        result = [False] * len(self.graph.tensors)
        for s in self.storages:
            result[s] = all(ops[self.made_by[t]].recomputable for t in self.family[s])
        # A second run of an op replaces all that it makes, so that one stubborn storage binds the others.
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
        """For each tensor, whether its storage is too small to be worth dropping, ever.

        Together the small storages stay below half a percent of the plain peak, so that keeping
        them cuts the problem and costs next to nothing.
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
    def uses(self) -> dict[int, list[int]]:
        """For each storage, its birth and the ops that read it, rising; the graph's outputs end with ``count``."""
        roots = self.graph.roots
        found = {s: [self.made_by[s], *ops] for s, ops in self.consumers.items()}
        for s in {roots[t] for t in self.graph.outputs if not self.is_pinned[t]}:
            found[s].append(self.count)
        return found

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
        change = np.zeros(self.count + 2, dtype=np.int64)
        inner = ~self.is_tail
        np.add.at(change, self.gap_start[inner] + 1, self.gap_size[inner])
        np.subtract.at(change, self.gap_end[inner], self.gap_size[inner])
        return np.cumsum(change)[: self.count]

    @cached_property
    def own_bytes(self) -> list[int]:
        """For each op, bytes of its first run alone, beside the pinned ones: what it reads and makes, workspace."""
        return [
            sum(self.size[s] for s in {*self.storages_read[i], *self.storages_made[i]}) + op.workspace_bytes - saved
            for i, (op, saved) in enumerate(zip(self.graph.ops, self.most_taken_over, strict=True))
        ]

    @cached_property
    def largest_step_bytes(self) -> int:
        """Bytes that no schedule can go below: the pinned ones and those of the op that needs most."""
        return self.graph.pinned_bytes + max(self.own_bytes, default=0)

    @cached_property
    def most_taken_over(self) -> list[int]:
        """For each op, an upper bound on the bytes that its in-place outputs can take over."""
        roots = self.graph.roots
        result = []
        for op in self.graph.ops:
            best: dict[int, int] = {}
            for source, target in op.in_place:
                bytes_ = 0 if self.is_pinned[source] else min(self.size[roots[source]], self.size[target])
                best[target] = max(best.get(target, 0), bytes_)
            result.append(sum(best.values()))
        return result

    @cached_property
    def order_is_tied(self) -> bool:
        """Whether nearly every op reads what the one before it makes: then there is no order to look for."""
        tied = sum(any(self.made_by[t] == op - 1 for t in self.graph.ops[op].inputs) for op in range(1, self.count))
        return tied >= _TIED_SHARE * (self.count - 1)

    @cached_property
    def turning_point(self) -> int:
        """The op that ends the forward part.

        No boundary is given in a joint graph. Idle bytes rise while activations are stored and fall while
        the backward ops use them up, so the forward part ends where they are most.
        """
        return int(np.argmax(self.kept_bytes)) if self.count else 0
