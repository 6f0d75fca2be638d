"""What is seen of one training step: its operators, its storages and when they die, what autograd saves and reads.

``Recording`` is the data. ``KnownStorages`` tells, while the step runs on stand-ins, which storage a tensor is in.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch

from remat.torch import _private
from remat.torch.trace.known_values import KnownValues
from remat.torch.trace.stand_ins import StandIns

Phase: TypeAlias = Literal["forward", "backward", "update"]


@dataclass
class RecordedStorage:
    """A storage that the step reads or makes.

    Attributes:
        size_bytes: what the allocator is asked for.
        shape: of the tensor that was first seen in the storage; None where PyTorch's shape rules do not tell.
        dtype: of that tensor.
        made_by: the op that makes the storage; None for a storage that was there before the step.
        writes: ops that write to the storage afterwards, rising.
        released: how many ops had run when Python and autograd let go of the storage; None if it lives on after the
            step. What autograd saves does not count here.
        read_until: how many ops had run when the last backward node that had saved it was done; None if none had.
        role: of a storage from before the step, one of ``remat.core.graph.ROLES``; else "".
        name: of a parameter or buffer; "" for any other storage, and where it has none.
        is_gathered: does it hold a parameter that ``fully_shard`` gathered? Such a parameter comes and goes as
            ``fully_shard`` says, and comes early where a recomputation needs it.
    """

    size_bytes: int
    shape: tuple[int, ...] | None
    dtype: str
    made_by: int | None = None
    writes: list[int] = field(default_factory=list)
    released: int | None = None
    read_until: int | None = None
    role: str = ""
    name: str = ""
    is_gathered: bool = False


@dataclass(frozen=True)
class RecordedOp:
    """An operator that made or wrote a storage; views are not recorded.

    Attributes:
        func: the operator; None for the accumulation of a gradient.
        name: module path and operator.
        phase: forward, backward, or the optimizer's update.
        reads: storages, and how often each had been written.
        makes: storages.
        writes: storages that existed before.
        flops: floating-point operations.
        flops_on_cpu: those of a product of matrices that a CPU could do in the time that the op takes there.
        moved_bytes: bytes read and written.
        dtype: of the arithmetic.
        repeatable: may it run twice?
        workspace_bytes: scratch memory of the kernel.
        layer: path of the module whose forward pass ran; a backward op has that of its forward op.
        source: line of source; a backward op has that of its forward op.
        is_own_code: is it ``fully_shard``'s own, which a step under a plan does not look at?
        collective: of an op that sends: its kind, as NCCL names it ("AllReduce"); ``moved_bytes`` is then what all
            ranks have of the result, or of the sum.
        axis: the axis of the mesh along which it sends.
    """

    func: Any
    name: str
    phase: Phase
    reads: tuple[tuple[int, int], ...]
    makes: tuple[int, ...]
    writes: tuple[int, ...]
    flops: float = 0.0
    flops_on_cpu: float = 0.0
    moved_bytes: int = 0
    dtype: str = "float32"
    repeatable: bool = False
    workspace_bytes: int = 0
    layer: str = ""
    source: str = ""
    is_own_code: bool = False
    collective: str = ""
    axis: str = ""


@dataclass
class SavedTensor:
    """One tensor that autograd saved, numbered in the order of saving.

    Attributes:
        position: how many ops had run when it was saved.
        turn: how many tensors were saved at that position before it.
        storage: of the tensor; None for a storage from before the step.
        version: writes to the storage before it was saved.
        unpacked: how many ops had run when the backward pass first read it; None if it never did.
        released: how many ops had run when the backward node that had saved it was done; None if none was.
    """

    position: int
    turn: int
    storage: int | None = None
    version: int = 0
    unpacked: int | None = None
    released: int | None = None


@dataclass
class Recording:
    """Everything seen of one step. Positions count ops: an event at position p comes before op p.

    Attributes:
        ops: in the order in which they ran.
        storages: of the tensors that the ops read and make.
        saved: the tensors that autograd saved.
        forward_ops: how many ops the forward pass has.
        forward_calls: how many operators it calls, views among them.
        forward_results: how many tensors they return.
        loss: its storage.
        device: the type of the device.
        marked: storages of tensors that were given to ``mark``, by what they were marked with.
        notes: what was assumed, a sentence each.
        updated: by the address of a parameter that is updated inside of the backward pass: its storage, and the ops of
            the update.
        accumulates_into: the parameters whose gradients are expected to exist before the step, as weak references.
        is_distributed: did operators run on distributed tensors?
        is_sharded: did a module under ``fully_shard`` run?
        accumulation: what such modules do with gradients, a ``remat.torch._fsdp.Accumulation``; None where there are
            none.
        gathered_again: for a storage with a gathered parameter: the next storage with it, once it is gathered again.
        gathered_with: for such a storage: a number that those have in common that were gathered at once.
    """

    ops: list[RecordedOp] = field(default_factory=list)
    storages: list[RecordedStorage] = field(default_factory=list)
    saved: list[SavedTensor] = field(default_factory=list)
    forward_ops: int = 0
    forward_calls: int = 0
    forward_results: int = 0
    loss: int | None = None
    device: str = "cpu"
    marked: dict[Hashable, list[int]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    updated: dict[int, tuple[int, range]] = field(default_factory=dict)
    accumulates_into: list[Callable[[], torch.Tensor | None]] = field(default_factory=list)
    is_distributed: bool = False
    is_sharded: bool = False
    accumulation: Any = None
    gathered_again: dict[int, int] = field(default_factory=dict)
    gathered_with: dict[int, int] = field(default_factory=dict)

    def read_after_update(self) -> set[int]:
        """Addresses of parameters of which the step still needs the old values when they are updated early.

        Those in one storage with another parameter are among them.
        """
        touched: dict[int, list[int]] = {}
        for index, op in enumerate(self.ops):
            for number in {*(number for number, _ in op.reads), *op.writes}:
                touched.setdefault(number, []).append(index)
        found = set()
        for address, (number, ops) in self.updated.items():
            others = [index for index in touched.get(number, ()) if index not in ops]
            if any(index >= ops.start or self.ops[index].phase == "update" for index in others):
                found.add(address)
        return found


class KnownStorages:
    """The numbers that storages have in a recording. It keeps no tensor of the step alive.

    Args:
        recording: to which new storages are added.

    Attributes:
        stand_ins: makes the tensors of the step.
        values: of tensors whose values follow from constants and from what the step is given.
        captured: storages that live on after the step: the loss and the gradients.
    """

    def __init__(self, recording: Recording) -> None:
        self.stand_ins = StandIns()
        self.values = KnownValues()
        self.captured: set[int] = set()
        self._recording = recording
        self._known: dict[int, int] = {}
        # Storages from before the step. They are kept, since ``_known`` knows them by a key that could come again.
        self._pinned: dict[int, tuple[_private.Storage, int]] = {}
        self._of_real: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        # Storages that lost their memory before they died.
        self._freed: set[int] = set()

    def of(self, tensor: torch.Tensor, role: str = "") -> int:
        """The number of a tensor's storage; one that is new was there before the step, and has this role."""
        key = _key(tensor)
        number = self._known.get(key)
        if number is None:
            if tensor.device.type not in ("cpu", "meta"):
                self._recording.device = tensor.device.type
            number = self._known[key] = self._add(tensor, None)
            self._pinned[key] = (tensor.untyped_storage(), number)
            self._recording.storages[number].role = role or _role_of(tensor)
            self.values.pin(tensor, is_of_batch=role == "batch")
        return number

    def read(self, tensor: torch.Tensor) -> tuple[int, int]:
        """The number of a tensor's storage, and how often it has been written to."""
        number = self.of(tensor)
        return number, len(self._recording.storages[number].writes)

    def stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """What stands for a tensor from before the step where its own attributes must not change."""
        if id(tensor) not in self._of_real:
            found = self.stand_ins.like(tensor)
            self._known[_key(found)] = self.of(tensor)
            self._of_real[id(tensor)] = (tensor, found)
        return self._of_real[id(tensor)][1]

    def is_known(self, tensor: torch.Tensor) -> bool:
        """Has the storage of a tensor been seen before?"""
        return _key(tensor) in self._known

    def is_of_the_step(self, tensor: torch.Tensor) -> bool:
        """Does a tensor lie in a storage that the step has made, or that stands for one?"""
        key = _key(tensor)
        return key in self._known and key not in self._pinned

    def value_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A tensor with the values that another has in the real step; None where they are not known."""
        if has_storage(tensor) and tensor.device.type != "meta":
            key = _key(tensor)
            pinned = self._pinned.get(key)
            if key not in self._known or (pinned is not None and not self._recording.storages[pinned[1]].writes):
                return tensor  # It is as it was before the step.
        return self.values.found(tensor)

    def made(self, tensor: torch.Tensor, made_by: int | None) -> int:
        """Add the storage that an op makes, and return its number."""
        number = self._known[_key(tensor)] = self._add(tensor, made_by)
        self._watch(tensor, number, self._storage_died)
        return number

    def freed(self, tensor: torch.Tensor) -> None:
        """A tensor's storage loses its memory, though the tensor lives on."""
        number = self.of(tensor)
        if number not in self._freed:
            self._freed.add(number)
            self._recording.storages[number].released = len(self._recording.ops)

    def is_freed(self, tensor: torch.Tensor) -> bool:
        """Has the storage of a tensor lost its memory?"""
        return self._known.get(_key(tensor)) in self._freed

    def stands_for(self, tensor: torch.Tensor, number: int, *, until_it_dies: bool) -> None:
        """From now on a tensor is in a storage that is known.

        Args:
            tensor: with a storage of its own.
            number: of the storage that it stands for.
            until_it_dies: may the last read of the storage be when this tensor dies?
        """
        self._known[_key(tensor)] = number
        if until_it_dies:
            self._watch(tensor, number, self._stand_in_died)

    def survivors(self) -> list[int]:
        """Storages that something outside of the step still holds, though they are no result of it."""
        storages = self._recording.storages
        alive = set(self._known.values()) - self.captured - self._freed
        return [number for number in alive if storages[number].made_by is not None]

    def name(self, tensor: torch.Tensor, name: str) -> None:
        """Call the storage of a tensor from before the step by a name, if the step has touched it."""
        pinned = self._pinned.get(_key(tensor)) if has_storage(tensor) else None
        if pinned is not None:
            self._recording.storages[pinned[1]].name = name

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
        if number not in self.captured and number not in self._freed:
            self._recording.storages[number].released = len(self._recording.ops)

    def _stand_in_died(self, key: int, number: int) -> None:
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
    """Of a tensor that the step finds: one that it differentiates by is a parameter, any other (a buffer) is state."""
    return "parameter" if isinstance(tensor, torch.nn.Parameter) or tensor.requires_grad else "state"
