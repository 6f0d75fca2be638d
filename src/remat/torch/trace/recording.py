"""What is seen of one training step: its operators, its storages and when they die, what autograd saves and reads."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

Phase: TypeAlias = Literal["forward", "backward", "update"]


@dataclass
class RecordedStorage:
    """A storage that the step reads or makes.

    Attributes:
        size_bytes: what the allocator is asked for.
        shape: of the tensor that was first seen in it; None where PyTorch's shape rules do not tell.
        dtype: likewise.
        made_by: the op that makes it; None for what was there before the step.
        writes: ops that write to it afterwards, rising.
        released: the number of ops run when Python and autograd let go of it; None if it lives on after the step. What
            autograd saves does not count here.
        read_until: the number of ops run when the last backward node that had saved it was done; None if none had.
        role: of what was there before the step, one of ``remat.core.graph.ROLES``; else "".
        name: likewise, of the parameter or buffer; "" where it has none.
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


@dataclass(frozen=True)
class RecordedOp:
    """An operator that made or wrote a storage; views leave no trace.

    Attributes:
        func: the operator; None for the accumulation of a gradient.
        name: module path and operator.
        phase: forward, backward, or the optimizer's update.
        reads: storages and how often each had been written.
        makes: storages.
        writes: storages that existed before.
        flops: floating-point operations.
        moved_bytes: bytes read and written.
        dtype: of the arithmetic.
        repeatable: may it run twice?
        workspace_bytes: scratch memory of the kernel.
        layer: path of the module whose forward pass ran; of a backward op, that of the op that it belongs to.
        source: line of source, likewise.
    """

    func: Any
    name: str
    phase: Phase
    reads: tuple[tuple[int, int], ...]
    makes: tuple[int, ...]
    writes: tuple[int, ...]
    flops: float = 0.0
    moved_bytes: int = 0
    dtype: str = "float32"
    repeatable: bool = False
    workspace_bytes: int = 0
    layer: str = ""
    source: str = ""


@dataclass
class Slot:
    """One tensor that autograd saved, numbered in the order of saving.

    Attributes:
        position: ops run when it was saved.
        turn: how many tensors were saved at that position before it.
        storage: of the tensor; None for one that was there before the step.
        version: writes to the storage before it was saved.
        unpacked: ops run when the backward pass first read it; None if it never did.
        released: ops run when its autograd node let go of it.
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
        storages: of the tensors that they read and make.
        slots: what autograd saved.
        forward_ops: how many ops the forward pass has.
        loss: its storage.
        device: the type of the device.
        marked: storages of tensors that were given to ``mark``, by what they were marked with.
    """

    ops: list[RecordedOp] = field(default_factory=list)
    storages: list[RecordedStorage] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)
    forward_ops: int = 0
    loss: int | None = None
    device: str = "cpu"
    marked: dict[Hashable, list[int]] = field(default_factory=dict)
