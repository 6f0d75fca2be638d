"""Sees the operators of a step that runs without memory: what they make, what autograd saves, and whose they are."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, TypeAlias
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from remat.torch import _private
from remat.torch.trace import cpu_scratch, cpu_times, cpu_trials, gpu_scratch, op_facts, result_shapes
from remat.torch.trace.gradients import Gradients
from remat.torch.trace.known_values import are_small
from remat.torch.trace.origins import RunningModules, source_line
from remat.torch.trace.recording import (
    KnownStorages,
    Phase,
    RecordedOp,
    RecordedStorage,
    Recording,
    SavedTensor,
    has_storage,
)
from remat.torch.trace.stand_ins import is_plain

_log = logging.getLogger("remat")

_ITEM: Final = torch.ops.aten._local_scalar_dense.default

Take: TypeAlias = Callable[[torch.Tensor, Hashable], None]
_take: ContextVar[Take | None] = ContextVar("take", default=None)
_answers: ContextVar[Sequence[bool]] = ContextVar("answers", default=())


def mark(tensor: torch.Tensor, as_what: Hashable) -> None:
    """Note a tensor of the step that is being traced, see ``Recording.marked``; does nothing in a real step."""
    if (take := _take.get()) is not None:
        take(tensor, as_what)


def is_tracing() -> bool:
    """Does this code run in a step that is being traced, whose tensors have no values?"""
    return _take.get() is not None


@contextmanager
def answered_as(answers: Sequence[bool]) -> Iterator[None]:
    """Inside, a step that is traced hears what a real step heard where Python asked for truth values, in turn."""
    token = _answers.set(answers)
    try:
        yield
    finally:
        _answers.reset(token)


class _Packed:
    """What stands in autograd's graph for a tensor that it saved.

    Attributes:
        number: of the saved tensor in the recording.
        geometry: where the tensor lies in its storage, and how large that is.
        values: a copy of what is in that storage, where it is known and may decide what the backward pass computes.
    """

    __slots__ = ("__weakref__", "geometry", "number", "values")

    def __init__(self, number: int, tensor: torch.Tensor, values: torch.Tensor | None) -> None:
        self.number = number
        self.values = values
        place = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
        self.geometry = (tensor.untyped_storage().nbytes(), place, tensor.dtype, tensor.device)


class _PackedPart:
    """What stands in autograd's graph for the local part of a distributed tensor, and how it is distributed."""

    __slots__ = ("part", "placement")

    def __init__(self, part: Any, placement: Any) -> None:
        self.part = part
        self.placement = placement


class _OneHots(TorchFunctionMode):
    """Inside, it is known whether a ``one_hot`` with a number of classes runs, under whatever name it was called."""

    is_in_one = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.nn.functional.one_hot:
            return func(*args, **kwargs)
        classes = kwargs.get("num_classes", args[1] if len(args) > 1 else -1)
        self.is_in_one = classes != -1
        try:
            return func(*args, **kwargs)
        finally:
            self.is_in_one = False


class StepWatcher(_private.TorchDispatchMode):
    """Sees every operator below autograd and autocast, and notes it in a recording. It keeps no tensor alive.

    Args:
        guess: what Python hears where it asks for a truth value that nobody knows, nor ``answered_as`` tells.
        on_gpu: are the kernels those of a GPU, wherever the tensors are?
        axes: of a step on a mesh that is only simulated: the axis for the name of each process group. Collectives are
            recorded, and operators on distributed tensors are those on their local parts. None for any other step.

    Attributes:
        guesses: how often it did.
        recording: what was seen so far.
        storages: which storage a tensor is in.
        gradients: whose they are, and where they go.
        modules: which module's forward pass runs.
        phase: the part of the step that runs.
    """

    def __init__(self, guess: bool = False, on_gpu: bool = False, axes: Mapping[str, str] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._on_gpu = on_gpu
        self._axes = axes
        self.guesses = 0
        self._guess = guess
        self._asked = 0
        self.recording = Recording()
        self.storages = KnownStorages(self.recording)
        self.modules = RunningModules()
        self.phase: Phase = "forward"
        # Of each autograd node, by its number: the module and the line of source that made it.
        self._origins: dict[int, tuple[str, str]] = {}
        self._is_paused = False
        self._one_hots = _OneHots()
        self._own_code_depth = 0
        self._own_code_runs = 0
        self.gradients = Gradients(self.recording, self.storages, self._reduce_over_replicas)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _private.runs_on_parts(types):
            # A distributed tensor runs operators on its local part, which come here.
            self.recording.is_distributed = True
            return NotImplemented
        if (kind := _private.collective_kind(func)) is not None:
            return self._run_collective(kind, func, args, kwargs)
        if _private.is_silent(func):
            return func(*args, **kwargs)
        if self._is_paused:
            inputs = [t for t in _private.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            return self._run(func, args, kwargs, inputs)
        inputs = [t for t in _private.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        reads = tuple(dict.fromkeys(self.storages.read(t) for t in inputs if has_storage(t)))
        out = self._run(func, args, kwargs, inputs)
        if func is not _ITEM:
            self._note(func, args, kwargs, inputs, reads, out)
        return out

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[torch.Tensor]) -> Any:
        """What the operator returns in the real step: values where they are known, else tensors without memory."""
        values, stand_ins = self.storages.values, self.storages.stand_ins
        self._asked += func is _ITEM and inputs[0].dtype is torch.bool
        # Of a number alone nothing can be a view, such as its conjugate.
        if op_facts.is_view(func) and inputs and all(is_plain(tensor) for tensor in inputs):
            if op_facts.base_name(func) == "aten::lift_fresh":
                values.pin(inputs[0])  # Python made it of numbers.
                return func(*args, **kwargs)
            out = func(*args, **kwargs)
            if not func.is_view and values.of(inputs[0]) is None:
                values.forget(inputs)  # How it lay is part of what will be computed.
            if values.of(inputs[0]) is None and self.storages.is_of_the_step(inputs[0]):
                stand_ins.note(out)
            return out
        may_run = values.may_run(func, inputs)
        if may_run or values.may_run_late(func, inputs):
            try:
                out = stand_ins.run(func, args, kwargs)
            except (_private.DataDependentOutputException, _private.DynamicOutputShapeException):
                if may_run or values.find(inputs):
                    return values.run(func, args, kwargs)
            else:
                if may_run and are_small(out):
                    return values.run(func, args, kwargs)
                values.note_late(func, args, kwargs, out)
                return out
        if func is _ITEM:
            if (value := self.storages.value_of(inputs[0])) is not None:
                return func(value)
            if self._one_hots.is_in_one:
                return 0
            if inputs[0].dtype is torch.bool:
                self.guesses += 1
                answers = _answers.get()
                return answers[self._asked - 1] if self._asked <= len(answers) else self._guess
            out = stand_ins.run(func, args, kwargs)
        else:
            shapes = result_shapes.shapes_of(func, args, self._lengths_in)
            if shapes is None:
                out = stand_ins.run(func, result_shapes.with_positions(func, args, self.storages.value_of), kwargs)
            else:
                out = stand_ins.contiguous(shapes, args[0])
        values.forget(op_facts.written(func, args, kwargs))
        return out

    @property
    def is_on_mesh(self) -> bool:
        """Is the step one on a mesh that is only simulated?"""
        return self._axes is not None

    def _run_collective(self, kind: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A collective of an operator's own; the wait for it is none, since nothing is sent."""
        if not kind:
            return args[0]
        reads = tuple(
            self.storages.read(t) for t in _private.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)
        )
        out: torch.Tensor = self.storages.stand_ins.run(func, args, kwargs)
        number = self.storages.made(out, len(self.recording.ops))
        group = getattr(args[-1], "group_name", args[-1])
        self._note_collective(kind, reads, (number,), (args[0], out), group, func=func)
        return out

    def sends(self, kind: str, output: torch.Tensor, given: torch.Tensor, group: str) -> None:
        """``fully_shard`` sends a tensor; the result goes into another that is there, or into the same."""
        number = self.storages.of(output)
        self._note_collective(kind, (self.storages.read(given),), (), (given, output), group, writes=(number,))

    def _note_collective(
        self,
        kind: str,
        reads: tuple[tuple[int, int], ...],
        makes: tuple[int, ...],
        both: tuple[torch.Tensor, torch.Tensor],
        group: str,
        writes: tuple[int, ...] = (),
        func: Any = None,
    ) -> None:
        # The axis of a real mesh is not known by the name of its group.
        axis = (self._axes or {}).get(group, "" if self._axes is None else group)
        name, layer, source = self._origin_of(f"{kind} over {axis}" if axis else kind)
        op = RecordedOp(
            func=func,
            name=name,
            layer=layer,
            source=source,
            phase=self.phase,
            reads=reads,
            makes=makes,
            writes=writes,
            moved_bytes=max(t.numel() * t.element_size() for t in both),
            dtype=str(both[0].dtype).removeprefix("torch."),
            workspace_bytes=0 if func is None else cpu_scratch.workspace_bytes(func, both, both[1]),
            is_own_code=self._own_code_depth > 0,
            collective=kind,
            axis=axis,
        )
        for number in writes:
            self.recording.storages[number].writes.append(len(self.recording.ops))
        self.recording.ops.append(op)

    def _lengths_in(self, argument: Any) -> list[int] | None:
        if not isinstance(argument, torch.Tensor):
            return list(argument)
        value = self.storages.value_of(argument)
        return None if value is None else [int(one) for one in value.flatten().unbind()]

    def pin(self, tensors: Sequence[torch.Tensor], role: str = "") -> None:
        """Count tensors that exist before the step, whether it touches them or not."""
        for tensor in filter(has_storage, tensors):
            storage = self.recording.storages[self.storages.of(tensor, role)]
            storage.role = role or storage.role  # What an optimizer's state is cannot be told by the tensor.

    def count_beside(self, size_bytes: int) -> int:
        """Count memory that is there for the whole step, though no operator touches it; the number of its storage."""
        self.recording.storages.append(RecordedStorage(size_bytes, None, "uint8", role="state"))
        return len(self.recording.storages) - 1

    @contextmanager
    def taking_marks(self) -> Iterator[None]:
        """Inside, the storage of each tensor that ``mark`` is given is noted."""

        def take(tensor: torch.Tensor, as_what: Hashable) -> None:
            if has_storage(tensor):
                number = self.storages.of(tensor)
                self.recording.marked.setdefault(as_what, []).append(number)

        token = _take.set(take)
        try:
            yield
        finally:
            _take.reset(token)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Inside, PyTorch's functions that want to know numbers hear them, as far as they can.

        ``tolist`` of a tensor hands out what is known of it; PyTorch's own looks past every mode. ``one_hot`` looks for
        the least and the greatest class on a CPU, to see that both are among those that there are, and hears that they
        are; the real step sees for itself. Where it is to find out how many classes there are, it is told nothing.
        """
        own = torch.Tensor.tolist

        def tolist(tensor: torch.Tensor) -> Any:
            with _private.no_modes():
                value = self.storages.value_of(tensor)
                if value is None:
                    raise _private.DataDependentOutputException(_ITEM)
                return own(value)

        with mock.patch.object(torch.Tensor, "tolist", tolist), self._one_hots:
            yield

    def _note(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: list[torch.Tensor],
        reads: tuple[tuple[int, int], ...],
        out: Any,
    ) -> None:
        recording = self.recording
        index = len(recording.ops)
        made: list[int] = []
        outputs = [t for t in _private.tree_leaves(out) if isinstance(t, torch.Tensor)]
        if self.phase == "forward":
            recording.forward_calls += 1
            recording.forward_results += len(outputs)
        for tensor in outputs:
            if has_storage(tensor) and not self.storages.is_known(tensor):
                made.append(self.storages.made(tensor, index))
        written = [t for t in op_facts.written(func, args, kwargs) if has_storage(t)]
        writes = tuple(dict.fromkeys(self.storages.of(t) for t in written))
        on_gpu = self._on_gpu or any(t.device.type not in ("cpu", "meta") for t in inputs)
        workspace_bytes = 0
        outputs_are_views = bool(outputs) and not made and not writes
        if outputs_are_views and any(t.layout is not torch.strided for t in outputs):
            # What a sparse tensor holds has no storage of its own here: known, it counts while the operator runs.
            workspace_bytes = self._workspace_bytes(func, args, kwargs, out, on_gpu)
            outputs_are_views = not workspace_bytes
        if outputs_are_views or op_facts.base_name(func) == "aten::lift_fresh":
            return
        statistics = {self.storages.of(t) for t in op_facts.running_statistics(func, args)}
        all_strided = all(is_plain(t) for t in (*inputs, *outputs))
        everything = [*inputs, *outputs]
        name, layer, source = self._origin(func)
        flops = 0.0 if op_facts.is_empty(func) else op_facts.flops(func, args, kwargs, out)
        op = RecordedOp(
            func=func,
            name=name,
            layer=layer,
            source=source,
            phase=self.phase,
            reads=tuple(read for read in reads if read[0] not in statistics),
            makes=tuple(made),
            writes=tuple(w for w in writes if w not in statistics),
            flops=flops,
            flops_on_cpu=cpu_times.flops(func, args, kwargs, out, flops),
            moved_bytes=0 if op_facts.is_empty(func) else sum(t.numel() * t.element_size() for t in everything),
            dtype=str((outputs or inputs)[0].dtype).removeprefix("torch.") if everything else "float32",
            repeatable=self.phase == "forward" and all_strided and self._may_repeat(func, args, kwargs, on_gpu),
            workspace_bytes=workspace_bytes or self._workspace_bytes(func, args, kwargs, out, on_gpu),
            is_own_code=self._own_code_depth > 0,
        )
        if not on_gpu:
            with self.paused():
                for number, size_bytes in cpu_scratch.real_sizes(func, args, made).items():
                    recording.storages[number].size_bytes = size_bytes
                    recording.storages[number].shape = None
        recording.ops.append(op)
        for number in writes:
            recording.storages[number].writes.append(index)

    def _workspace_bytes(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, on_gpu: bool) -> int:
        with self.paused():
            if not on_gpu:
                return cpu_trials.scratch_bytes(func, args, kwargs, out)
            return gpu_scratch.workspace_bytes(func, args, kwargs, out)

    def _may_repeat(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], on_gpu: bool) -> bool:
        if self._own_code_depth:
            return False
        # Inside of the loss function a backward pass is somebody else's: nothing is known of what it may rely on.
        return not _private.in_backward_pass() and op_facts.may_repeat(func, args, kwargs, on_gpu=on_gpu)

    def _origin(self, func: Any) -> tuple[str, str, str]:
        """Name, module and line of source of an operator; of the backward pass, those that its autograd node is of."""
        return self._origin_of(op_facts.kind(func))

    def _origin_of(self, short: str) -> tuple[str, str, str]:
        if self.phase == "update":
            return f"optimizer/{short}", "optimizer", ""
        node = _private.running_node()
        if node is None:
            origin = (self.modules.path, source_line())
            self._origins[_private.forward_sequence_number()] = origin
            return "/".join(part for part in (origin[0], short) if part), *origin
        origin = self._origins.get(node[1], ("", ""))
        return "/".join(part for part in (origin[0], node[0], short) if part), *origin

    # What ``fully_shard`` does.

    def begin_own_code(self) -> None:
        """Operators from here on are those of ``fully_shard``."""
        self._own_code_depth += 1
        self._own_code_runs += self._own_code_depth == 1

    def end_own_code(self) -> None:
        """They end here."""
        self._own_code_depth -= 1

    def allocates(self, tensor: torch.Tensor) -> bool:
        """A parameter is gathered, for the first time in the step or again."""
        recording = self.recording
        number = self.storages.of(tensor)
        if self.storages.is_freed(tensor):
            again = self.storages.made(tensor, len(recording.ops))
            recording.gathered_again[number] = again
            name = f"{self._origin_of_own_code()}gather again {tuple(tensor.shape)}"
            recording.ops.append(RecordedOp(None, name, self.phase, (), (again,), (), is_own_code=True))
            number = again
        recording.storages[number].is_gathered = recording.is_sharded = True
        recording.gathered_with[number] = self._own_code_runs
        return True

    def frees(self, tensor: torch.Tensor) -> bool:
        """A gathered parameter is let go of."""
        self.storages.freed(tensor)
        return True

    def _origin_of_own_code(self) -> str:
        return f"{self.modules.path}/" if self.modules.path else ""

    # What autograd saves.

    def pack(self, tensor: torch.Tensor) -> Any:
        """Called by autograd for each tensor that it saves."""
        if (part := _private.local(tensor)) is not tensor:
            packed_part = self.pack(part)
            return tensor if packed_part is part else _PackedPart(packed_part, _private.placement(tensor))
        saved, position = self.recording.saved, len(self.recording.ops)
        turn = saved[-1].turn + 1 if saved and saved[-1].position == position else 0
        saved.append(SavedTensor(position, turn))
        if not is_plain(tensor) or not self.storages.is_known(tensor):
            return tensor
        number = self.storages.of(tensor)
        storage = self.recording.storages[number]
        if storage.made_by is None or storage.is_gathered:
            return tensor
        saved[-1].storage, saved[-1].version = number, len(self.recording.storages[number].writes)
        packed = _Packed(len(saved) - 1, tensor, self.storages.values.copy_of(tensor))
        weakref.finalize(packed, self._packed_died, packed.number).atexit = False
        return packed

    def unpack(self, packed: Any) -> Any:
        """Called by autograd when a backward node reads what it saved."""
        if isinstance(packed, _PackedPart):
            return _private.distributed(self.unpack(packed.part), packed.placement)
        if not isinstance(packed, _Packed):
            return packed
        saved = self.recording.saved[packed.number]
        if saved.unpacked is None:
            saved.unpacked = len(self.recording.ops)
        assert saved.storage is not None
        if packed.values is None:
            tensor = self.storages.stand_ins.at(*packed.geometry)
        else:
            tensor = self.storages.values.known_again(packed.values, packed.geometry[1])
        # An operator that reads this tensor reads what was saved.
        self.storages.stands_for(tensor, saved.storage, until_it_dies=True)
        return tensor

    def _packed_died(self, number: int) -> None:
        saved = self.recording.saved[number]
        assert saved.storage is not None
        saved.released = self.recording.storages[saved.storage].read_until = len(self.recording.ops)

    def end_forward(self, loss: torch.Tensor) -> None:
        """From here on operators belong to the backward pass."""
        self.recording.forward_ops = len(self.recording.ops)
        self.recording.loss = self.storages.of(loss)
        self.storages.captured.add(self.recording.loss)
        self.phase = "backward"

    def _reduce_over_replicas(self, leaf: torch.Tensor, number: int) -> None:
        """On a simulated mesh whose replicas have whole parameters, a gradient is reduced when it is there.

        ``DistributedDataParallel`` reduces buckets of several; the bytes are the same.
        """
        group = next((name for name, axis in (self._axes or {}).items() if axis == "data"), None)
        if group is not None and not self.recording.is_sharded:
            part = _private.local(leaf)
            self._note_collective("AllReduce", ((number, 0),), (), (part, part), group)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Operators inside leave no trace."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """What stands for a tensor from before the step where its own attributes must not change."""
        return self.storages.stand_in(tensor)

    @contextmanager
    def updating(self, parameters: Mapping[int, torch.Tensor]) -> Iterator[None]:
        """Inside, operators belong to the optimizer.

        Args:
            parameters: by the address of the real one, the fake parameter that is given its recorded gradient.
        """
        phase, self.phase = self.phase, "update"
        try:
            with self.paused():
                for address, parameter in parameters.items():
                    parameter.grad = self.gradients.of(address, parameter)
                    # Its address stands for the gradient, and must not come again while the step runs.
                    self.gradients.hold([parameter.grad])
            with torch.no_grad():
                yield
        finally:
            self.phase = phase

    def gradient_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """A tensor in the recorded gradient of a real parameter; None where it has none."""
        with self.paused():
            return self.gradients.of(id(parameter), parameter)

    def finished(self) -> Recording:
        """The recording, once everything that only the trace held is gone."""
        recording = self.recording
        self.gradients.end()
        for module in self.modules.outermost:
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                self.storages.name(_private.local(tensor), name)
        alive = self.storages.survivors()
        for number in alive:
            recording.storages[number].released = None
        if alive:
            largest = max(alive, key=lambda n: recording.storages[n].size_bytes)
            made_by = recording.storages[largest].made_by
            assert made_by is not None
            _log.warning(
                "The traced step left %d tensors behind, the largest of shape %s from %s: something outside of the "
                "loss function keeps them (a hook, an attribute of a module), and they hold no values. The next real "
                "step replaces them where they are attributes; take out of lists what tracing put in.",
                len(alive),
                recording.storages[largest].shape,
                recording.ops[made_by].name,
            )
        return recording
