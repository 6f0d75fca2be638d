"""An order of a step in which what frees memory runs before what only takes it.

A backward pass is written layer by layer, and of the two gradients of a product mostly the one by its input first,
then the one by its weights. The latter is small and the last to read the layer's activation. The other way round, the
activation is gone before the gradient of its size is made. Under a plan this is so at every layer that runs again, so
that the bytes of an activation are there for what else is kept.

Whatever may run once only stays where it is, and what moves stays behind all that it reads or has to wait for.
"""

from __future__ import annotations

import math
from typing import Final

from remat.core.graph import Graph
from remat.core.schedule import Schedule

_LEAST_SHARE: Final = 1 / 64
"""Ops move that free more than they make by this share of the step's largest tensor. A judgement: what is smaller
gains nothing, and plans that differ in nothing else are other plans for no reason."""

_FARTHEST: Final = 64
"""So many places an op moves at most. A judgement: with 512 the orders of nine traced models were the same, and a step
of 100,000 ops is ordered in a time that grows with its length only."""


def frugal_order(graph: Graph) -> Schedule:
    """The ops of a step, each once, in program order but for those that free memory, which may run earlier.

    An op moves to where the most that it and the ops that it passes need at a time falls by most. Nothing moves where
    that does not fall. What is in memory is counted as in the plain step, in which nothing runs again.

    Args:
        graph: the step, whose order is that of its program.
    """
    return _Order(graph).run()


class _Order:
    """Ops in an order that changes, and which of them is the last to read a storage."""

    def __init__(self, graph: Graph) -> None:
        roots, count = graph.roots, len(graph.ops)
        self._graph = graph
        self._size = [tensor.size_bytes for tensor in graph.tensors]
        stays = {roots[tensor] for tensor in (*graph.inputs, *graph.outputs)}
        self._reads = [{roots[tensor] for tensor in op.inputs} - stays for op in graph.ops]
        self._makes = [tuple(tensor for tensor in op.outputs if roots[tensor] == tensor) for op in graph.ops]
        self._takes = [tuple((roots[a], roots[b]) for a, b in op.in_place if roots[a] not in stays) for op in graph.ops]
        self._readers: list[list[int]] = [[] for _ in graph.tensors]
        for op, reads in enumerate(self._reads):
            for storage in reads:
                self._readers[storage].append(op)
        self._last = [readers[-1] if readers else -1 for readers in self._readers]
        self._never_read = [
            {made for made in makes if not self._readers[made] and made not in stays} for makes in self._makes
        ]
        self.order = list(range(count))
        self._place = list(range(count))

    def run(self) -> Schedule:
        largest = max((self._size[made] for makes in self._makes for made in makes), default=0)
        least_bytes = max(1, math.ceil(largest * _LEAST_SHARE))
        for place in range(len(self.order)):
            op = self.order[place]
            if self._graph.ops[op].recomputable and self._frees(op, self._dying_at(op)) >= least_bytes:
                self._move(op, self._best_place(op, least_bytes))
        return tuple(self.order)

    def _dying_at(self, op: int) -> set[int]:
        return {storage for storage in self._reads[op] if self._last[storage] == op} | self._never_read[op]

    def _frees(self, op: int, dying: set[int]) -> int:
        """How much less is in memory behind an op than before it."""
        return sum(self._size[storage] for storage in dying) - sum(self._size[made] for made in self._makes[op])

    def _needs(self, op: int, dying: set[int]) -> int:
        """How much more than before an op is in memory while it runs."""
        made_bytes = sum(self._size[made] for made in self._makes[op])
        taken: set[int] = set()
        for old, new in self._takes[op]:
            if old in dying and not taken & {old, new} and self._size[new] <= self._size[old]:
                taken |= {old, new}
                made_bytes -= self._size[new]
        return made_bytes + self._graph.ops[op].workspace_bytes

    def _best_place(self, op: int, least_bytes: int) -> int:
        """Where an op runs best between what it needs and where it stands.

        It is exchanged with the op before it again and again. That changes what the two need and nothing of what
        others do, since behind the two the same is in memory as before.
        """
        here = self._place[op]
        first = max((self._place[earlier] + 1 for earlier in self._earlier(op)), default=0)
        dying = self._dying_at(op)
        best, most_gain = here, 0
        before = 0  # What is in memory in front of both, beside what is in front of the op where it stands.
        most_as_it_is = self._needs(op, dying)
        most_of_passed = -math.inf
        for place in range(here - 1, max(first, here - _FARTHEST) - 1, -1):
            passed = self.order[place]
            dying_there = self._dying_at(passed)
            before += self._frees(passed, dying_there)
            most_as_it_is = max(most_as_it_is, before + self._needs(passed, dying_there))
            # Of what both read, the op that was passed is the last reader now.
            common = dying & self._reads[passed]
            dying -= common
            behind = before - self._frees(op, dying)
            most_of_passed = max(most_of_passed, behind + self._needs(passed, dying_there | common))
            gain = most_as_it_is - max(before + self._needs(op, dying), most_of_passed)
            if gain > most_gain and self._frees(op, dying) >= least_bytes:
                best, most_gain = place, int(gain)
        return best

    def _earlier(self, op: int) -> set[int]:
        makers = (self._graph.producer[tensor] for tensor in self._graph.ops[op].inputs)
        return {maker for maker in makers if maker is not None} | set(self._graph.ops[op].after)

    def _move(self, op: int, place: int) -> None:
        here = self._place[op]
        if place == here:
            return
        self.order.insert(place, self.order.pop(here))
        for number in range(place, here + 1):
            self._place[self.order[number]] = number
        for storage in self._reads[op]:
            self._last[storage] = max(self._readers[storage], key=self._place.__getitem__)
