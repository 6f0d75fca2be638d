"""Values of a traced step that are computed only if somebody asks for them.

Whether a mask hides anything may follow from what a step is given by way of a tensor of millions of elements. To run
every such operator would cost what the step costs; to know nothing of it would guess the branch. So the operator and
its arguments are noted, and run when a truth value, a number or a shape hangs on them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final

import torch

from remat.torch import _private
from remat.torch._private import OpOverload

_MOST_BYTES: Final = 1 << 32
"""What all operators together may make for one answer. A judgement, not measured: a few seconds on a CPU. The mask of 4
sequences of 4,096 tokens is made of less; what needs more is guessed, and the first real step tells."""

_numbers = count()


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies in its storage."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: torch.Tensor) -> Place:
        """The place of a tensor."""
        return Place(int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)

    def within(self, base: torch.Tensor) -> torch.Tensor:
        """The tensor at this place of the storage in which another lies."""
        empty = torch.empty(0, dtype=self.dtype, device=base.device)
        return empty.set_(base.untyped_storage(), self.offset, self.shape, self.stride)


@dataclass(frozen=True, slots=True)
class Pattern:
    """A tensor that an operator reads the shape of, and nothing else."""

    place: Place
    device: torch.device


@dataclass(slots=True)
class LateValue:
    """What will be in a storage: after an operator that makes it, or that writes to it.

    Attributes:
        call: the operator; None where ``found`` was there from the start.
        slot: which of the call's results lies in the storage; those written to come after those made.
        found: a tensor in a storage with the values, once they are computed.
    """

    call: LateCall | None
    slot: int
    found: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Read:
    """An argument of a call: a place in a storage, and what will be in it."""

    value: LateValue
    place: Place


@dataclass(slots=True, eq=False)
class LateCall:
    """An operator that has not run.

    Attributes:
        func: the operator.
        arguments: positional ones and those by name, each tensor replaced by a ``Read`` or a ``Pattern``.
        written: which tensors among the arguments, in turn, it writes to.
        size_bytes: of all storages that it makes.
        number: counts calls in the order in which they were noted.
    """

    func: OpOverload
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    written: tuple[int, ...]
    size_bytes: int
    number: int = field(default_factory=lambda: next(_numbers))

    def reads(self) -> list[LateValue]:
        """What must be computed before."""
        return [one.value for one in _private.tree_leaves(self.arguments) if isinstance(one, Read)]

    def run(self, values: dict[tuple[int, int], torch.Tensor]) -> list[torch.Tensor]:
        """Results of the call, then what it has written to; each in a storage of its own.

        Args:
            values: what earlier calls returned, by a call's number and the slot.
        """
        given: list[torch.Tensor] = []
        copies: dict[int, torch.Tensor] = {}
        reads = [one for one in _private.tree_leaves(self.arguments) if isinstance(one, Read | Pattern)]
        changed = {id(read.value) for number in self.written if isinstance(read := reads[number], Read)}

        def materialized(one: Read | Pattern) -> torch.Tensor:
            if isinstance(one, Pattern):
                place = one.place
                made = torch.empty_strided(place.shape, place.stride, dtype=place.dtype, device=one.device)
            else:
                base = one.value.found
                if base is None:
                    assert one.value.call is not None
                    base = values[one.value.call.number, one.value.slot]
                if id(one.value) in changed:
                    if id(one.value) not in copies:
                        copies[id(one.value)] = _private.copy_of_storage(base)
                    base = copies[id(one.value)]
                made = one.place.within(base)
            given.append(made)
            return made

        args, kwargs = _private.tree_map_only((Read, Pattern), materialized, self.arguments)
        out = self.func(*args, **kwargs)
        made = [one for one in _private.tree_leaves(out) if isinstance(one, torch.Tensor)]
        return [*made, *(given[number] for number in self.written)]


def compute(wanted: LateValue) -> torch.Tensor | None:
    """A tensor in a storage with the values that are wanted; None where that takes too much work.

    Each operator runs once, in the order in which the step ran them, and results go when the last reader has run.
    """
    if wanted.found is not None:
        return wanted.found
    calls: dict[int, LateCall] = {}
    waiting = [wanted]
    readers: Counter[tuple[int, int]] = Counter()
    size_bytes = 0
    while waiting:
        value = waiting.pop()
        if value.found is not None or value.call is None:
            continue
        readers[value.call.number, value.slot] += 1
        if value.call.number in calls:
            continue
        calls[value.call.number] = value.call
        size_bytes += value.call.size_bytes
        if size_bytes > _MOST_BYTES:
            return None
        waiting += value.call.reads()
    values: dict[tuple[int, int], torch.Tensor] = {}
    with _private.no_modes(), torch.no_grad():
        for number in sorted(calls):
            for slot, result in enumerate(calls[number].run(values)):
                if readers[number, slot]:
                    values[number, slot] = result
            for read in calls[number].reads():
                if read.found is None and read.call is not None:
                    readers[read.call.number, read.slot] -= 1
                    if not readers[read.call.number, read.slot]:
                        del values[read.call.number, read.slot]
    assert wanted.call is not None
    return values[wanted.call.number, wanted.slot]
