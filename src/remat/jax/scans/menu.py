"""What the loops of a pair may leave behind, from most to least: a menu with the bytes and the seconds of each option.

Two things save bytes. An iteration of the backward loop makes values again that were not stacked. And the first
iterations run in chunks: then not even what the loop carries is stacked for each iteration, and the backward loop runs
each chunk forward once more. Bytes and seconds are those of a model; they only order the options.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from remat.core.graph import Graph
from remat.jax.scans.loops import Choice
from remat.jax.scans.pairs import Pair
from remat.jax.trace import op_facts
from remat.jax.trace.program import Program
from remat.planners.linear.keep import KeepModel
from remat.planners.view.problem import BoolArray, FloatArray

_SHARES: Final = (*(1.0 - 0.03 * step for step in range(26)), 0.2, 0.16, 0.12, 0.09, 0.06, 0.0)
"""The shares of all that a loop could stack that become options; each takes milliseconds for the model below. With
steps of .08, plans for a scanned decoder left a quarter of their budget unused: values that are stacked together or not
at all make one step of the model more than two of the real peak."""

_PARTS: Final = (0.25, 0.5, 0.75, 1.0)
"""How many of the chunks that a loop could have it has; the iterations behind them stack as ever. As above."""

_AROUND: Final = (0.5, 1.0, 2.0)
"""Lengths of chunks, as multiples of the one with the least bytes. As above: twice that length stacks fewer starts,
and half of it needs less while a chunk runs again."""

_FEWEST_CHUNKS: Final = 2
"""A compiler unrolls a loop of one iteration, and may then merge its second computation with the first."""

_LONG: Final = 64
"""From so many iterations on, chunks are cut into chunks, too. A judgement: in a shorter loop that saves next to
nothing, and computes a third time."""

# The model of what to stack is solved to this share of the optimum. Bodies have tens of values, for which HiGHS takes
# milliseconds. So many nodes end the search in bodies of thousands, on every machine alike; the clock is for a model
# that HiGHS cannot even begin to solve.
_GAP: Final = 0.005
_MOST_NODES: Final = 200
_SAFETY_S: Final = 60.0

_LITTLE: Final = 1e-6  # The weight of what decides among equals, and the rounding that a limit on bytes allows.
_SMALLEST_TIME_S: Final = 1e-300  # In place of a body that takes no time, by which nothing can be divided.


@dataclass(frozen=True)
class Option:
    """One way to run a pair of loops.

    Attributes:
        choice: what the forward loop leaves to the backward one.
        held_bytes: what lies in memory for that, at most.
        again_s: seconds of what is computed again.
    """

    choice: Choice
    held_bytes: float
    again_s: float


def menu_of(pair: Pair, body: Program, graph: Graph, *, in_chunks: bool = True) -> list[Option]:
    """The options of a pair, most bytes first: each costs more seconds than those before it.

    Args:
        pair: the loops.
        body: the forward body.
        graph: its graph.
        in_chunks: may the loops run in chunks?
    """
    loop = LoopBody(pair, body, graph)
    options = loop.cheapest_for_shares()
    if in_chunks:
        options += loop.chunked(options[0], options[-1])
    return best_of(options)


def best_of(options: Sequence[Option]) -> list[Option]:
    """The options that no other beats in both bytes and seconds, most bytes first."""
    kept: list[Option] = []
    for option in sorted(options, key=lambda one: (one.again_s, one.held_bytes)):
        if not kept or option.held_bytes < kept[-1].held_bytes:
            kept.append(option)
    return kept


def merged(menus: Sequence[Sequence[Option]]) -> list[tuple[Choice, ...]]:
    """One list of choices for several pairs, from most to least bytes: the next step is the one that saves most.

    Each step takes one pair down its menu, from one option on its convex hull to the next: there each further byte
    costs more than the one before. The options between the two come in between, for budgets that allow them.
    """
    hulls = [_hull(menu) for menu in menus]
    steps = [
        (_rate(before, after), number, place)
        for number, hull in enumerate(hulls)
        for place, (before, after) in enumerate(itertools.pairwise(hull), 1)
    ]
    at = [hull[0].choice for hull in hulls]
    rows = [tuple(at)]
    for _, number, place in sorted(steps):
        menu, before, after = menus[number], hulls[number][place - 1], hulls[number][place]
        for option in menu[menu.index(before) + 1 : menu.index(after) + 1]:
            at[number] = option.choice
            rows.append(tuple(at))
    return rows


def _rate(before: Option, after: Option) -> float:
    """Seconds for each byte that is saved."""
    return (after.again_s - before.again_s) / max(1.0, before.held_bytes - after.held_bytes)


def _hull(menu: Sequence[Option]) -> list[Option]:
    hull: list[Option] = []
    for option in menu:
        while len(hull) > 1 and _rate(hull[-2], hull[-1]) >= _rate(hull[-1], option):
            hull.pop()
        hull.append(option)
    return hull


class LoopBody:
    """The forward body of a pair: what the backward one needs of it, and what keeping or making that again costs.

    Args:
        pair: the loops.
        body: the forward body.
        graph: its graph.
        once: ids of values that must not be made again, whatever made them.
    """

    def __init__(self, pair: Pair, body: Program, graph: Graph, once: frozenset[int] = frozenset()) -> None:
        self._body = body
        self._free = pair.free
        self._length = int(pair.first.eqn.params["length"])
        self._body_s = graph.time_s
        self.wanted = [value for value in dict.fromkeys(pair.needed) if value not in self._free]
        instructions = body.instructions
        self._producer = {value: n for n, instruction in enumerate(instructions) for value in instruction.outputs}
        read = (value for instruction in instructions for value in instruction.reads)
        every = dict.fromkeys([*self.wanted, *self._producer, *read])
        self._values = [value for value in every if value not in self._free]
        self._column = {value: k for k, value in enumerate(self._values)}
        self._size = np.array([op_facts.size_bytes(body.avals[value]) for value in self._values], dtype=np.float64)
        self._cost_s = np.array([op.time_s for op in graph.ops], dtype=np.float64)
        self._again_bytes = np.array(
            [sum(graph.tensors[value].size_bytes for value in one.outputs) for one in instructions], dtype=np.float64
        )
        self._may_repeat = [
            all(op_facts.may_repeat(each.eqn) and once.isdisjoint(each.outputs) for each in one.equations)
            for one in instructions
        ]
        carried = pair.first.eqn.params["num_carry"]
        self._carried_bytes = float(sum(op_facts.size_bytes(var.aval) for var in pair.first.eqn.outvars[:carried]))

    def cheapest(self, share: float) -> Option:
        """The values to stack so that making the rest again costs least.

        The model is :class:`remat.planners.linear.keep.KeepModel` over the values and instructions of the body, with
        one limit on bytes: a stack counts once for each iteration, a value that is made again counts once.

        Args:
            share: of the bytes of stacking everything that is needed; 0 for the least that is possible.
        """
        if share >= 1.0:
            return self._option(frozenset(self.wanted), ())
        seconds = self._cost_s * self._length
        scale = max(1.0, float(self._size.max(initial=0.0))) * self._length
        kept, again = self._length * self._size / scale, self._again_bytes / scale
        costs = (
            _LITTLE * self._size / max(1.0, float(self._size.max(initial=0.0))),
            seconds / max(float(seconds.max(initial=0.0)), _SMALLEST_TIME_S),
        )
        everything = sum(self._size[self._column[value]] for value in self.wanted) * self._length / scale
        found = self._best(*costs, kept, again, share * everything)
        if found is None:
            least = self._best(kept + _LITTLE * costs[0], again + _LITTLE * costs[1], kept, again, np.inf)
            if least is None:
                return self._option(frozenset(self.wanted), ())
            smallest = float(kept @ least[0] + again @ least[1])
            found = self._best(*costs, kept, again, smallest * (1 + _LITTLE)) or least
        stacked = frozenset(value for value, is_kept in zip(self._values, found[0], strict=True) if is_kept)
        return self._option(stacked, np.flatnonzero(found[1]).tolist())

    def cheapest_for_shares(self) -> list[Option]:
        """The option of each share, most bytes first; those below the least that is possible are left out."""
        options: list[Option] = []
        least = self.cheapest(0.0)
        for share in _SHARES:
            if options and options[-1].held_bytes <= least.held_bytes * (1 + _LITTLE):
                break
            options.append(self.cheapest(share))
        return [*options, least]

    def _best(
        self, keep_cost: FloatArray, again_cost: FloatArray, kept: FloatArray, again: FloatArray, room: float
    ) -> tuple[BoolArray, BoolArray] | None:
        made_by = [self._producer.get(value) for value in self._values]
        model = KeepModel(keep_cost.tolist(), again_cost.tolist(), made_by, self._may_repeat)
        for value in self.wanted:
            model.require(self._column[value])
        for number, instruction in enumerate(self._body.instructions):
            for value in instruction.reads:
                if value not in self._free:
                    model.require_read(number, self._column[value])
        model.limit(enumerate(kept.tolist()), enumerate(again.tolist()), room)
        return model.solve(time_limit_s=_SAFETY_S, gap=_GAP, most_nodes=_MOST_NODES)

    def _option(self, stacked: frozenset[int], again: Sequence[int]) -> Option:
        held = self._length * self._bytes_of(stacked) + float(self._again_bytes[list(again)].sum())
        return Option(Choice(stacked), held, self._length * float(self._cost_s[list(again)].sum()))

    def _bytes_of(self, values: frozenset[int]) -> float:
        return float(sum(self._size[self._column[value]] for value in values))

    def chunked(self, most: Option, least: Option) -> list[Option]:
        """Options whose first iterations run in chunks.

        Args:
            most: the option that stacks most.
            least: the one that stacks least.
        """
        if not self._carried_bytes or not all(self._may_repeat):
            return []
        options = []
        for inside in (most, least):
            own_bytes = self._bytes_of(inside.choice.stacked)
            if not own_bytes:
                continue  # There is nothing to stack for each iteration, so chunks cannot save anything.
            for chunks in dict.fromkeys(self._lengths(own_bytes)):
                for part in _PARTS:
                    count = round(part * (self._length // chunks[0]))
                    if count >= _FEWEST_CHUNKS:
                        options += [self._in_chunks(inside, rest, chunks, count) for rest in (most, least)]
        return options

    def _lengths(self, own_bytes: float) -> Iterator[tuple[int, ...]]:
        """Lengths of chunks around those with the least bytes, for so many bytes of stacks for each iteration."""
        weight = max(own_bytes, 1.0) / self._carried_bytes
        for factor in _AROUND:
            if (one := self._divisor(factor * math.sqrt(self._length / weight), self._length)) > 1:
                yield (one,)
        if self._length >= _LONG:
            outer = self._divisor((self._length**2 / weight) ** (1 / 3), self._length)
            inner = self._divisor(math.sqrt(outer / weight), outer)
            if 1 < inner <= outer // _FEWEST_CHUNKS:
                yield outer, inner

    @staticmethod
    def _divisor(length: float, whole: int) -> int:
        """A length of chunks near ``length`` that divides the whole, or leaves little of it."""
        near = max(2, min(whole // _FEWEST_CHUNKS, round(length)))
        around = range(max(2, near - near // 3), min(whole // _FEWEST_CHUNKS, near + near // 2) + 1)
        return min(around, key=lambda one: (whole % one, abs(one - near)), default=1)

    def _in_chunks(self, inside: Option, rest: Option, chunks: tuple[int, ...], count: int) -> Option:
        chunked = count * chunks[0]
        left = self._length - chunked
        lengths = (chunked, *chunks)
        starts = sum(self._carried_bytes * whole / one for whole, one in zip(lengths, chunks, strict=False))
        own_bytes, rest_bytes = self._bytes_of(inside.choice.stacked), self._bytes_of(rest.choice.stacked)
        first_starts = self._carried_bytes * count
        held = max(first_starts + left * rest_bytes, starts + chunks[-1] * own_bytes)
        again_s = chunked * len(chunks) * self._body_s
        again_s += (inside.again_s * chunked + rest.again_s * left) / self._length
        choice = Choice(rest.choice.stacked if left else frozenset(), chunked, chunks, inside.choice.stacked)
        return Option(choice, held, again_s)
