"""What the loops of a pair may leave behind, from most to least: a menu with the bytes and the seconds of each option.

Two things save bytes. An iteration of the backward loop makes values again that were not stacked. And the first
iterations run in chunks: then not even what the loop carries is stacked for each iteration, and the backward loop runs
each chunk forward once more. Bytes and seconds are those of a model; they only order the options.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from remat.core.graph import Graph
from remat.fit.loop_menu import LITTLE, BodyValues, Option
from remat.jax.scans.loops import Choice
from remat.jax.scans.pairs import Pair
from remat.jax.trace import op_facts
from remat.jax.trace.program import Program

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


class LoopBody:
    """The forward body of a pair: what the backward one needs of it, and what keeping or making that again costs.

    Args:
        pair: the loops.
        body: the forward body.
        graph: its graph.
        once: ids of values that must not be made again, whatever made them.
    """

    def __init__(self, pair: Pair, body: Program, graph: Graph, once: frozenset[int] = frozenset()) -> None:
        self._length = int(pair.first.eqn.params["length"])
        self._body_s = graph.time_s
        self.wanted = [value for value in dict.fromkeys(pair.needed) if value not in pair.free]
        instructions = body.instructions
        producer = {value: n for n, instruction in enumerate(instructions) for value in instruction.outputs}
        read = (value for instruction in instructions for value in instruction.reads)
        every = dict.fromkeys([*self.wanted, *producer, *read])
        self._values = [value for value in every if value not in pair.free]
        self._size = {value: op_facts.size_bytes(body.avals[value]) for value in self._values}
        column = {value: k for k, value in enumerate(self._values)}
        self._numbers = BodyValues(
            size_bytes=list(self._size.values()),
            made_by=[producer.get(value) for value in self._values],
            wanted=[column[value] for value in self.wanted],
            time_s=[op.time_s for op in graph.ops],
            made_bytes=[sum(graph.tensors[value].size_bytes for value in one.outputs) for one in instructions],
            may_repeat=[
                all(op_facts.may_repeat(each.eqn) and once.isdisjoint(each.outputs) for each in one.equations)
                for one in instructions
            ],
            reads=[[column[value] for value in one.reads if value in column] for one in instructions],
            iterations=self._length,
        )
        _, carried = pair.first.counts
        self._carried_bytes = float(sum(op_facts.size_bytes(var.aval) for var in pair.first.eqn.outvars[:carried]))

    def cheapest(self, share: float) -> Option[Choice]:
        """The values to stack so that making the rest again costs least.

        Args:
            share: of the bytes of stacking everything that is needed; 0 for the least that is possible.
        """
        return self._option(*self._numbers.cheapest(share))

    def _option(self, stored: frozenset[int], again: frozenset[int]) -> Option[Choice]:
        option = self._numbers.option(stored, again)
        return Option(Choice(frozenset(self._values[number] for number in stored)), option.held_bytes, option.again_s)

    def checkpointed(self) -> Option[Choice]:
        """All is made again of what the loop carries into an iteration, as with ``jax.checkpoint`` around its body.

        It may hold more than other options: its bytes are not those of the model, which takes all that an iteration
        makes again to be there at once.
        """
        return self._option(*self._numbers.all_again())

    def cheapest_for_shares(self) -> list[Option[Choice]]:
        """The option of each share, most bytes first; those below the least that is possible are left out."""
        options: list[Option[Choice]] = []
        least = self.cheapest(0.0)
        for way in self._numbers.cheapest_for(_SHARES):
            options.append(self._option(*way))
            if options[-1].held_bytes <= least.held_bytes * (1 + LITTLE):
                break
        return [*options, least]

    def options(self) -> list[Option[Choice]]:
        """All options: first those without chunks, most bytes first, down to the least that is possible."""
        whole = self.cheapest_for_shares()
        return [*whole, *self.chunked(whole[0], whole[-1])]

    def _bytes_of(self, values: frozenset[int]) -> float:
        return float(sum(self._size[value] for value in values))

    def chunked(self, most: Option[Choice], least: Option[Choice]) -> list[Option[Choice]]:
        """Options whose first iterations run in chunks.

        Args:
            most: the option that stacks most.
            least: the one that stacks least.
        """
        if not self._carried_bytes or not all(self._numbers.may_repeat):
            return []
        options = []
        for inside in (most, least):
            own_bytes = self._bytes_of(inside.way.stacked)
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

    def _in_chunks(
        self, inside: Option[Choice], rest: Option[Choice], chunks: tuple[int, ...], count: int
    ) -> Option[Choice]:
        chunked = count * chunks[0]
        left = self._length - chunked
        lengths = (chunked, *chunks)
        starts = sum(self._carried_bytes * whole / one for whole, one in zip(lengths, chunks, strict=False))
        own_bytes, rest_bytes = self._bytes_of(inside.way.stacked), self._bytes_of(rest.way.stacked)
        first_starts = self._carried_bytes * count
        # What an iteration makes again lies beside what is stacked: in a body with loops of its own it is large.
        rest_made, own_made = rest.held_bytes - self._length * rest_bytes, inside.held_bytes - self._length * own_bytes
        held = max(
            first_starts + left * rest_bytes + (rest_made if left else 0.0), starts + chunks[-1] * own_bytes + own_made
        )
        again_s = chunked * len(chunks) * self._body_s
        again_s += (inside.again_s * chunked + rest.again_s * left) / self._length
        choice = Choice(rest.way.stacked if left else frozenset(), chunked, chunks, inside.way.stacked)
        return Option(choice, held, again_s)
