"""The gradients of a step that runs without memory: whose they are, and what becomes of each once it is final."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, Final

import torch

from remat.torch import _private
from remat.torch.trace.recording import KnownStorages, RecordedOp, RecordedStorage, Recording, has_storage

EARLIER_GRADIENTS: Final = "gradients of earlier micro-batches"
"""The name of the op that makes whole gradients that are there before the step."""


class Gradients:
    """What autograd, ``fully_shard`` and early updates do with finished gradients, noted in a recording.

    Args:
        recording: what was seen of the step so far.
        storages: which storage a tensor is in.
        reduce: notes that replicas reduce the gradient of a leaf, given the number of its storage.
    """

    def __init__(
        self, recording: Recording, storages: KnownStorages, reduce: Callable[[torch.Tensor, int], None]
    ) -> None:
        self._recording = recording
        self._storages = storages
        self._reduce = reduce
        self._held: list[Any] = []
        # By the address of the parameter.
        self._gradients: dict[int, int] = {}
        self._gradients_in: dict[int, int] = {}
        self._gathered: frozenset[int] = frozenset()
        self._early: frozenset[int] = frozenset()
        self._update_of: Callable[[torch.Tensor], None] | None = None
        self._used_early: set[int] = set()
        self._let_go: dict[int, int] = {}

    def accumulation_into(self, leaf: torch.Tensor, exists: bool) -> Callable[[torch.Tensor], None]:
        """What autograd does with the finished gradient of a leaf: take it over, copy it, or add it to an older one."""
        if exists:
            self._recording.accumulates_into.append(weakref.ref(leaf))

        def accumulate_and_update(gradient: torch.Tensor) -> None:
            accumulate(gradient)
            number = self._gradients.get(id(leaf))
            if number is not None:
                self._reduce(leaf, number)
            if self._update_of is not None and id(leaf) in self._early and number is not None:
                begins = len(self._recording.ops)
                self._update_of(leaf)
                self._recording.updated[id(leaf)] = self._storages.of(leaf), range(begins, len(self._recording.ops))
                del self._gradients[id(leaf)]
                self._used_early.add(number)
                self._let_go[number] = len(self._recording.ops)

        def accumulate(gradient: torch.Tensor) -> None:
            recording = self._recording
            index = len(recording.ops)
            if not has_storage(gradient):
                return
            gradient, leaf_part = _private.local(gradient), _private.local(leaf)
            source = self._storages.of(gradient)
            size = leaf_part.numel() * leaf_part.element_size()
            if (together := self._gradients_in.get(id(leaf))) is not None:
                self._gradients[id(leaf)] = together
                self._let_go[source] = len(recording.ops) + 1
                name = f"copy of a gradient {tuple(leaf.shape)}"
                both = (self._storages.read(gradient), (together, 0))
                recording.ops.append(RecordedOp(None, name, "backward", both, (), (), moved_bytes=2 * size))
                return
            made: list[int] = []
            reads = [self._storages.read(gradient)]
            # Autograd takes a gradient over if nobody else holds it and its strides are those of the parameter.
            owned = recording.storages[source].made_by is not None and source not in self._storages.captured
            if not exists and owned and _may_take_over(gradient, leaf_part):
                self._storages.captured.add(source)
                self._gradients[id(leaf)] = source
                return
            total = RecordedStorage(size, tuple(leaf_part.shape), str(leaf.dtype).removeprefix("torch."))
            recording.storages.append(total)
            number = len(recording.storages) - 1
            if exists:
                reads.append((number, 0))
            else:
                total.made_by = index
                made.append(number)
            name = f"AccumulateGrad {tuple(leaf_part.shape)}"
            recording.ops.append(
                RecordedOp(None, name, "backward", tuple(reads), tuple(made), (), moved_bytes=2 * size)
            )
            self._storages.captured.add(number)
            self._gradients[id(leaf)] = number
            # Autograd lets go of the gradient here. Only ``_held`` keeps it longer.
            self._let_go[source] = len(recording.ops)

        return accumulate_and_update

    def reduction_of(self, leaf: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """What happens with the gradient of a gathered parameter, which ``fully_shard`` takes from its ``grad``.

        None for any other tensor.
        """
        if id(leaf) not in self._gathered:
            return None
        part = _private.local(leaf)

        def accumulate(gradient: torch.Tensor) -> torch.Tensor:
            own = _private.local(gradient)
            if leaf.grad is not None:  # Whole gradients of earlier micro-batches are there.
                leaf.grad += gradient
                return in_place_of(gradient)
            source = self._storages.of(own)
            is_own = self._recording.storages[source].made_by is not None and source not in self._storages.captured
            leaf.grad = gradient if is_own and _may_take_over(own, part) else gradient.clone()
            return in_place_of(gradient)

        def in_place_of(gradient: torch.Tensor) -> torch.Tensor:
            # Whoever asked for the gradient holds what is returned to the end of the step.
            with _private.no_modes():
                nothing = torch.zeros((), dtype=leaf.dtype, device=leaf.device).expand(part.shape)
                return nothing if part is leaf else _private.distributed(nothing, _private.placement(leaf))

        return accumulate

    def take(self, sharded: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Note the gradients that ``fully_shard`` has reduced: parameters with what they hold of theirs."""
        for parameter, gradient in sharded:
            number = self._storages.of(gradient)
            self._storages.captured.add(number)
            self._gradients[id(parameter)] = number
            self._held.append(gradient)

    def hold(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Keep the gradients to the end of the step, as ``grad`` does."""
        self._held.extend(gradients)

    def stand_in_for_shard(self, shard: torch.Tensor) -> torch.Tensor:
        """What stands for the gradient of a parameter's shard from before the step."""
        gradient = self._storages.stand_ins.like(shard)
        size_bytes, dtype = shard.untyped_storage().nbytes(), str(shard.dtype).removeprefix("torch.")
        self._recording.storages.append(RecordedStorage(size_bytes, tuple(shard.shape), dtype, role="state"))
        self._storages.stands_for(gradient, len(self._recording.storages) - 1, until_it_dies=False)
        return gradient

    def are_gathered(self, parameters: Sequence[torch.Tensor]) -> None:
        """The step computes with these parameters, which ``fully_shard`` has gathered."""
        self._gathered = frozenset(map(id, parameters))

    def begin_with_whole(self) -> None:
        """Whole gradients are there from the start; ``stand_in_for_whole`` says which.

        They are what an op makes before all others, so that those that the step reduces are gone from then on.
        """
        self._recording.ops.append(RecordedOp(None, EARLIER_GRADIENTS, "backward", (), (), (), is_own_code=True))

    def stand_in_for_whole(self, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """What stands for the whole gradient of a gathered parameter from before the step."""
        part = _private.local(parameter)
        place = (part.shape, part.stride(), 0)
        found = self._storages.stand_ins.at(part.numel() * dtype.itemsize, place, dtype, part.device)
        first = self._recording.ops[0]
        assert first.name == EARLIER_GRADIENTS, "the step began with whole gradients"
        self._recording.ops[0] = replace(first, makes=(*first.makes, self._storages.made(found, 0)))
        return found if part is parameter else _private.distributed(found, _private.placement(parameter))

    def leave_whole(self, gradients: Sequence[torch.Tensor]) -> None:
        """Whole gradients that were not reduced live on after the step."""
        for gradient in gradients:
            self._storages.captured.add(self._storages.of(gradient))
            self._held.append(gradient)

    def copied_to(self, parameters: Sequence[torch.Tensor], storage: int) -> None:
        """Gradients of these parameters do not stay where they are made: each is copied to a storage and let go of."""
        self._gradients_in.update((id(parameter), storage) for parameter in parameters)

    def update_early(self, parameters: Collection[torch.Tensor], update: Callable[[torch.Tensor], None]) -> None:
        """From here on ``update`` is called with each of these parameters as soon as its gradient is there."""
        self._early = frozenset(map(id, parameters))
        self._update_of = update

    def of(self, address: int, like: torch.Tensor) -> torch.Tensor | None:
        """A tensor in the recorded gradient of the parameter with this address; None where it has none."""
        if (number := self._gradients.get(address)) is None:
            return None
        gradient = self._storages.stand_ins.like(like)
        self._storages.stands_for(gradient, number, until_it_dies=False)
        return gradient

    def end(self) -> None:
        """The step is over: what only the trace held is gone, and gradients that were used are let go of."""
        self._held.clear()
        for number in (self._let_go.keys() - self._storages.captured) | self._used_early:
            self._recording.storages[number].released = self._let_go[number]


def _may_take_over(gradient: torch.Tensor, leaf: torch.Tensor) -> bool:
    """Has a gradient the layout that autograd wants: the strides of a dense parameter, else contiguous?"""
    if gradient.dtype != leaf.dtype or gradient.device != leaf.device:
        return False
    dense = leaf.is_contiguous() or leaf.is_contiguous(memory_format=torch.channels_last)
    wanted = leaf.stride() if dense else None
    same = gradient.stride() == wanted if wanted is not None else gradient.is_contiguous()
    return same or all(
        size <= 1 or a == b for size, a, b in zip(gradient.shape, gradient.stride(), leaf.stride(), strict=True)
    )
