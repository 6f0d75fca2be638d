"""What a forward loop may store for its backward loop, from most to least: a menu with bytes and seconds of each way.

An iteration of the backward loop makes values again that were not stored. Bytes and seconds are those of a model, which
only orders the options.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import numpy as np

from remat.planners.linear.keep import KeepModel
from remat.planners.view.problem import BoolArray, FloatArray

LITTLE: Final = 1e-6
"""The weight of what decides among equals, and the rounding that a limit on bytes allows."""

_SMALLEST_TIME_S: Final = 1e-300  # In place of a body that takes no time, by which nothing can be divided.

# The model of what to store is solved to this share of the optimum. Bodies have tens of values, for which HiGHS takes
# milliseconds. So many nodes end the search in bodies of thousands, on every machine alike; the clock is for a model
# that HiGHS cannot even begin to solve.
_GAP: Final = 0.005
_MOST_NODES: Final = 200
_SAFETY_S: Final = 60.0

_Way = TypeVar("_Way")


@dataclass(frozen=True)
class Option(Generic[_Way]):
    """One way to run a pair of loops.

    Attributes:
        way: what the front end writes.
        held_bytes: what lies in memory for that, at most.
        again_s: seconds of what is computed again.
    """

    way: _Way
    held_bytes: float
    again_s: float


@dataclass(frozen=True)
class BodyValues:
    """The forward body of a pair of loops, in numbers. A value that the backward body has anyway is left out.

    Attributes:
        size_bytes: of each value, in one iteration.
        made_by: for each value the operation that makes it, None where none does.
        wanted: the values that the backward body reads.
        time_s: of each operation.
        made_bytes: what each operation makes.
        may_repeat: for each operation, may the backward body run it again?
        reads: for each operation, the values that it reads.
        iterations: of the loop.
    """

    size_bytes: Sequence[int]
    made_by: Sequence[int | None]
    wanted: Sequence[int]
    time_s: Sequence[float]
    made_bytes: Sequence[int]
    may_repeat: Sequence[bool]
    reads: Sequence[Sequence[int]]
    iterations: int

    def cheapest(self, share: float) -> tuple[frozenset[int], frozenset[int]]:
        """The values to store so that making the rest again costs least, and the operations that make it.

        Args:
            share: of the bytes of storing everything that is wanted; 0 for the least that is possible.
        """
        everything = frozenset(self.wanted), frozenset[int]()
        if share >= 1.0:
            return everything
        size = np.array(self.size_bytes, dtype=np.float64)
        seconds = np.array(self.time_s, dtype=np.float64) * self.iterations
        largest = max(1.0, float(size.max(initial=0.0)))
        kept = size / largest
        again = np.array(self.made_bytes, dtype=np.float64) / (largest * self.iterations)
        costs = LITTLE * kept, seconds / max(float(seconds.max(initial=0.0)), _SMALLEST_TIME_S)
        room = share * float(kept[list(self.wanted)].sum())
        found = self._best(*costs, kept, again, room)
        if found is None:
            least = self._best(kept + LITTLE * costs[0], again + LITTLE * costs[1], kept, again, np.inf)
            if least is None:
                return everything
            smallest = float(kept @ least[0] + again @ least[1])
            found = self._best(*costs, kept, again, smallest * (1 + LITTLE)) or least
        stored, repeated = (frozenset(np.flatnonzero(chosen).tolist()) for chosen in found)
        return stored, repeated

    def options(self, shares: Sequence[float]) -> list[Option[tuple[frozenset[int], frozenset[int]]]]:
        """The cheapest way for each share, those that no other beats in both bytes and seconds, most bytes first."""
        return best_of([self.option(*way) for way in self.cheapest_for(shares)])

    def cheapest_for(self, shares: Sequence[float]) -> Iterator[tuple[frozenset[int], frozenset[int]]]:
        """As ``cheapest`` for ever smaller shares. A way that fits several of them is looked for once."""
        wanted_bytes = sum(self.size_bytes[value] for value in self.wanted)
        way: tuple[frozenset[int], frozenset[int]] | None = None
        is_least = False
        for share in shares:
            if way is None or (not is_least and self._bytes_of(*way) > share * wanted_bytes):
                way = self.cheapest(share)
                is_least = self._bytes_of(*way) > share * wanted_bytes * (1 + LITTLE)
            yield way

    def _bytes_of(self, stored: frozenset[int], again: frozenset[int]) -> float:
        """What an iteration stores, and its part of what the running one makes again."""
        made = sum(self.made_bytes[op] for op in again)
        return sum(self.size_bytes[value] for value in stored) + made / self.iterations

    def _best(
        self, keep_cost: FloatArray, again_cost: FloatArray, kept: FloatArray, again: FloatArray, room: float
    ) -> tuple[BoolArray, BoolArray] | None:
        model = KeepModel(keep_cost.tolist(), again_cost.tolist(), self.made_by, self.may_repeat)
        for value in self.wanted:
            model.require(value)
        for number, reads in enumerate(self.reads):
            for value in reads:
                model.require_read(number, value)
        model.limit(enumerate(kept.tolist()), enumerate(again.tolist()), room)
        return model.solve(time_limit_s=_SAFETY_S, gap=_GAP, most_nodes=_MOST_NODES)

    def all_again(self) -> tuple[frozenset[int], frozenset[int]]:
        """Nothing is stored but what is given to an iteration or must not run again, as under ``jax.checkpoint``."""
        stored: set[int] = set()
        again: set[int] = set()
        pending = list(self.wanted)
        while pending:
            value = pending.pop()
            op = self.made_by[value]
            if op is None or not self.may_repeat[op]:
                stored.add(value)
            elif op not in again:
                again.add(op)
                pending += self.reads[op]
        return frozenset(stored), frozenset(again)

    def option(self, stored: frozenset[int], again: frozenset[int]) -> Option[tuple[frozenset[int], frozenset[int]]]:
        """What it holds and costs to store these values and to run these operations again."""
        held = self.iterations * sum(self.size_bytes[value] for value in stored)
        held += sum(self.made_bytes[op] for op in again)
        return Option((stored, again), held, self.iterations * sum(self.time_s[op] for op in again))


def best_of(options: Sequence[Option[_Way]]) -> list[Option[_Way]]:
    """The options that no other beats in both bytes and seconds, most bytes first."""
    kept: list[Option[_Way]] = []
    for option in sorted(options, key=lambda one: (one.again_s, one.held_bytes)):
        if not kept or option.held_bytes < kept[-1].held_bytes:
            kept.append(option)
    return kept


def merged(menus: Sequence[Sequence[Option[_Way]]]) -> list[tuple[_Way, ...]]:
    """One list of ways for several pairs, from most to least bytes: the next step is the one that saves most.

    Each step takes one pair down its menu, from one option on its convex hull to the next: there each further byte
    costs more than the one before. The options between the two come in between, for budgets that allow them.
    """
    hulls = [_hull(menu) for menu in menus]
    at = [hull[0].way for hull in hulls]
    rows = [tuple(at)]
    for _, number, place in sorted(_steps(hulls)):
        menu, before, after = menus[number], hulls[number][place - 1], hulls[number][place]
        for option in menu[menu.index(before) + 1 : menu.index(after) + 1]:
            at[number] = option.way
            rows.append(tuple(at))
    return rows


def _steps(hulls: Sequence[Sequence[Option[_Way]]]) -> Iterator[tuple[float, int, int]]:
    for number, hull in enumerate(hulls):
        for place, (before, after) in enumerate(itertools.pairwise(hull), 1):
            yield _rate(before, after), number, place


def _rate(before: Option[_Way], after: Option[_Way]) -> float:
    """Seconds for each byte that is saved."""
    return (after.again_s - before.again_s) / max(1.0, before.held_bytes - after.held_bytes)


def _hull(menu: Sequence[Option[_Way]]) -> list[Option[_Way]]:
    hull: list[Option[_Way]] = []
    for option in menu:
        while len(hull) > 1 and _rate(hull[-2], hull[-1]) >= _rate(hull[-1], option):
            hull.pop()
        hull.append(option)
    return hull
