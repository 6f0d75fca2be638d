"""When the storages of a step are in memory: who makes them, who reads them, what an output may take over.

A *storage* is a root tensor that is not pinned; it goes by the root's tensor id. Views are fused into it: whatever
reads a view uses the storage. Here stands what holds for every schedule, derived once for all methods. When each
instance of a storage lives in one schedule is the simulator's to say (:func:`remat.core.simulator.storage_lifetimes`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from remat.core.graph import Graph
from remat.core.simulator import Timeline, simulate

BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


class Takeover(NamedTuple):
    """An output that may be written into the storage of an input, where the op is the last to read that storage.

    Attributes:
        source: the storage that is read.
        target: the storage that is made.
        saved_bytes: what the step then needs less.
    """

    source: int
    target: int
    saved_bytes: int


@dataclass(frozen=True, eq=False)
class Liveness:
    """What makes, reads and keeps the storages of a step; each property is computed once.

    Attributes:
        graph: the training step.
    """

    graph: Graph

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
    def op_time_s(self) -> list[float]:
        """For each op, its seconds."""
        return [op.time_s for op in self.graph.ops]

    @cached_property
    def reads(self) -> list[tuple[int, ...]]:
        """For each op, the tensors it reads that are not pinned, each once."""
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
    def made_by(self) -> list[int]:
        """For each tensor, the op that makes it; -1 for an input of the step."""
        return [-1 if op is None else op for op in self.graph.producer]

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
    def forever(self) -> list[bool]:
        """For each tensor, whether it is a storage of which the newest instance lives to the end of the step."""
        roots = self.graph.roots
        result = [False] * len(roots)
        for t in self.graph.outputs:
            if not self.is_pinned[t]:
                result[roots[t]] = True
        return result

    @cached_property
    def uses(self) -> dict[int, list[int]]:
        """For each storage, its birth and the ops that read it, rising; those of ``forever`` end with ``count``."""
        found = {s: [self.made_by[s], *ops] for s, ops in self.consumers.items()}
        for s, uses in found.items():
            if self.forever[s]:
                uses.append(self.count)
        return found

    @cached_property
    def takeovers(self) -> list[tuple[Takeover, ...]]:
        """For each op, what its ``in_place`` pairs come to in terms of storages, in the order of the pairs.

        Pairs that save nothing are left out: those of pinned inputs, and those of outputs that are views.
        """
        roots, tensors = self.graph.roots, self.graph.tensors
        return [
            tuple(
                Takeover(roots[source], target, min(self.size[roots[source]], self.size[target]))
                for source, target in op.in_place
                if not self.is_pinned[source] and tensors[target].alias_of is None
            )
            for op in self.graph.ops
        ]

    @cached_property
    def most_taken_over(self) -> list[int]:
        """For each op, an upper bound on the bytes that its outputs can take over together."""
        result = []
        for pairs in self.takeovers:
            best: dict[int, int] = {}
            for pair in pairs:
                best[pair.target] = max(best.get(pair.target, 0), pair.saved_bytes)
            result.append(sum(best.values()))
        return result

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
