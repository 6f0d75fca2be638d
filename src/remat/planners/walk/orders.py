"""Orders of first runs that need little memory with nothing recomputed, for graphs that leave the order free."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from remat.core.simulator import simulate
from remat.planners.view.problem import IntArray, Problem

_SHARES: Final = (0.0, 0.25, 0.5, 0.75, 1.0)
"""How much a sweep counts bytes that an op only brings nearer to being freed."""
_NOISES: Final = (0.0, 0.1, 0.25, 0.5)
_TRIES: Final = 4
"""Random preferences of ops, in units of the median storage, and how often each is drawn.

With the shares above they make 130 sweeps. On layered graphs of 1000 ops the best of them needs 5 to 9 % less than
program order (``docs/planners.md``); the three settings themselves are judgements. Fewer: a worse order to start from.
"""
_MOST_OPS: Final = 4000
"""A judgement: beyond it program order is taken, since sweeps are quadratic where many ops are ready."""


def low_memory_order(problem: Problem, budget_bytes: int) -> tuple[int, ...]:
    """The order that greedy sweeps find, program order among them, that is least over a budget.

    Each step over the budget has to be relieved by recomputation, the higher the dearer: the squares of the bytes over
    it are summed over all steps. Sweeps go from the first op to the last, and from the last to the first. Each takes
    next what adds least bytes, less a share of those that it brings nearer to being freed; some with random preferences
    of ops, always the same ones. A heuristic without guarantee. Complexity: 130 sweeps of O(ops ready) each, once for
    a problem of up to 4,000 ops.
    """
    known: list[_Order] | None = vars(problem).get("_orders")
    if known is None:
        known = vars(problem)["_orders"] = _sweep(problem)

    def over(order: _Order) -> float:
        over_bytes = np.maximum(order.bytes - budget_bytes, 0).astype(np.float64)
        return float((over_bytes * over_bytes).sum())

    return min(known, key=over).ops


@dataclass(frozen=True, eq=False)
class _Order:
    ops: tuple[int, ...]
    bytes: IntArray


def _sweep(problem: Problem) -> list[_Order]:
    """Program order, then each other one that the sweeps find."""
    found = dict.fromkeys([problem.graph.plain_schedule])
    if problem.count <= _MOST_OPS and problem.graph.free_order:
        rng = random.Random(0)
        sweeps = _Sweeps(problem)
        for share in _SHARES:
            for noise in _NOISES:
                for _ in range(_TRIES if noise else 1):
                    taste = [rng.gauss(0.0, noise) * sweeps.middling_bytes for _ in range(problem.count)]
                    found |= dict.fromkeys((sweeps.forward(share, taste), sweeps.backward(share, taste)))
    return [_Order(order, np.array(simulate(problem.graph, order).bytes, dtype=np.int64)) for order in found]


class _Sweeps:
    """What both directions need: for each op, which ops must come before it, and which after."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.before: list[tuple[int, ...]] = []
        self.behind: list[list[int]] = [[] for _ in range(problem.count)]
        for number, op in enumerate(problem.graph.ops):
            makers = (problem.made_by[t] for t in op.inputs)
            names = dict.fromkeys((*(maker for maker in makers if maker >= 0), *op.after))
            self.before.append(tuple(names))
            for other in names:
                self.behind[other].append(number)
        self.size = problem.size
        self.made_bytes = [sum(self.size[s] for s in made) for made in problem.storages_made]
        sizes = sorted(self.size[s] for s in problem.storages)
        self.middling_bytes = sizes[len(sizes) // 2] if sizes else 0

    def forward(self, share: float, taste: Sequence[float]) -> tuple[int, ...]:
        """Take what makes least and frees most."""
        problem, size = self.problem, self.size
        waiting = [len(names) for names in self.before]
        readers = {s: len(ops) + problem.forever[s] for s, ops in problem.consumers.items()}
        ready = [op for op in range(problem.count) if not waiting[op]]
        order: list[int] = []

        def added_bytes(op: int) -> float:
            freed = 0.0
            for s in problem.storages_read[op]:
                freed += size[s] if readers[s] == 1 else share * size[s] / readers[s]
            return self.made_bytes[op] - freed + taste[op]

        while ready:
            op = min(ready, key=added_bytes)
            ready.remove(op)
            order.append(op)
            for s in problem.storages_read[op]:
                readers[s] -= 1
            for other in self.behind[op]:
                waiting[other] -= 1
                if not waiting[other]:
                    ready.append(other)
        return tuple(order)

    def backward(self, share: float, taste: Sequence[float]) -> tuple[int, ...]:
        """From the end: take what needs fewest new storages before it, and makes the most that lies there after it."""
        problem, size = self.problem, self.size
        waiting = [len(names) for names in self.behind]
        there = {s: problem.forever[s] for s in problem.storages}
        ready = [op for op in range(problem.count) if not waiting[op]]
        order: list[int] = []

        def added_bytes(op: int) -> float:
            added = taste[op] - sum(size[s] for s in problem.storages_made[op] if there[s])
            for s in problem.storages_read[op]:
                added += size[s] if not there[s] else -share * size[s] / max(1, waiting[problem.made_by[s]])
            return added

        while ready:
            op = min(ready, key=added_bytes)
            ready.remove(op)
            order.append(op)
            for s in problem.storages_read[op]:
                there[s] = True
            for other in self.before[op]:
                waiting[other] -= 1
                if not waiting[other]:
                    ready.append(other)
        return tuple(reversed(order))
