"""Records one training step on fake tensors.

Nothing is allocated and no parameter changes: PyTorch's ``FakeTensorMode`` carries shapes, strides and devices only.
"""

from __future__ import annotations

import logging
import random
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch

from remat.errors import UnsupportedStep
from remat.torch import _private, cpu_kernels, op_facts
from remat.torch.known_values import KnownValues
from remat.torch.names import ModuleNames
from remat.torch.recording import Phase, RecordedOp, RecordedStorage, Recording, Slot

_log = logging.getLogger("remat")

_ITEM = torch.ops.aten._local_scalar_dense.default


def record_step(
    loss_fn: Callable[..., Any],
    args: Sequence[Any],
    optimizer: torch.optim.Optimizer | None = None,
    *,
    accumulates: bool = False,
    resident: Sequence[torch.Tensor] = (),
) -> Recording:
    """Run the loss, its gradients and the optimizer's update on fake tensors.

    Args:
        loss_fn: returns the loss, a tensor of one element.
        args: its arguments.
        optimizer: whose state and update are counted; it is not changed.
        resident: tensors that count although the step does not touch them.
        accumulates: do gradients of earlier micro-batches exist, to which those of this step are added?

    Raises:
        UnsupportedStep: where Python needs the value of a tensor, or the loss cannot be differentiated.
    """
    recorder = StepRecorder()
    with _undisturbed(), ExitStack() as stack:
        stack.enter_context(recorder.fake_mode)
        stack.enter_context(recorder)
        recorder.pin([t for t in _private.tree_leaves([*args, *resident]) if isinstance(t, torch.Tensor)])
        with recorder.names, torch.autograd.graph.saved_tensors_hooks(recorder.pack, recorder.unpack):
            loss = _loss_of(loss_fn, args)
        recorder.end_forward(loss)
        _differentiate(recorder, loss, accumulates)
        del loss
        if optimizer is not None:
            from remat.torch.update import record_update

            record_update(recorder, optimizer)
    return recorder.finished()


def _loss_of(loss_fn: Callable[..., Any], args: Sequence[Any]) -> torch.Tensor:
    try:
        loss = loss_fn(*args)
    except (_private.DataDependentOutputException, _private.DynamicOutputShapeException) as error:
        raise UnsupportedStep(
            f"the step cannot be traced without values: {getattr(error, 'func', error)} turns a tensor's values into a "
            "Python number or a shape (.item(), if tensor:, nonzero). Compute that outside of the loss and pass the "
            "result in, or replace it by operations on tensors"
        ) from error
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        what = (
            f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
        )
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            what += " that depends on no parameter"
        raise UnsupportedStep(f"the loss function returned {what}; it returns a loss of one element to differentiate")
    return loss


def _differentiate(recorder: StepRecorder, loss: torch.Tensor, accumulates: bool) -> None:
    """As ``loss.backward()`` would, but leaving every ``grad`` alone, and hooks on accumulated gradients unrun."""
    leaves = _private.leaves_of(loss)
    hooks = [leaf.register_hook(recorder.accumulation_into(leaf, accumulates)) for leaf in leaves]
    try:
        recorder.hold_gradients(torch.autograd.grad(loss, leaves, allow_unused=True))
    except (_private.DataDependentOutputException, _private.DynamicOutputShapeException) as error:
        raise UnsupportedStep(
            f"the backward pass cannot be traced: {getattr(error, 'func', error)} needs a tensor's values"
        ) from error
    except RuntimeError as error:
        if "use_reentrant=True" not in str(error):
            raise
        raise UnsupportedStep(
            "torch.utils.checkpoint with use_reentrant=True runs a backward pass of its own and cannot be traced; give "
            "use_reentrant=False, or take the checkpoint out and leave the choice to the plan"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Python's and NumPy's random states as before; PyTorch's own are not drawn from by fake tensors."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


class _Saved:
    """What stands in autograd's graph for a tensor that was saved."""

    __slots__ = ("__weakref__", "geometry", "slot")

    def __init__(self, slot: int, tensor: torch.Tensor) -> None:
        self.slot = slot
        self.geometry = (
            tuple(tensor.shape),
            tensor.stride(),
            tensor.storage_offset(),
            tensor.dtype,
            tensor.device,
            tensor.untyped_storage().nbytes() // max(1, tensor.element_size()),
        )


class StepRecorder(_private.TorchDispatchMode):
    """Sees every operator below autograd and autocast. Fake tensors are not kept alive by it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake_mode = _private.FakeTensorMode(allow_non_fake_inputs=True)
        self.recording = Recording()
        self.names = ModuleNames()
        self._values = KnownValues()
        self.phase: Phase = "forward"
        self._known: dict[int, int] = {}
        self._pinned: dict[int, int] = {}
        # Real tensors and the fake ones that stand for them, both kept: their storages are told apart by address.
        self._fakes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._names_by_node: dict[int, str] = {}
        self._is_paused = False
        self._held: list[Any] = []
        # What lives on: the loss and the gradients. The latter by the address of the parameter.
        self._captured: set[int] = set()
        self._gradients: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_paused or _private.is_silent(func):
            return func(*args, **kwargs)
        args, kwargs = _private.tree_map_only(torch.Tensor, self._fake, (tuple(args), kwargs))
        inputs = [t for t in _private.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        reads = tuple(dict.fromkeys(self._read(t) for t in inputs if self._has_storage(t)))
        if func is _ITEM and (number := self._values.item(inputs[0])) is not None:
            return number
        out = func(*args, **kwargs)
        self._values.follow(func, args, kwargs, inputs, out)
        self._note(func, args, kwargs, inputs, reads, out)
        return out

    # What the step reads and makes.

    def pin(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Count tensors that exist before the step; returns their storages."""
        return [self._storage_of(self._fake(t)) for t in tensors if self._has_storage(t)]

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, _private.FakeTensor):
            return tensor
        if id(tensor) not in self._fakes:
            if tensor.device.type not in ("cpu", "meta"):
                self.recording.device = tensor.device.type
            fake: torch.Tensor = self.fake_mode.from_tensor(tensor)
            self._fakes[id(tensor)] = (tensor, fake)
            self._values.pin(fake, tensor)
            if self._has_storage(tensor):
                real = _key(tensor)
                if real not in self._pinned:
                    self._pinned[real] = self._add_storage(tensor, None)
                self._known[_key(fake)] = self._pinned[real]
        return self._fakes[id(tensor)][1]

    @staticmethod
    def _has_storage(tensor: torch.Tensor) -> bool:
        return tensor.layout is torch.strided

    def _add_storage(self, tensor: torch.Tensor, made_by: int | None) -> int:
        size = int(tensor.untyped_storage().nbytes())
        dtype = str(tensor.dtype).removeprefix("torch.")
        self.recording.storages.append(RecordedStorage(size, tuple(tensor.shape), dtype, made_by))
        return len(self.recording.storages) - 1

    def _read(self, tensor: torch.Tensor) -> tuple[int, int]:
        number = self._storage_of(tensor)
        return number, len(self.recording.storages[number].writes)

    def _storage_of(self, tensor: torch.Tensor) -> int:
        number = self._known.get(_key(tensor))
        if number is None:
            # Made out of sight, by Python's own constructors: it is there before the operator that reads it.
            number = self._known[_key(tensor)] = self._add_storage(tensor, None)
            self._watch(tensor, number, self._storage_died)
        return number

    def _watch(self, tensor: torch.Tensor, number: int, died: Callable[[int, int], None]) -> None:
        storage = tensor.untyped_storage()
        weakref.finalize(storage, died, _private.storage_key(storage), number).atexit = False

    def _storage_died(self, key: int, number: int) -> None:
        self._forget(key, number)
        if number not in self._captured:
            self.recording.storages[number].released = len(self.recording.ops)

    def _copy_died(self, key: int, number: int) -> None:
        self._forget(key, number)
        self.recording.storages[number].read_until = len(self.recording.ops)

    def _forget(self, key: int, number: int) -> None:
        if self._known.get(key) == number:
            del self._known[key]

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
        for tensor in outputs:
            if self._has_storage(tensor) and _key(tensor) not in self._known:
                number = self._known[_key(tensor)] = self._add_storage(tensor, index)
                self._watch(tensor, number, self._storage_died)
                made.append(number)
        written = [t for t in op_facts.written(func, args, kwargs) if self._has_storage(t)]
        writes = tuple(dict.fromkeys(self._storage_of(t) for t in written))
        outputs_are_views = bool(outputs) and not made and not writes
        if outputs_are_views or op_facts.base_name(func) == "aten::lift_fresh":
            return
        statistics = {self._storage_of(t) for t in op_facts.running_statistics(func, args)}
        on_gpu = any(t.device.type not in ("cpu", "meta") for t in inputs)
        all_strided = all(self._has_storage(t) and type(t) is _private.FakeTensor for t in (*inputs, *outputs))
        everything = [*inputs, *outputs]
        op = RecordedOp(
            func=func,
            name=self._name(func),
            phase=self.phase,
            reads=tuple(read for read in reads if read[0] not in statistics),
            makes=tuple(made),
            writes=tuple(w for w in writes if w not in statistics),
            flops=op_facts.flops(func, args, kwargs, out),
            moved_bytes=sum(t.numel() * t.element_size() for t in everything),
            dtype=str((outputs or inputs)[0].dtype).removeprefix("torch.") if everything else "float32",
            repeatable=self.phase == "forward" and all_strided and self._may_repeat(func, args, kwargs, on_gpu),
            workspace_bytes=0 if on_gpu else cpu_kernels.workspace_bytes(func, args, out),
        )
        if not on_gpu:
            with self.paused():
                for number, size_bytes in cpu_kernels.real_sizes(func, args, made).items():
                    recording.storages[number].size_bytes = size_bytes
                    recording.storages[number].shape = None
        recording.ops.append(op)
        for number in writes:
            recording.storages[number].writes.append(index)

    def _may_repeat(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], on_gpu: bool) -> bool:
        # Inside of the loss function a backward pass is somebody else's: nothing is known of what it may rely on.
        return not _private.in_backward_pass() and op_facts.may_repeat(func, args, kwargs, on_gpu=on_gpu)

    def _name(self, func: Any) -> str:
        short = func.name().partition("::")[2]
        if self.phase == "update":
            return f"optimizer/{short}"
        node = _private.running_node()
        if node is None:
            path = self.names.current
            self._names_by_node[_private.forward_sequence_number()] = path
            return f"{path}/{short}" if path else short
        path = self._names_by_node.get(node[1], "")
        return "/".join(part for part in (path, node[0], short) if part)

    # What autograd saves.

    def pack(self, tensor: torch.Tensor) -> Any:
        """Called by autograd for each tensor that it saves."""
        slots, position = self.recording.slots, len(self.recording.ops)
        turn = slots[-1].turn + 1 if slots and slots[-1].position == position else 0
        slots.append(Slot(position, turn))
        if type(tensor) is not _private.FakeTensor or not self._has_storage(tensor):
            return tensor
        number = self._storage_of(tensor)
        if self.recording.storages[number].made_by is None:
            return tensor
        slots[-1].storage, slots[-1].version = number, len(self.recording.storages[number].writes)
        saved = _Saved(len(slots) - 1, tensor)
        weakref.finalize(saved, self._slot_released, slots[-1]).atexit = False
        return saved

    def unpack(self, saved: Any) -> Any:
        """Called by autograd when a backward node reads what it saved."""
        if not isinstance(saved, _Saved):
            return saved
        slot = self.recording.slots[saved.slot]
        if slot.unpacked is None:
            slot.unpacked = len(self.recording.ops)
        assert slot.storage is not None
        shape, stride, offset, dtype, device, elements = saved.geometry
        self._is_paused = True
        try:
            whole = torch.empty(elements, dtype=dtype, device=device)
            tensor = whole.as_strided(shape, stride, offset)
        finally:
            self._is_paused = False
        # The same storage as far as the step is concerned: who reads it reads what was saved.
        self._known[_key(tensor)] = slot.storage
        self._watch(tensor, slot.storage, self._copy_died)
        return tensor

    def _slot_released(self, slot: Slot) -> None:
        slot.released = len(self.recording.ops)
        assert slot.storage is not None
        self.recording.storages[slot.storage].read_until = len(self.recording.ops)

    # The end of the forward pass, gradients.

    def end_forward(self, loss: torch.Tensor) -> None:
        """From here on operators belong to the backward pass."""
        self.recording.forward_ops = len(self.recording.ops)
        self.recording.loss = self._storage_of(loss)
        self._captured.add(self.recording.loss)
        self.phase = "backward"

    def accumulation_into(self, leaf: torch.Tensor, exists: bool) -> Callable[[torch.Tensor], None]:
        """What autograd does with the finished gradient of a leaf: take it over, copy it, or add it to an older one."""

        def accumulate(gradient: torch.Tensor) -> None:
            recording = self.recording
            index = len(recording.ops)
            if not self._has_storage(gradient):
                return
            source = self._storage_of(gradient)
            size = leaf.numel() * leaf.element_size()
            made: list[int] = []
            reads = [self._read(gradient)]
            # Autograd takes a gradient over if nobody else holds it and its strides are those of the parameter.
            owned = recording.storages[source].made_by is not None and source not in self._captured
            if not exists and owned and _same_layout(gradient, leaf):
                self._captured.add(source)
                self._gradients[id(leaf)] = source
                return
            total = RecordedStorage(size, tuple(leaf.shape), str(leaf.dtype).removeprefix("torch."))
            recording.storages.append(total)
            number = len(recording.storages) - 1
            if exists:
                reads.append((number, 0))
            else:
                total.made_by = index
                made.append(number)
            name = f"AccumulateGrad {tuple(leaf.shape)}"
            recording.ops.append(
                RecordedOp(None, name, "backward", tuple(reads), tuple(made), (), moved_bytes=2 * size)
            )
            self._captured.add(number)
            self._gradients[id(leaf)] = number

        return accumulate

    def hold_gradients(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Keep the gradients to the end of the step, as ``grad`` does."""
        self._held.extend(gradients)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Operators inside leave no trace."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake tensor of a real one."""
        return self._fake(tensor)

    def begin_update(self, parameters: Mapping[int, torch.Tensor]) -> None:
        """From here on operators belong to the optimizer.

        Args:
            parameters: by the address of the real one, the fake parameter that is given its recorded gradient.
        """
        self.phase = "update"
        with self.paused():
            for address, parameter in parameters.items():
                parameter.grad = None
                if (number := self._gradients.get(address)) is not None:
                    parameter.grad = torch.empty_like(parameter)
                    self._known[_key(parameter.grad)] = number

    def finished(self) -> Recording:
        """The recording, once everything that only the trace held is gone."""
        recording = self.recording
        self._held.clear()
        alive = [n for n in set(self._known.values()) if self._survives(n)]
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

    def _survives(self, number: int) -> bool:
        return self.recording.storages[number].made_by is not None and number not in self._captured


def _key(tensor: torch.Tensor) -> int:
    return _private.storage_key(tensor.untyped_storage())


def _same_layout(gradient: torch.Tensor, leaf: torch.Tensor) -> bool:
    """Autograd's layout contract: the strides of a dense parameter, else contiguous."""
    if gradient.dtype != leaf.dtype or gradient.device != leaf.device:
        return False
    dense = leaf.is_contiguous() or leaf.is_contiguous(memory_format=torch.channels_last)
    wanted = leaf.stride() if dense else None
    same = gradient.stride() == wanted if wanted is not None else gradient.is_contiguous()
    return same or all(
        size <= 1 or a == b for size, a, b in zip(gradient.shape, gradient.stride(), leaf.stride(), strict=True)
    )
