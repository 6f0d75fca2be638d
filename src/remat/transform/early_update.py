"""Updates of parameters that run as soon as their gradient is final, in place of after the backward pass.

A *final gradient* is a tensor that leads only to results with as many elements as itself: the new parameter and the new
state of its optimizer. What reads of it is the update of that parameter, which may run as soon as nothing else reads
the old one. Then the gradient is dropped, and no more than a few gradients live at any time.

Clipping by the norm of all gradients, a check of a loss scale and the like make a number of all gradients before any
update. Then nothing moves, because the final gradients exist only behind that number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from remat.core.graph import Graph
from remat.core.schedule import Schedule

_MANY: Final = -1
"""In place of a number of elements: results of several sizes are reached."""


@dataclass(frozen=True)
class EarlyUpdates:
    """An order of a step in which updates run early.

    Attributes:
        order: the ops, each once.
        moved: those that run earlier than in program order, and belong to an update.
        bound_by: the op that makes a number which updates wait for, where there is one.
        waiting_bytes: of the gradients that wait for it.
    """

    order: Schedule
    moved: frozenset[int]
    bound_by: int | None = None
    waiting_bytes: int = 0


def early_updates(graph: Graph) -> EarlyUpdates:
    """The order in which each update runs as early as it can, everything else in program order.

    Linear in the size of the graph. Ops that must come first though no tensor ties them are kept in front.
    """
    order = _Order(graph).run()
    place = {op: position for position, op in enumerate(order.order)}
    moved = frozenset(op for op in order.updates if place[op] < op)
    bound_by, waiting_bytes = order.bound()
    return EarlyUpdates(tuple(order.order), moved, bound_by, waiting_bytes)


class _Order:
    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._made = {tensor: number for number, op in enumerate(graph.ops) for tensor in op.outputs}
        self._reach = _elements_reached(graph)
        private = [self._is_private(number) for number in range(len(graph.ops))]
        self._private = private
        self._is_free = self._of_inputs_only()
        self.updates = [
            number
            for number in range(len(graph.ops))
            if private[number] and any(private[one] and not self._is_free[one] for one in self._earlier(number))
        ]
        self.order: list[int] = []

    def run(self) -> _Order:
        graph, updates = self._graph, set(self.updates)
        others: dict[int, set[int]] = {}
        for number, op in enumerate(graph.ops):
            if number not in updates:
                for tensor in op.inputs:
                    others.setdefault(graph.roots[tensor], set()).add(number)
        missing: dict[int, set[int]] = {}
        waiting: dict[int, list[int]] = {}
        pinned = {graph.roots[tensor] for tensor in graph.inputs}
        for number in self.updates:
            needed = {one for one in self._earlier(number) if not self._is_free[one]}
            for tensor in graph.ops[number].inputs:
                if graph.roots[tensor] in pinned:
                    # The update may write the new parameter over the old one.
                    readers = others.get(graph.roots[tensor], set())
                    needed |= {one for one in readers if not self._is_free[one]}
            missing[number] = {one for one in needed if one < number}
            for one in missing[number]:
                waiting.setdefault(one, []).append(number)
        done: set[int] = set()

        def emit(number: int) -> None:
            ready = [number]
            while ready:
                one = ready.pop(0)
                if one in done:
                    continue
                for earlier in self._free_ones_before(one, done):
                    done.add(earlier)
                    self.order.append(earlier)
                done.add(one)
                self.order.append(one)
                for later in waiting.get(one, ()):
                    missing[later].discard(one)
                    if not missing[later] and later not in done:
                        ready.append(later)

        for number in range(len(graph.ops)):
            emit(number)
        return self

    def bound(self) -> tuple[int | None, int]:
        """The op that makes a number which gradients wait for before they are final, and the bytes that wait."""
        waiting: dict[int, set[int]] = {}
        for number, op in enumerate(self._graph.ops):
            if not self._private[number] or self._is_free[number]:
                continue
            elements = {_elements(self._graph, tensor) for tensor in op.outputs}
            made = [tensor for tensor in op.inputs if tensor in self._made]
            # One number is no gradient that anybody waits for, but a loss or a metric.
            gradients = [
                t
                for t in made
                if self._reach[t] == _MANY and _elements(self._graph, t) in elements and _elements(self._graph, t) > 1
            ]
            numbers = [
                self._made[t] for t in made if _elements(self._graph, t) == 1 and not self._is_free[self._made[t]]
            ]
            if gradients and numbers and max(numbers) > min(self._made[t] for t in gradients):
                waiting.setdefault(max(numbers), set()).update(self._graph.roots[t] for t in gradients)
        if not waiting:
            return None, 0
        sizes = {one: sum(self._graph.tensors[t].size_bytes for t in roots) for one, roots in waiting.items()}
        binding = max(sizes, key=lambda one: (sizes[one], one))
        return binding, sizes[binding]

    def _earlier(self, number: int) -> Iterable[int]:
        op = self._graph.ops[number]
        return (*(self._made[tensor] for tensor in op.inputs if tensor in self._made), *op.after)

    def _is_private(self, number: int) -> bool:
        """Does an op lead only to results with as many elements as one of its own tensors has?"""
        op = self._graph.ops[number]
        reached = {self._reach[tensor] for tensor in op.outputs} - {0}
        return len(reached) == 1 and any(_elements(self._graph, tensor) in reached for tensor in op.outputs)

    def _of_inputs_only(self) -> list[bool]:
        """For each op: is it a number or a part of an update, made of what is given to the step? A count, say."""
        found: list[bool] = []
        for number, op in enumerate(self._graph.ops):
            is_number = all(_elements(self._graph, tensor) == 1 for tensor in op.outputs)
            found.append((is_number or self._private[number]) and all(found[one] for one in self._earlier(number)))
        return found

    def _free_ones_before(self, number: int, done: set[int]) -> list[int]:
        """What an op needs that no part of the step has to run for, in program order."""
        needed: set[int] = set()
        unseen = [number]
        while unseen:
            for one in self._earlier(unseen.pop()):
                if one not in done and one not in needed and self._is_free[one]:
                    needed.add(one)
                    unseen.append(one)
        return sorted(needed)


def _elements(graph: Graph, tensor: int) -> int:
    found = graph.tensors[tensor]
    return found.size_bytes if found.shape is None else math.prod(found.shape)


def _elements_reached(graph: Graph) -> list[int]:
    """For each tensor the number of elements of the results that it leads to: 0 for none, ``_MANY`` for several."""
    reached = [0] * len(graph.tensors)

    def join(tensor: int, elements: int) -> None:
        if elements and reached[tensor] != elements:
            reached[tensor] = elements if reached[tensor] == 0 else _MANY

    for tensor in graph.outputs:
        join(tensor, _elements(graph, tensor))
    for op in reversed(graph.ops):
        for made in op.outputs:
            for read in op.inputs:
                join(read, reached[made])
    return reached
