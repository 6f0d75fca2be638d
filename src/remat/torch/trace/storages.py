"""The storages of a step that is recorded: real tensors' fake stand-ins, and when each storage dies."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from remat.torch import _private
from remat.torch.trace.known_values import KnownValues
from remat.torch.trace.recording import RecordedStorage, Recording


class KnownStorages:
    """Numbers of storages in a recording. Fake tensors are not kept alive by it.

    Attributes:
        values: of small tensors of whole numbers, beside the fake ones.
        captured: storages that live on after the step: the loss and the gradients.
    """

    def __init__(self, recording: Recording) -> None:
        self.fake_mode = _private.FakeTensorMode(allow_non_fake_inputs=True)
        self.values = KnownValues()
        self.captured: set[int] = set()
        self._recording = recording
        self._known: dict[int, int] = {}
        self._pinned: dict[int, int] = {}
        # Real tensors and the fake ones that stand for them, both kept: their storages are told apart by address.
        self._fakes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def fake(self, tensor: torch.Tensor, role: str = "") -> torch.Tensor:
        """The fake tensor of a real one; a real one that is new was there before the step, and has this role."""
        if isinstance(tensor, _private.FakeTensor):
            return tensor
        if id(tensor) not in self._fakes:
            if tensor.device.type not in ("cpu", "meta"):
                self._recording.device = tensor.device.type
            fake: torch.Tensor = self.fake_mode.from_tensor(tensor)
            self._fakes[id(tensor)] = (tensor, fake)
            self.values.pin(fake, tensor)
            if has_storage(tensor):
                real = _key(tensor)
                if real not in self._pinned:
                    self._pinned[real] = self._add(tensor, None)
                    self._recording.storages[self._pinned[real]].role = role or _role_of(tensor)
                self._known[_key(fake)] = self._pinned[real]
        return self._fakes[id(tensor)][1]

    def of(self, tensor: torch.Tensor) -> int:
        """The number of a tensor's storage."""
        number = self._known.get(_key(tensor))
        if number is None:
            # Made out of sight, by Python's own constructors: it is there before the operator that reads it.
            number = self.made(tensor, None)
        return number

    def is_known(self, tensor: torch.Tensor) -> bool:
        """Has the storage of a tensor been seen before?"""
        return _key(tensor) in self._known

    def made(self, tensor: torch.Tensor, made_by: int | None) -> int:
        """A new storage, that an op makes; its number."""
        number = self._known[_key(tensor)] = self._add(tensor, made_by)
        self._watch(tensor, number, self._storage_died)
        return number

    def stands_for(self, tensor: torch.Tensor, number: int, *, until_it_dies: bool) -> None:
        """From now on a tensor is in a storage that is known, which its death may be the last read of."""
        self._known[_key(tensor)] = number
        if until_it_dies:
            self._watch(tensor, number, self._copy_died)

    def survivors(self) -> list[int]:
        """Storages that something outside of the step still holds, though they are no result of it."""
        storages = self._recording.storages
        alive = set(self._known.values()) - self.captured
        return [number for number in alive if storages[number].made_by is not None]

    def name(self, tensor: torch.Tensor, name: str) -> None:
        """Call the storage of a tensor from before the step by a name, if the step has touched it."""
        number = self._pinned.get(_key(tensor)) if has_storage(tensor) else None
        if number is not None:
            self._recording.storages[number].name = name

    def _add(self, tensor: torch.Tensor, made_by: int | None) -> int:
        size = int(tensor.untyped_storage().nbytes())
        dtype = str(tensor.dtype).removeprefix("torch.")
        self._recording.storages.append(RecordedStorage(size, tuple(tensor.shape), dtype, made_by))
        return len(self._recording.storages) - 1

    def _watch(self, tensor: torch.Tensor, number: int, died: Callable[[int, int], None]) -> None:
        storage = tensor.untyped_storage()
        weakref.finalize(storage, died, _private.storage_key(storage), number).atexit = False

    def _storage_died(self, key: int, number: int) -> None:
        self._forget(key, number)
        if number not in self.captured:
            self._recording.storages[number].released = len(self._recording.ops)

    def _copy_died(self, key: int, number: int) -> None:
        self._forget(key, number)
        self._recording.storages[number].read_until = len(self._recording.ops)

    def _forget(self, key: int, number: int) -> None:
        if self._known.get(key) == number:
            del self._known[key]


def has_storage(tensor: torch.Tensor) -> bool:
    """Has a tensor one storage of its own? Sparse ones do not."""
    return tensor.layout is torch.strided


def _key(tensor: torch.Tensor) -> int:
    return _private.storage_key(tensor.untyped_storage())


def _role_of(tensor: torch.Tensor) -> str:
    """Of a tensor that the step finds: what it differentiates by is a parameter, all else (buffers, say) state."""
    return "parameter" if isinstance(tensor, torch.nn.Parameter) or tensor.requires_grad else "state"
