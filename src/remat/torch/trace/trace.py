"""``trace``: a training step -> Graph. What planners and ``apply`` know of a step is a ``TracedStep``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from remat.core.graph import Graph, Op, Tensor
from remat.running.cost_model import DeviceProfile, device_here, get_profile, op_time_s
from remat.running.network import Network
from remat.torch import _private
from remat.torch.trace.fake_step import record_step
from remat.torch.trace.gradients import EARLIER_GRADIENTS
from remat.torch.trace.op_facts import kind
from remat.torch.trace.recording import RecordedOp, Recording

_HELD_SHARE: Final = 1e-4
"""What Python holds longer than anything reads it gets an op of its own if it is larger than this share of the largest
storage. A judgement, not measured: a larger share misses bytes at the peak, a smaller one adds ops that change nothing.
"""


@dataclass(frozen=True)
class TracedStep:
    """A training step as a graph, and how the graph and the recording belong together.

    Attributes:
        graph: the recorded ops, with a ``held`` op in between where Python keeps a tensor that nothing reads any more.
        recording: what was seen.
        graph_ops: for each recorded op, its index in the graph.
        forward_ops: how many ops of the graph belong to the forward pass.
        graph_tensors: for each recorded storage that an op of the graph makes or reads, its first tensor in the graph.
    """

    graph: Graph
    recording: Recording
    graph_ops: tuple[int, ...]
    forward_ops: int
    graph_tensors: Mapping[int, int]


def trace(
    fn: Callable[..., Any], *args: Any, optimizer: torch.optim.Optimizer | None = None, device: str | None = None
) -> Graph:
    """The joint graph of a training step, without running it and without allocating anything.

    Args:
        fn: returns the loss, a tensor of one element; its gradients are part of the graph.
        *args: its arguments: tensors, also on the meta device, and anything else.
        optimizer: whose state and update are counted.
        device: profile for the predicted times: "cpu", "a100", "h100", "h200" or "measured"; None means that of the
            device of the tensors. If it is a GPU and the tensors are not on one, the step is traced with the kernels of
            that GPU (attention, dropout, RMS normalisation, the optimizer), and ``notes`` of the graph says what was
            assumed.

    Returns:
        The graph, its order fixed; sizes in bytes, times in seconds. Views are part of the storage that they share.

    Raises:
        UnsupportedStep: where the trace would need a tensor's values, or the loss cannot be differentiated.
    """
    named = None if device is None else get_profile(device)
    recording = record_step(fn, args, optimizer, gpu=gpu_of(named, args))
    return traced_step(recording, named or get_profile(default_profile(recording.device))).graph


def gpu_of(
    profile: DeviceProfile | None, step: Any, elsewhere: tuple[str, ...] = ("cpu", "meta")
) -> DeviceProfile | None:
    """The GPU whose kernels a step is traced with: the one that is named, if all tensors of the step are elsewhere."""
    if profile is None or profile.compute_capability is None:
        return None
    known = [t for t in _private.tree_leaves(step) if isinstance(t, torch.Tensor)]
    return profile if known and all(t.device.type in elsewhere for t in known) else None


def default_profile(device_type: str) -> str:
    """The profile for tensors on a device of this type, or the one that ``REMAT_DEVICE`` names."""
    if device_type != "cuda":
        return device_here("cpu")
    name = torch.cuda.get_device_name().lower() if torch.cuda.is_available() else ""
    return device_here(next((known for known in ("h200", "h100") if known in name), "a100"))


def traced_step(recording: Recording, profile: DeviceProfile, network: Network | None = None) -> TracedStep:
    """The graph of a recording; its collectives take what they take on a network."""
    return _Builder(recording, profile, network).build()


class _Builder:
    def __init__(self, recording: Recording, profile: DeviceProfile, network: Network | None) -> None:
        self._recording = recording
        self._profile = profile
        self._network = network
        self._tensors: list[Tensor] = []
        self._ops: list[Op] = []
        self._root: dict[int, int] = {}
        self._newest: dict[int, int] = {}
        self._never_again = _overwritten_reads(recording)

    def build(self) -> TracedStep:
        recording = self._recording
        held = self._held_until()
        unpacked = self._unpacked_at()
        graph_ops: list[int] = []
        forward_ops = 0
        for index, op in enumerate(recording.ops):
            for storage in op.reads:
                self._tensor_of(storage[0])
            graph_ops.append(len(self._ops))
            in_forward = index < recording.forward_ops
            self._add_op(index, op, [] if in_forward else [*unpacked.get(index, []), *held.get(index, [])])
            if in_forward and (kept := held.get(index)):
                # It is an op of its own, since a second run of this one must not need what Python merely held.
                inputs = tuple(self._newest[s] for s in kept)
                self._ops.append(
                    Op("held by Python", "held", inputs, recomputable=False, phase=op.phase, layer=op.layer)
                )
            if index == recording.forward_ops - 1:
                forward_ops = len(self._ops)
        pinned = tuple(
            self._tensor_of(number)
            for number, storage in enumerate(recording.storages)
            if storage.made_by is None and storage.size_bytes
        )
        made = [n for n, s in enumerate(recording.storages) if s.made_by is not None and s.released is None]
        outputs = tuple(dict.fromkeys(self._newest[n] for n in made if n in self._newest))
        tiny = tuple(t for n, t in self._root.items() if recording.storages[n].made_by is None)
        graph = Graph(
            tuple(self._ops),
            tuple(self._tensors),
            tuple(dict.fromkeys((*pinned, *tiny))),
            outputs,
            free_order=False,
            notes=recording.notes,
        )
        return TracedStep(graph, recording, tuple(graph_ops), forward_ops, dict(self._root))

    def _tensor_of(self, number: int) -> int:
        """The newest tensor in a storage; that of a storage from before the step is made at its first use."""
        if number not in self._newest:
            storage = self._recording.storages[number]
            self._newest[number] = self._root[number] = len(self._tensors)
            self._tensors.append(
                Tensor(storage.size_bytes, storage.name, storage.shape, storage.dtype, role=storage.role)
            )
        return self._newest[number]

    def _add_op(self, index: int, op: RecordedOp, more_reads: list[int]) -> None:
        storages = self._recording.storages
        # Whether a gathered parameter is there does not depend on who reads it.
        reads = [n for n, _ in op.reads if not storages[n].is_gathered]
        inputs = [self._tensor_of(n) for n in dict.fromkeys((*reads, *op.writes, *more_reads))]
        outputs: list[int] = []
        for number in op.makes:
            storage = storages[number]
            self._newest[number] = self._root[number] = len(self._tensors)
            outputs.append(len(self._tensors))
            self._tensors.append(Tensor(storage.size_bytes, op.name, storage.shape, storage.dtype))
        for number in op.writes:
            if storages[number].made_by is None:
                continue
            # Written in place: the new value lives in the storage of the old one.
            storage = storages[number]
            outputs.append(len(self._tensors))
            self._tensors.append(
                Tensor(storage.size_bytes, op.name, storage.shape, storage.dtype, self._newest[number])
            )
            self._newest[number] = outputs[-1]
        self._ops.append(
            Op(
                name=op.name,
                kind=_kind_of(op),
                inputs=tuple(inputs),
                outputs=tuple(outputs),
                time_s=self._seconds(op),
                recomputable=op.repeatable and index not in self._never_again,
                workspace_bytes=op.workspace_bytes,
                phase=op.phase,
                layer=op.layer,
                source=op.source,
            )
        )

    def _seconds(self, op: RecordedOp) -> float:
        if op.collective and self._network is not None:
            return self._network.seconds(op.collective, op.axis, op.moved_bytes)
        # Nothing is known of the links of a real mesh: a collective takes what reading and writing its tensors takes.
        flops = op.flops_on_cpu if self._profile.is_cpu else op.flops
        return op_time_s(self._profile, flops, op.moved_bytes, op.dtype)

    def _unpacked_at(self) -> dict[int, list[int]]:
        """For each recorded op of the backward pass, the storages that autograd reads just before it."""
        found: dict[int, list[int]] = {}
        for saved in self._recording.saved:
            if saved.storage is not None and saved.unpacked is not None:
                found.setdefault(saved.unpacked, []).append(saved.storage)
        return found

    def _held_until(self) -> dict[int, list[int]]:
        """For each recorded op, the storages that are there while it runs though it does not read them."""
        recording = self._recording
        largest = max((s.size_bytes for s in recording.storages), default=0)
        last_touch: dict[tuple[int, bool], int] = {}
        for index, op in enumerate(recording.ops):
            reads = (n for n, _ in op.reads if not recording.storages[n].is_gathered)
            for number in (*reads, *op.makes, *op.writes):
                last_touch[number, index < recording.forward_ops] = index
        found: dict[int, list[int]] = {}
        for number, storage in enumerate(recording.storages):
            if storage.made_by is None or storage.size_bytes <= _HELD_SHARE * largest:
                continue
            # It counts up to where Python lets go of it, and up to where autograd does.
            for end in (storage.released, storage.read_until):
                last = -1 if end is None else end - 1
                if last > last_touch.get((number, last < recording.forward_ops), -1):
                    found.setdefault(last, []).append(number)
        # A backward node holds all that it has unpacked until its last op has run, though that op may not read it, and
        # though a later node will: recomputed in between, it would be there twice.
        for saved in recording.saved:
            if saved.storage is None or saved.unpacked is None or saved.released is None:
                continue
            last = saved.released - 1
            is_large = recording.storages[saved.storage].size_bytes > _HELD_SHARE * largest
            if is_large and saved.unpacked <= last and last >= recording.forward_ops:
                found.setdefault(last, []).append(saved.storage)
        return found


def _wanted_after_updates(recording: Recording) -> set[int]:
    """Ops of the forward pass whose results are read after a parameter that the op read has been updated.

    Autograd differentiates what an op made before the op itself, so that there are none but where a result is read
    without being differentiated: by a mask, say.
    """
    if not recording.updated:
        return set()
    updated = {number: ops.start for number, ops in recording.updated.values()}
    wanted = [-1] * len(recording.storages)
    for index, op in enumerate(recording.ops):
        for number, _ in op.reads:
            wanted[number] = index
    for saved in recording.saved:
        if saved.storage is not None and saved.unpacked is not None:
            wanted[saved.storage] = max(wanted[saved.storage], saved.unpacked)
    found: set[int] = set()
    for index in range(recording.forward_ops - 1, -1, -1):
        op = recording.ops[index]
        until = max((wanted[number] for number in (*op.makes, *op.writes)), default=-1)
        if any(updated.get(number, until + 1) <= until for number, _ in op.reads):
            found.add(index)
        for number, _ in op.reads:
            wanted[number] = max(wanted[number], until)
    return found


def _kind_of(op: RecordedOp) -> str:
    if op.collective:
        return op.collective
    if op.func is None:
        return "gather" if op.is_own_code and op.name != EARLIER_GRADIENTS else "accumulate"
    return kind(op.func)


def _overwritten_reads(recording: Recording) -> set[int]:
    """Ops that must not run again because of what is written in place.

    Since an op ran, what it read may have been overwritten, and so may what autograd saved of its results. What was
    there before the step may change during it.
    """
    storages = recording.storages

    # Nothing runs again once the update of what it reads has begun, so that the optimizer's writes do not count here.
    def final_version(number: int) -> int:
        return sum(1 for write in storages[number].writes if recording.ops[write].phase != "update")

    never = _wanted_after_updates(recording)
    for index, op in enumerate(recording.ops):
        for number, version in op.reads:
            own = number in op.writes
            if storages[number].made_by is None:
                if final_version(number):
                    never.add(index)
            elif not own and version < final_version(number):
                never.add(index)
        if any(storages[number].made_by is None for number in op.writes):
            never.add(index)
    for saved in recording.saved:
        if saved.storage is None:
            continue
        storage = storages[saved.storage]
        read_in_forward = saved.unpacked is not None and saved.unpacked < recording.forward_ops
        overwritten = saved.version < final_version(saved.storage)
        if storage.made_by is not None and (overwritten or saved.unpacked is None or read_in_forward):
            never.add(storage.made_by)
    for storage in storages:
        # What Python still holds when the backward pass begins, or writes to in it, cannot be dropped.
        outlives = storage.released is None or storage.released > recording.forward_ops
        late = outlives or any(write >= recording.forward_ops for write in storage.writes)
        if late and storage.made_by is not None:
            never.add(storage.made_by)
    return never
