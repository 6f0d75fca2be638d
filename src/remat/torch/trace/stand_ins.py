"""Tensors that stand in for those of a step: of PyTorch's own type, on the step's device, with no memory behind them.

A library that is asked to run on fake tensors notices (``isinstance(x, FakeTensor)``, a ``FakeTensorMode`` on the stack
of modes) and takes another branch than in the real step. A stand-in is a plain ``torch.Tensor``, and the fake tensors
that carry shapes exist only while one operator runs, where no code of a user or a library can see them.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

import torch

from remat.torch import _private
from remat.torch._private import OpOverload, Storage


class StandIns:
    """Makes stand-ins, and runs operators on them by PyTorch's own shape rules."""

    def __init__(self) -> None:
        self._fake_mode = _private.FakeTensorMode(allow_non_fake_inputs=True)
        self._made: list[weakref.ref[torch.Tensor]] = []

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A stand-in with the shape, strides, dtype and device of a tensor, in a storage of its own."""
        place = (tensor.shape, tensor.stride(), tensor.storage_offset())
        return self.at(tensor.untyped_storage().nbytes(), place, tensor.dtype, tensor.device)

    def at(self, size_bytes: int, place: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A stand-in at a place (shape, strides, offset) of a new storage of this size."""
        shape, stride, offset = place
        with _private.no_modes():
            return _in_storage(_storage(size_bytes, device), offset, shape, stride, dtype)

    def contiguous(self, shapes: Sequence[tuple[int, ...]], like: torch.Tensor) -> Any:
        """What an operator returns that makes contiguous tensors of these shapes, like another in dtype and device."""
        made = []
        for shape in shapes:
            strides = torch.empty(shape, device="meta").stride()
            size_bytes = math.prod(shape) * like.element_size()
            made.append(self.at(size_bytes, (shape, strides, 0), like.dtype, like.device))
        self.note(made)
        return tuple(made) if len(made) > 1 else made[0]

    def run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an operator returns; called where no mode sees operators.

        What lies in the storage of an argument lies there in the result too, and an argument that is returned is that
        very tensor. All else is a new stand-in. What PyTorch cannot give a plain type (sparse tensors) stays fake.

        Raises:
            DataDependentOutputException: where the result depends on values.
            DynamicOutputShapeException: where its shape does.
        """
        call = _Call(self._fake_mode)
        fake_args, fake_kwargs = _private.tree_map_only(torch.Tensor, call.fake, (args, kwargs))
        with self._fake_mode:
            out = func(*fake_args, **fake_kwargs)
        out = _private.tree_map_only(torch.Tensor, call.plain, out)
        self.note(out)
        return out

    def note(self, result: Any) -> None:
        """Remember the tensors that an operator returned, which lie in storages without memory."""
        self._made += [weakref.ref(t) for t in _private.tree_leaves(result) if isinstance(t, torch.Tensor)]

    def retire(self) -> None:
        """The step is over: whatever holds on to a stand-in finds no number in it from now on, but NaN everywhere.

        Its memory could be read as zeros, which would be wrong without a word.
        """
        for made in self._made:
            tensor = made()
            if tensor is None or not is_plain(tensor) or tensor.device.type == "meta":
                continue
            if not _private.has_memory(tensor.untyped_storage()):
                with suppress(RuntimeError), _private.no_modes(), torch.no_grad():
                    tensor.data = _nothing(tensor.dtype, tensor.device).expand(tensor.shape)
        self._made.clear()


def _nothing(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """NaN; the least number of a dtype that has none, which is no index either."""
    is_whole = not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)
    value = torch.iinfo(dtype).min if is_whole else float("nan")
    return torch.tensor(value, dtype=dtype, device=device)


class _Call:
    """The fake tensors of one call, and what they stand for."""

    def __init__(self, fake_mode: Any) -> None:
        self._fake_mode = fake_mode
        self._fakes: dict[int, torch.Tensor] = {}
        self._given: dict[int, torch.Tensor] = {}
        # Of the storages that the call has seen: the fake one by the key of the plain one, and the other way round.
        self._fake_storages: dict[int, Storage] = {}
        self._storages: dict[int, Storage] = {}

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, _private.FakeTensor):
            return tensor
        found = self._fakes.get(id(tensor))
        if found is None:
            found = self._fakes[id(tensor)] = self._made_fake(tensor)
            self._given[id(found)] = tensor
        return found

    def _made_fake(self, tensor: torch.Tensor) -> torch.Tensor:
        if not is_plain(tensor):
            found: torch.Tensor = self._fake_mode.from_tensor(tensor)
            return found
        storage = tensor.untyped_storage()
        key = _private.storage_key(storage)
        if key not in self._fake_storages:
            fake_storage = torch.UntypedStorage(storage.nbytes(), device="meta")
            self._fake_storages[key] = fake_storage
            self._storages[_private.storage_key(fake_storage)] = storage
        place = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        return _private.fake_tensor(self._fake_mode, _in_storage(self._fake_storages[key], *place), tensor)

    def plain(self, fake: torch.Tensor) -> torch.Tensor:
        given = self._given.get(id(fake))
        if given is not None:
            return given
        if type(fake) is not _private.FakeTensor or fake.layout is not torch.strided:
            return fake
        fake_storage = fake.untyped_storage()
        key = _private.storage_key(fake_storage)
        if key not in self._storages:
            self._storages[key] = _storage(fake_storage.nbytes(), fake.device)
            self._fake_storages[_private.storage_key(self._storages[key])] = fake_storage
        place = (fake.storage_offset(), fake.shape, fake.stride(), fake.dtype)
        return _with_bits(_in_storage(self._storages[key], *place), fake)


def is_dense(tensor: torch.Tensor) -> bool:
    """Do the elements of a tensor lie side by side, in whatever order of the axes?"""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda one: (one[1], one[0])):
        if size > 1 and stride != expected:
            return False
        expected *= max(1, size)
    return True


def is_plain(tensor: torch.Tensor) -> bool:
    """Is it a tensor of PyTorch's own type with one storage?"""
    return tensor.layout is torch.strided and (type(tensor) is torch.Tensor or isinstance(tensor, _OWN_TYPES))


_OWN_TYPES: Final = (torch.nn.Parameter, torch.nn.Buffer)


def _in_storage(storage: Storage, offset: Any, shape: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    return empty.set_(storage, offset, shape, stride)


def _with_bits(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor conjugated or negated lazily, if another is."""
    if like.is_conj():
        tensor = torch._conj(tensor)
    return torch._neg_view(tensor) if like.is_neg() else tensor


def _storage(size_bytes: int, device: torch.device) -> Storage:
    """A storage of a size that holds nothing; writing to it, or asking for its address, is an error."""
    if device.type == "meta":
        return torch.UntypedStorage(size_bytes, device="meta")
    return _private.storage_without_memory(size_bytes, device)
