"""What the first step under a plan takes: the bytes that live while it runs, beside what the plan predicted."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Final

import torch

from remat.core.budget import format_bytes
from remat.torch import _backward_pass, _private
from remat.torch.emit.planned_step import unpack
from remat.torch.emit.recipes import new_storages, tensors_in
from remat.torch.trace import cpu_trials, gpu_scratch, op_facts

_WORTH_SAYING_BYTES: Final = 1 << 16
"""Scratch memory that was not predicted is named as a reason from so many bytes on. A judgement: what kernels keep for
themselves, such as partial sums, is less. With a larger one a small model's budget is broken without a reason."""

_LARGEST_ROUNDING_BYTES: Final = 1 << 20
"""As in ``CUDACachingAllocator.cpp``: the rest of a block is not split off where it is no more than this."""


class StorageMeter(_private.TorchDispatchMode):
    """Counts the storages that are made while this is entered, which may be several times, as long as they live.

    Storages are seen as operators return them, and gone when PyTorch frees them. To these comes scratch memory: what
    PyTorch's allocator hands out while a kernel runs, on a CPU and on a GPU, and what ``trace.cpu_trials`` and
    ``trace.gpu_scratch`` know beyond that.

    Attributes:
        peak_bytes: the most that lived at once; of what was there before, that of which it was told.
        unpredicted: the kernel that took the most scratch memory that was not predicted, in words; None where none
            took much.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self.unpredicted: str | None = None
        self._unpredicted_bytes = _WORTH_SAYING_BYTES
        self._bytes = 0
        self._alive: dict[int, weakref.ref[Any]] = {}
        # Bytes of storages that live on without their memory, which ``fully_shard`` took.
        self._emptied: dict[int, int] = {}
        self._is_over = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if types and _private.runs_on_parts(types):
            return NotImplemented
        # What wraps a collective's result has no memory.
        if op_facts.is_view(func) or self._is_over or _private.is_silent(func):
            return func(*args, **kwargs)
        before_bytes = self._bytes
        given = tensors_in((*args, *kwargs.values()))
        device_type = given[0].device.type if given else "cpu"
        changes: list[int] | None = None
        if device_type in ("cpu", "cuda"):
            out, changes = _private.with_allocations(partial(func, *args, **kwargs), device_type)
        else:
            out = func(*args, **kwargs)
        outputs = tensors_in(out if isinstance(out, list | tuple) else (out,))
        new = [outputs[place].untyped_storage() for place in new_storages(outputs, given)]
        rounding = rounding_bytes(new, changes) if device_type == "cuda" else 0
        for storage in new:
            self._add(storage, storage.nbytes() + rounding)
        scratch = 0
        if outputs and outputs[0].device.type == "cpu" and func.namespace == "aten":
            scratch = cpu_trials.known_bytes(func, args, kwargs, out)
        elif device_type == "cuda":
            scratch = gpu_scratch.known_bytes(func, args, kwargs)
        self.peak_bytes = max(self.peak_bytes, self._bytes + scratch)
        if changes:
            most = max(accumulate(changes))
            self.peak_bytes = max(self.peak_bytes, before_bytes + most)
            self._note_scratch(func, most - max(0, sum(changes)), scratch)
        return out

    def _note_scratch(self, func: Any, taken_bytes: int, known_bytes: int) -> None:
        if taken_bytes - known_bytes > self._unpredicted_bytes:
            self._unpredicted_bytes = taken_bytes - known_bytes
            self.unpredicted = (
                f"{op_facts.kind(func)} takes {format_bytes(taken_bytes)} of scratch memory while it runs, of which "
                f"{format_bytes(known_bytes)} were predicted"
            )

    def _add(self, storage: Any, size_bytes: int | None = None) -> None:
        key = _private.storage_key(storage)
        known = self._alive.get(key)
        if known is not None and known() is storage:
            return
        size_bytes = storage.nbytes() if size_bytes is None else size_bytes

        def gone(reference: Any) -> None:
            self._bytes -= size_bytes - self._emptied.pop(key, 0)
            if self._alive.get(key) is reference:
                del self._alive[key]

        self._alive[key] = weakref.ref(storage, gone)
        self._bytes += size_bytes

    def count_from_the_start(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors from before as long as they live."""
        for tensor in tensors:
            self._add(tensor.untyped_storage())
        self.peak_bytes = max(self.peak_bytes, self._bytes)

    def begin_own_code(self) -> None:
        """What ``fully_shard`` makes counts as anything else does."""

    def end_own_code(self) -> None:
        """The same."""

    def allocates(self, tensor: torch.Tensor) -> bool:
        """A gathered parameter's storage is given memory."""
        storage = tensor.untyped_storage()
        size_bytes = self._emptied.pop(_private.storage_key(storage), 0)
        if not size_bytes and not storage.nbytes():
            self._add(storage, tensor.numel() * tensor.element_size())
        self._bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self._bytes)
        return False

    def frees(self, tensor: torch.Tensor) -> bool:
        """A gathered parameter's storage loses its memory."""
        key = _private.storage_key(tensor.untyped_storage())
        if key in self._alive and key not in self._emptied:
            self._emptied[key] = tensor.untyped_storage().nbytes()
            self._bytes -= self._emptied[key]
        return False

    def stop(self) -> None:
        """Count no more."""
        self._is_over = True
        self._alive.clear()


def rounding_bytes(storages: Sequence[Any], changes: Sequence[int] | None) -> int:
    """What the allocator handed out beyond the size of each of these storages, on an average.

    A GPU's gives a larger block where what is left of it would be too small.
    """
    if not storages or not changes:
        return 0
    beyond = sum(changes) - sum(int(storage.nbytes()) for storage in storages)
    return min(max(0, beyond // len(storages)), _LARGEST_ROUNDING_BYTES)


class StepMeter(StorageMeter):
    """Counts the storages that one step makes, from the start of its forward pass to the end of its backward pass.

    It ends by itself where the step has no backward pass: as soon as nothing that autograd saved is there any more.

    Args:
        done: called after the backward pass.
    """

    def __init__(self, done: Callable[[StepMeter], None]) -> None:
        super().__init__()
        self._done = done
        self._is_read = False
        self._is_running = False
        self._thread = threading.get_ident()
        _backward_pass.around_backward_passes(self._around)
        if (sharded := _private.sharding()) is not None:
            sharded.observe(self)

    def unpacking(self) -> Callable[[Any], Any]:
        """What autograd is to call when a backward node reads what it saved; the caller does not keep it."""

        def read(packed: Any) -> Any:
            self._is_read = True
            return unpack(packed)

        weakref.finalize(read, self._graph_is_gone).atexit = False
        return read

    def _graph_is_gone(self) -> None:
        if not self._is_running:  # A backward pass lets go of what it has read, and is not over then.
            self.stop()

    def _around(self, run: Callable[[], Any]) -> Any:
        if threading.get_ident() != self._thread:
            return run()
        self._is_running = True
        try:
            with self:
                result = run()
        except BaseException:
            self.stop()  # Else every later backward pass of the process would go through this meter.
            raise
        finally:
            self._is_running = False
        if self._is_read:
            self.stop()
            self._done(self)
        return result

    def stop(self) -> None:
        """Count no more; a backward pass that is still to come goes by unseen."""
        super().stop()
        _backward_pass.no_longer_around_backward_passes(self._around)
        if (sharded := _private.sharding()) is not None:
            sharded.ignore(self)
