"""Regions of a step that can be cut along an axis: which calls, along which axes, and what becomes of their results.

A *way* of a call says how it can be cut: which operands are cut along which axis, and what the results of the slices
are: parts that are put together along an axis, or terms of a sum. A *region* is a set of calls with a way each that fit
together: what one call leaves cut, the next one reads cut. So the region can run slice by slice, from its first call to
its last, and only one slice of what lies inside is in memory at any time.

The forward and the backward ops of a step are in one list. The head of a language model is one region of it: the
product for the logits, their softmax, the loss, and the way back to the gradients of both factors of the product.

A region is grown from a wide value, call by call, in time that is linear in the size of the program for each start. It
need not be the largest possible one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal, TypeAlias

SUMMED: Final = "sum"
"""A result whose slices are the terms of a sum."""

Part: TypeAlias = int | Literal["sum"] | None
"""What a slice of a call makes: a part along an axis, a term of a sum, or None for what nobody may read."""

_MOST_STARTS: Final = 12
"""Wide values from which a region is grown. A judgement: a step has few values that are much wider than the rest. With
more, steps whose operators are unknown take longer to plan; with fewer, a region is missed where the widest values
cannot be cut."""

_MOST_OF_IT: Final = 0.5
"""Of the bytes that the best region saves, a smaller one with fewer calls saves this share at least. A judgement: a
head's logits and their gradients make up nearly all of what any region around them saves."""

_MOST_ROUNDS: Final = 32
"""How often a region is mended, each time in time that is linear in the size of the step. A judgement: a head needs one
or two rounds. With more, a region that reaches through many layers takes seconds to be given up."""

_MOST_BETWEEN: Final = 100
"""A region with more calls between its own is given up. A judgement: 8 to 13 stood between those of heads in JAX, 280
and more between those of a region that reached through two layers. With more, deep models take longer."""

_ENOUGH_UNITS: Final = 64
"""With so many units along an axis, an axis with more has no merit. A judgement: a head in 64 slices takes a few
percent of its bytes. With 1, logits of a few long sequences are cut between the sequences, and into no more slices."""

_WIDE: Final = 0.25
"""A value is wide if it has this share of the bytes of the value from which a region is grown, and a region grows
through wide values only. A judgement: a cast to half precision halves a value, and a mask of bytes has a quarter. With
a smaller share, a region takes in the layers beside it, which costs room for their results and saves little."""


@dataclass(frozen=True)
class Way:
    """One way to cut a call.

    Attributes:
        inputs: for each operand the axis along which it is cut, None where each slice reads the whole of it.
        outputs: for each result what a slice makes of it.
    """

    inputs: tuple[int | None, ...]
    outputs: tuple[Part, ...]


@dataclass(frozen=True)
class Call:
    """A call of an operator, views counted as operators.

    Attributes:
        inputs: the values that it reads, one for each operand.
        outputs: the values that it makes.
        ways: how it can be cut; none for an operator that is unknown, or random, or that writes.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    ways: tuple[Way, ...] = ()


@dataclass(frozen=True)
class Program:
    """The calls of a step, each behind those whose results it reads.

    Attributes:
        calls: in program order.
        shapes: of the values.
        size_bytes: of the values.
        returned: the values that are results of the step.
        views: the values that share the bytes of what they are made of.
    """

    calls: tuple[Call, ...]
    shapes: tuple[tuple[int, ...], ...]
    size_bytes: tuple[int, ...]
    returned: frozenset[int] = frozenset()
    views: frozenset[int] = frozenset()

    @cached_property
    def producer(self) -> Mapping[int, int]:
        """For each value that a call makes, the call."""
        return {value: index for index, call in enumerate(self.calls) for value in call.outputs}

    @cached_property
    def readers(self) -> Mapping[int, tuple[int, ...]]:
        """For each value that is read, the calls that read it."""
        found: dict[int, dict[int, None]] = {}
        for index, call in enumerate(self.calls):
            for value in call.inputs:
                found.setdefault(value, {})[index] = None
        return {value: tuple(readers) for value, readers in found.items()}

    @cached_property
    def earlier_calls(self) -> tuple[tuple[int, ...], ...]:
        """For each call, those whose results it reads."""
        made = self.producer
        return tuple(tuple({made[value]: None for value in call.inputs if value in made}) for call in self.calls)

    @cached_property
    def next_calls(self) -> tuple[tuple[int, ...], ...]:
        """For each call, those that read its results."""
        found: list[list[int]] = [[] for _ in self.calls]
        for index, earlier in enumerate(self.earlier_calls):
            for one in earlier:
                found[one].append(index)
        return tuple(map(tuple, found))


@dataclass(frozen=True)
class Region:
    """Calls that can run slice by slice.

    Attributes:
        ways: of each call, in program order.
        concatenated: the results that are read outside, or returned, and that slices make parts of, with the axis.
        summed: those whose slices are terms of a sum.
        length: how many equal units each cut axis can be divided into; a slice is one or more of them.
        saved_bytes: of the values that live inside only. A slice has its share of them.
    """

    ways: Mapping[int, Way]
    concatenated: Mapping[int, int]
    summed: frozenset[int]
    length: int
    saved_bytes: int

    def bounds(self, slices: int) -> tuple[int, ...]:
        """Where slices begin and end, in units; one number more than there are slices.

        Raises:
            ValueError: if there are fewer units than slices.
        """
        if not 1 <= slices <= self.length:
            raise ValueError(f"a region of {self.length} units cannot be cut into {slices} slices")
        return tuple(number * self.length // slices for number in range(slices + 1))


def find_region(program: Program, banned: Iterable[int] = (), least_bytes: int = 1) -> Region | None:
    """A region that saves many bytes, grown from one of the widest values; None if there is none.

    Of two regions that save about as much, the one that is grown from the wider value has fewer calls.

    Args:
        program: the step.
        banned: calls that are left out, those of other regions say.
        least_bytes: what it must save.
    """
    left_out = frozenset(banned)
    by_size = sorted(program.producer, key=lambda value: (-program.size_bytes[value], value))
    found: list[Region] = []
    starts = 0
    for value in by_size:
        if starts == _MOST_STARTS:
            break
        if any(program.producer[value] in one.ways for one in found):
            continue  # The region around it would be much the same.
        starts += 1
        region = best_around(program, value, left_out, least_bytes=least_bytes)
        if region is not None:
            found.append(region)
    most_bytes = max((one.saved_bytes for one in found), default=0)
    return next((one for one in found if one.saved_bytes >= _MOST_OF_IT * most_bytes), None)


def best_around(
    program: Program, value: int, banned: Collection[int], wide: float = _WIDE, *, least_bytes: int = 1
) -> Region | None:
    """The best region that grows from one value; None where there is none.

    Args:
        program: the step.
        value: made by one of its calls.
        banned: calls that are left out.
        wide: the share of the value's bytes that a value has through which the region grows.
        least_bytes: what the region must save.
    """
    axes = [axis for axis, size in enumerate(program.shapes[value]) if size > 1]
    regions = [
        _Growth(program, value, axis, banned, wide, prefers_last).region(least_bytes)
        for axis in axes
        for prefers_last in (False, True)
    ]
    good = [one for one in regions if one is not None and one.length > 1 and one.saved_bytes >= least_bytes]
    return _best(good) if good else None


def _best(regions: Sequence[Region]) -> Region:
    """Of the regions around one value, cut along different axes, the one of which slices leave the least in memory."""

    def gain(one: Region) -> float:
        return one.saved_bytes * (1 - 1 / min(one.length, _ENOUGH_UNITS))

    return max(regions, key=lambda one: (gain(one), -len(one.ways)))


class _Growth:
    """A region while it grows from one value that is cut along one axis.

    Rows of a matrix go on, behind a change of shape, as rows of samples or as whole samples. Which of the two reaches
    further is not known beforehand, so that each is tried: ``prefers_last`` takes the last way of a call that fits.
    """

    def __init__(
        self, program: Program, value: int, axis: int, banned: Collection[int], wide: float, prefers_last: bool
    ) -> None:
        self._prefers_last = prefers_last
        self._program = program
        self._start = value
        self._banned = set(banned)
        self._least_bytes = wide * program.size_bytes[value]
        self._ways: dict[int, Way] = {}
        self._axes: dict[int, int] = {value: axis}

    def region(self, least_bytes: int) -> Region | None:
        """The region, once nothing can be added and nothing contradicts; None where it saves less than that."""
        self._grow([self._start])
        for _ in range(_MOST_ROUNDS):
            made = (value for index in self._ways for value in self._program.calls[index].outputs)
            if sum(self._program.size_bytes[value] for value in made) < least_bytes:
                return None
            done = self._mend()
            if done is not False:
                is_whole = done and self._program.producer.get(self._start) in self._ways
                return self._finished() if is_whole else None
        return None

    def _grow(self, values: list[int]) -> None:
        program = self._program
        while values:
            value = values.pop()
            around = (program.producer.get(value), *program.readers.get(value, ()))
            for index in around:
                if index is None or index in self._ways or index in self._banned:
                    continue
                way = self._way_of(index)
                if way is not None:
                    values.extend(self._add(index, way))

    def _add(self, index: int, way: Way) -> Iterator[int]:
        """Take a call in; the wide values that it leads to are to be followed."""
        self._ways[index] = way
        for value, part in self._cut_values(index, way):
            if value not in self._axes:
                self._axes[value] = part
                if self._program.size_bytes[value] >= self._least_bytes:
                    yield value

    def _cut_values(self, index: int, way: Way) -> Iterator[tuple[int, int]]:
        call = self._program.calls[index]
        for value, part in (*zip(call.inputs, way.inputs, strict=True), *zip(call.outputs, way.outputs, strict=True)):
            if isinstance(part, int):
                yield value, part

    def _way_of(self, index: int) -> Way | None:
        """A way of a call that fits what is decided, and cuts something of that."""
        call = self._program.calls[index]
        for way in reversed(call.ways) if self._prefers_last else call.ways:
            known = [(value, part) for value, part in self._cut_values(index, way) if value in self._axes]
            fits = bool(known) and all(self._axes[value] == part for value, part in known)
            if fits and self._reads_rightly(index, way) and not self._is_misread(index, way):
                return way
        return None

    def _reads_rightly(self, index: int, way: Way) -> bool:
        """Is what the call reads of the region cut as it reads it?"""
        for value, axis in zip(self._program.calls[index].inputs, way.inputs, strict=True):
            maker = self._program.producer.get(value)
            if maker in self._ways and self._part(value) != axis:
                return False
        return True

    def _is_misread(self, index: int, way: Way) -> bool:
        """Does a call of the region read a result otherwise than as this way makes it, or one that nobody may read?"""
        for value, part in zip(self._program.calls[index].outputs, way.outputs, strict=True):
            if part is None and (value in self._program.readers or value in self._program.returned):
                return True
            for reader in self._program.readers.get(value, ()):
                if reader in self._ways:
                    read = zip(self._program.calls[reader].inputs, self._ways[reader].inputs, strict=True)
                    if any(one == value and axis != part for one, axis in read):
                        return True
        return False

    def _part(self, value: int) -> Part:
        """What a slice makes of a value of the region."""
        maker = self._program.producer[value]
        return self._ways[maker].outputs[self._program.calls[maker].outputs.index(value)]

    def _mend(self) -> bool | None:
        """Take in, or leave out, what stands between calls; True once nothing does, None if no region is left."""
        self._keep_connected()
        if not self._ways:
            return None
        between = self._between()
        if not between:
            return True
        if len(between) > _MOST_BETWEEN:
            return None
        for index in between:
            way = None if index in self._banned else self._way_of(index)
            if way is not None:
                self._grow(list(self._add(index, way)))
                return False
        # Nothing that stands between can be cut. What comes behind the first of it cannot be in the region.
        behind = self._reached_from({between[0]})
        for index in [one for one in self._ways if one in behind]:
            del self._ways[index]
            self._banned.add(index)
        return False

    def _keep_connected(self) -> None:
        """Leave out what no cut value ties to the start any more."""
        program = self._program
        kept: set[int] = set()
        waiting = [program.producer[self._start]] if program.producer.get(self._start) in self._ways else []
        while waiting:
            index = waiting.pop()
            if index in kept:
                continue
            kept.add(index)
            for value, _ in self._cut_values(index, self._ways[index]):
                around = (program.producer.get(value), *program.readers.get(value, ()))
                waiting.extend(one for one in around if one in self._ways)
        for index in [one for one in self._ways if one not in kept]:
            del self._ways[index]

    def _between(self) -> list[int]:
        """The calls outside that read, directly or through others, of the region, and that it reads of."""
        first, last = min(self._ways), max(self._ways)
        behind = self._reached_from(self._ways)
        leads: set[int] = set()
        for index in range(last, first, -1):
            if any(one in self._ways or one in leads for one in self._program.next_calls[index]):
                leads.add(index)
        return sorted(index for index in behind & leads if index not in self._ways)

    def _reached_from(self, calls: Collection[int]) -> set[int]:
        """The calls up to the region's last one that read of some calls, directly or through others."""
        found: set[int] = set()
        for index in range(min(calls) + 1, max(self._ways) + 1):
            if any(one in calls or one in found for one in self._program.earlier_calls[index]):
                found.add(index)
        return found

    def _finished(self) -> Region:
        program = self._program
        concatenated: dict[int, int] = {}
        summed: set[int] = set()
        inside: set[int] = set()
        sizes: list[int] = []
        for index in sorted(self._ways):
            way = self._ways[index]
            sizes.extend(program.shapes[value][axis] for value, axis in self._cut_values(index, way))
            for value, part in zip(program.calls[index].outputs, way.outputs, strict=True):
                readers = program.readers.get(value, ())
                if value in program.returned or any(one not in self._ways for one in readers):
                    if part == SUMMED:
                        summed.add(value)
                    elif part is not None:
                        concatenated[value] = part
                elif value not in program.views:
                    inside.add(value)
        inside -= self._seen_through_views({*concatenated, *summed})
        return Region(
            {index: self._ways[index] for index in sorted(self._ways)},
            concatenated,
            frozenset(summed),
            math.gcd(*sizes),
            sum(program.size_bytes[value] for value in inside),
        )

    def _seen_through_views(self, kept: Collection[int]) -> set[int]:
        """The values of the region whose bytes are those of a view that is kept."""
        program = self._program
        found: set[int] = set()
        for index in sorted(self._ways, reverse=True):
            call = program.calls[index]
            if any(value in program.views and (value in kept or value in found) for value in call.outputs):
                found.update(call.inputs)
        return found
