"""Inner layers in slices: their forward ops run slice by slice, and once more in the backward part, slice by slice.

The inner layer of an MLP is several times as wide as what the layer reads and returns. Its forward and its backward ops
can be cut along the tokens, yet they are no region: between the two stands the rest of the step. So the forward ops
whose results the backward part reads are copied to the backward part, which makes two regions of the one: the forward
ops, and the copies with the backward ops. Neither leaves anything wide behind. This is a recomputation of the inner
layer that never has more than a slice of it in memory.

All layers that are about as wide are cut, since the widest of those that are not would bind.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from remat.transform.order import order_around
from remat.transform.separable import SUMMED, Call, Program, Region, best_around, find_region

_MOST_LAYERS: Final = 256
"""Layers that are cut. A judgement: deep models have 100; each costs time that is linear in the size of the step."""

_MOST_FAILURES: Final = 12
"""Wide values around which no layer was found before the search ends. A judgement, as for the starts of other regions:
with more, steps that have no such layer take longer to plan."""

_AS_WIDE: Final = 0.5
"""Layers are cut that save this share of what the widest one does. A judgement: cutting the widest halves at least what
binds, so that one of half its size binds next. With 1, a layer that is a little narrower binds at once."""

_WIDE: Final = 0.5
"""A value is followed if it has this share of the bytes of the value from which a layer is grown. An MLP's inner layer
is commonly four times as wide as what is around it; with a quarter, a region would take in the layers around it."""


@dataclass(frozen=True)
class InnerLayers:
    """A step with the forward ops of inner layers copied to its backward part, and its regions.

    Attributes:
        program: the step with the copies.
        origin: for each of its calls the call of the step that it is, or is a copy of.
        value_origin: for each of its values the same; the first ones are the step's own.
        regions: one that is whole in itself, where there is one, then the forward and the backward parts of the layers.
    """

    program: Program
    origin: tuple[int, ...]
    value_origin: tuple[int, ...]
    regions: tuple[Region, ...]


@dataclass(frozen=True)
class _Layer:
    """The forward part of an inner layer.

    Attributes:
        start: the value around which it was grown.
        region: its calls, as the forward part sees them.
        copied: those of them that run again.
    """

    start: int
    region: Region
    copied: tuple[int, ...]


def find_inner_layers(
    program: Program, least_bytes: int = 1, accepts: Callable[[Region], bool] = lambda region: True
) -> InnerLayers | None:
    """The regions of a step, inner layers among them; None where there is no such layer.

    Args:
        program: the step, forward and backward ops.
        least_bytes: what the widest of them must save.
        accepts: can a region that is whole in itself be written?
    """
    last_reads = _last_reads(program)
    turning_point = _turning_point(program, last_reads)
    whole = find_region(program, (), least_bytes)
    if whole is not None and (_leaves_something_wide(program, whole) or not accepts(whole)):
        whole = None  # It is the forward part of a layer, or the backward part; or nobody can write it.
    banned = frozenset(() if whole is None else whole.ways)
    waiting = [value for value, last in last_reads.items() if program.producer[value] <= turning_point < last]
    layers = _layers(program, turning_point, waiting, banned, least_bytes)
    while layers:
        made = _with_copies(program, turning_point, layers)
        regions = [] if whole is None else [_moved(whole, made.origin)]
        taken = {index for one in (*regions, *(layer.region for layer in layers)) for index in one.ways}
        backward: list[Region | None] = []
        for layer, copies in zip(layers, _copies_of(turning_point, layers), strict=True):
            found = best_around(made.program, _copied_value(made, copies, layer.start), taken, _WIDE)
            is_whole = found is not None and found.saved_bytes >= least_bytes * _AS_WIDE and copies <= set(found.ways)
            backward.append(found if is_whole else None)
            taken.update(() if found is None or not is_whole else found.ways)
        pairs = [(layer, one) for layer, one in zip(layers, backward, strict=True) if one is not None]
        fitting = _that_wait_for_no_other(made.program, regions, pairs)
        if len(fitting) == len(layers):
            regions += [layer.region for layer, _ in pairs]
            regions += [one for _, one in pairs]
            return dataclasses.replace(made, regions=tuple(regions))
        layers = fitting
    return None


def _that_wait_for_no_other(
    program: Program, others: Sequence[Region], pairs: Sequence[tuple[_Layer, Region]]
) -> list[_Layer]:
    """The layers whose two regions can run in one place each, beside those of the layers before them."""
    if order_around(program, [*others, *(one for layer, back in pairs for one in (layer.region, back))]) is not None:
        return [layer for layer, _ in pairs]
    regions, fitting = list(others), []
    for layer, backward in pairs:
        if order_around(program, [*regions, layer.region, backward]) is not None:
            regions += [layer.region, backward]
            fitting.append(layer)
    return fitting


def _leaves_something_wide(program: Program, region: Region) -> bool:
    """Does a region make something for others that is about as wide as what lives inside of it?"""
    made = {value for index in region.ways for value in program.calls[index].outputs}
    inside_bytes = max(program.size_bytes[value] for value in made - {*region.concatenated, *region.summed})
    return any(program.size_bytes[value] >= _WIDE * inside_bytes for value in region.concatenated)


def _last_reads(program: Program) -> dict[int, int]:
    """For each value that a call makes, the last call that reads it or a view of it; its maker where none does."""
    last = {value: max(program.readers.get(value, (maker,))) for value, maker in program.producer.items()}
    for call in reversed(program.calls):
        viewed = [last[value] for value in call.outputs if value in program.views]
        for value in call.inputs:
            if value in last:
                last[value] = max((last[value], *viewed))
    return last


def _turning_point(program: Program, last_reads: Mapping[int, int]) -> int:
    """The last call of the forward part: behind it most bytes wait for the backward part."""
    change = [0] * (len(program.calls) + 1)
    for value, maker in program.producer.items():
        if value not in program.views:
            change[maker] += program.size_bytes[value]
            change[last_reads[value]] -= program.size_bytes[value]
    waiting, most, found = 0, -1, 0
    for index in range(len(program.calls)):
        waiting += change[index]
        if waiting > most:
            most, found = waiting, index
    return found


def _layers(
    program: Program, turning_point: int, waiting: Iterable[int], banned: frozenset[int], least_bytes: int
) -> list[_Layer]:
    """The forward parts of inner layers, the widest first, around values that wait for the backward part."""
    calls = program.calls[: turning_point + 1]
    made = {value for call in calls for value in call.outputs}
    forward = dataclasses.replace(program, calls=calls, returned=program.returned & made)
    found: list[_Layer] = []
    taken = {index for index in banned if index <= turning_point}
    failures, narrowest_bytes = 0, 0.0
    for value in sorted(waiting, key=lambda one: (-program.size_bytes[one], one)):
        if failures == _MOST_FAILURES or len(found) == _MOST_LAYERS or program.size_bytes[value] < narrowest_bytes:
            break
        if program.producer[value] in taken or value in program.views:
            continue
        region = best_around(forward, value, taken, _WIDE)
        copied = () if region is None else _copied(program, region, turning_point)
        if region is None or region.saved_bytes < least_bytes or program.producer[value] not in copied:
            failures += 1
            continue
        found.append(_Layer(value, region, copied))
        if len(found) == 1:
            least_bytes = max(least_bytes, int(_AS_WIDE * region.saved_bytes))
            narrowest_bytes = _AS_WIDE * program.size_bytes[value]
        taken.update(region.ways)
    return found


def _copied(program: Program, region: Region, turning_point: int) -> tuple[int, ...]:
    """The calls of a forward region that the backward part needs once more; none where that cannot be."""
    kept = {*region.concatenated, *region.summed}
    needed: set[int] = set()
    waiting = [
        value
        for index in region.ways
        for value in program.calls[index].outputs
        if value not in kept and any(reader > turning_point for reader in program.readers.get(value, ()))
    ]
    while waiting:
        value = waiting.pop()
        index = program.producer[value]
        call, way = program.calls[index], region.ways[index]
        if way.outputs[call.outputs.index(value)] == SUMMED:
            return ()  # A sum over slices is known only when all of them have run.
        if index not in needed:
            needed.add(index)
            waiting += [one for one in call.inputs if program.producer.get(one) in region.ways and one not in kept]
    return tuple(sorted(needed))


def _with_copies(program: Program, turning_point: int, layers: Iterable[_Layer]) -> InnerLayers:
    """The step with copies of the layers' calls behind its forward part, which the backward part reads."""
    copied = [index for layer in layers for index in layer.copied]
    kept = {value for layer in layers for value in (*layer.region.concatenated, *layer.region.summed)}
    shapes, sizes = list(program.shapes), list(program.size_bytes)
    value_origin = list(range(len(shapes)))
    views = set(program.views)
    new_value: dict[int, int] = {}
    for index in copied:
        for value in program.calls[index].outputs:
            new_value[value] = len(shapes)
            shapes.append(program.shapes[value])
            sizes.append(program.size_bytes[value])
            value_origin.append(value)
            if value in program.views:
                views.add(new_value[value])
    renamed = {value: new for value, new in new_value.items() if value not in kept}

    def reading_copies(call: Call, outputs: tuple[int, ...]) -> Call:
        return dataclasses.replace(
            call, inputs=tuple(renamed.get(value, value) for value in call.inputs), outputs=outputs
        )

    copies = [
        reading_copies(program.calls[index], tuple(new_value[value] for value in program.calls[index].outputs))
        for index in copied
    ]
    ahead, behind = program.calls[: turning_point + 1], program.calls[turning_point + 1 :]
    return InnerLayers(
        Program(
            (*ahead, *copies, *(reading_copies(call, call.outputs) for call in behind)),
            tuple(shapes),
            tuple(sizes),
            program.returned,
            frozenset(views),
        ),
        (*range(turning_point + 1), *copied, *range(turning_point + 1, len(program.calls))),
        tuple(value_origin),
        (),
    )


def _copies_of(turning_point: int, layers: Iterable[_Layer]) -> list[set[int]]:
    """For each layer the numbers of its copies."""
    found: list[set[int]] = []
    first = turning_point + 1
    for layer in layers:
        found.append(set(range(first, first + len(layer.copied))))
        first += len(layer.copied)
    return found


def _copied_value(made: InnerLayers, copies: Collection[int], value: int) -> int:
    outputs = (one for index in copies for one in made.program.calls[index].outputs)
    return next(one for one in outputs if made.value_origin[one] == value)


def _moved(region: Region, origin: tuple[int, ...]) -> Region:
    """A region of the step, its calls numbered as they are beside the copies."""
    # The copies stand behind the forward part, so that of two numbers the one that is no copy is meant.
    first_copy = next((new for new, old in enumerate(origin) if new != old), len(origin))
    own = {old: new for new, old in enumerate(origin) if new < first_copy or old >= first_copy}
    return dataclasses.replace(region, ways={own[index]: way for index, way in region.ways.items()})
