"""A region, slice by slice: the order of what has to be written, handed to a front end that writes it.

The slices run one after the other, and all calls of one slice run before the next one begins. So a slice's backward ops
stand directly behind its forward ops. What is read outside is put together in one buffer for each result: parts are
copied to their place, terms are added up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from remat.transform.separable import SUMMED, Program, Region

Handle = TypeVar("Handle")


@dataclass(frozen=True)
class Slice:
    """One slice of a region.

    Attributes:
        number: of the slice, from 0.
        start: its first unit.
        stop: the unit behind its last one.
        length: units of the whole region.
    """

    number: int
    start: int
    stop: int
    length: int

    def of(self, size: int) -> tuple[int, int]:
        """Where the slice begins and ends on an axis of that size."""
        return self.start * size // self.length, self.stop * size // self.length

    def shape(self, shape: Sequence[int], axis: int | None) -> tuple[int, ...]:
        """The shape of the slice of a value of that shape."""
        found = list(shape)
        if axis is not None:
            start, stop = self.of(found[axis])
            found[axis] = stop - start
        return tuple(found)


class Writer(Protocol, Generic[Handle]):
    """What a front end supplies: how each thing is written; a handle is whatever stands for a value there."""

    def whole(self, value: int) -> Handle:
        """A value from outside of the region."""

    def part(self, value: int, axis: int, cut: Slice) -> Handle:
        """A slice of a value from outside of the region."""

    def run(self, call: int, operands: Sequence[Handle], cut: Slice) -> Sequence[Handle]:
        """A slice of a call; a handle for each result."""

    def put(self, value: int, axis: int, cut: Slice, made: Handle) -> None:
        """Copy a part of a result to its place in the result's buffer."""

    def add(self, value: int, cut: Slice, made: Handle) -> None:
        """Add a term of a result to the result's buffer; the first slice's term is what the buffer starts with."""


def write_slices(program: Program, region: Region, slices: int, writer: Writer[Handle]) -> None:
    """Have a region written in slices.

    Raises:
        ValueError: if the region cannot be cut into so many.
    """
    bounds = region.bounds(slices)
    for number in range(slices):
        write_slice(program, region, Slice(number, bounds[number], bounds[number + 1], region.length), writer)


def write_slice(program: Program, region: Region, cut: Slice, writer: Writer[Handle]) -> None:
    """Have one slice of a region written. A front end with a loop writes one that stands for all."""
    made: dict[int, Handle] = {}
    for index, way in region.ways.items():
        call = program.calls[index]
        operands = [
            made[value] if value in made else writer.whole(value) if axis is None else writer.part(value, axis, cut)
            for value, axis in zip(call.inputs, way.inputs, strict=True)
        ]
        results = writer.run(index, operands, cut)
        for value, part, result in zip(call.outputs, way.outputs, results, strict=True):
            if part is not None and part != SUMMED:
                made[value] = result
            if value in region.summed:
                writer.add(value, cut, result)
            elif value in region.concatenated:
                writer.put(value, region.concatenated[value], cut, result)
