"""Real peak bytes and seconds of a step."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from remat.running.measurement import Measurement, check_repeats, median_time_s
from remat.torch import _private
from remat.torch.trace import op_facts


def measure(fn: Callable[..., Any], *args: Any, repeats: int = 3, **kwargs: Any) -> Measurement:
    """Run a step and read PyTorch's own record of memory.

    On a GPU that is ``torch.cuda.max_memory_allocated``, which counts everything in the process. On a CPU it is every
    allocation that the profiler sees, the kernels' scratch memory included, and the tensors from before the step that
    it reads; what libraries allocate behind PyTorch's back is not seen.

    Args:
        fn: one step: a function that returns a loss, whose gradients are then computed and thrown away, or one that
            does all of it. It runs ``repeats + 2`` times.
        *args: its arguments.
        repeats: timed runs, 1 or more.
        **kwargs: further arguments of ``fn``.

    Raises:
        ValueError: for fewer than one run.
    """
    check_repeats(repeats)
    _run(fn, args, kwargs)
    resident = _ResidentWatcher()
    if not _any_on_gpu(args, kwargs):
        # Compiled code hides what it reads; the same step run eagerly reads the same.
        with torch.compiler.set_stance("force_eager"), resident, _private.observed_sharding(resident):
            _run(fn, args, kwargs)
    on_gpu = resident.is_on_gpu or _any_on_gpu(args, kwargs)
    peak_bytes = 0 if on_gpu else resident.bytes + _cpu_peak_bytes(fn, args, kwargs)
    wait: Callable[[], None] = torch.cuda.synchronize if on_gpu else lambda: None

    def run(_: None) -> None:
        _run(fn, args, kwargs)
        wait()

    if on_gpu:
        gc.collect()  # What a model before this one left in circles is no part of the step.
        torch.cuda.reset_peak_memory_stats()
    time_s = median_time_s(run, repeats, wait)
    if on_gpu:
        peak_bytes = torch.cuda.max_memory_allocated()
    return Measurement(peak_bytes, time_s)


def _any_on_gpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return any(isinstance(t, torch.Tensor) and t.is_cuda for t in _private.tree_leaves((args, kwargs)))


def _run(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """One step. Gradients that it made for a returned loss are taken away again."""
    result = fn(*args, **kwargs)
    if isinstance(result, torch.Tensor) and result.numel() == 1 and result.requires_grad:
        leaves = _private.leaves_of(result)
        before = [(leaf, leaf.grad) for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        try:
            result.backward()
        finally:
            for leaf, gradient in before:
                leaf.grad = gradient


def _cpu_peak_bytes(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The largest sum of what was allocated during the step and not yet freed."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        _run(fn, args, kwargs)
    sizes: dict[int, int] = {}
    now = peak = 0
    for address, size in _private.memory_events(profiled):
        if size > 0:
            sizes[address] = size
            now += size
            peak = max(peak, now)
        else:
            # A storage from before the step was never added, so that its end takes nothing away.
            now -= sizes.pop(address, 0)
    return peak


class _ResidentWatcher(_private.TorchDispatchMode):
    """Counts the storages from before the step that it reads."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sizes: dict[int, tuple[Any, int]] = {}
        self._made: dict[int, Any] = {}
        self._seen_inside: dict[int, Any] = {}
        self._own_code_depth = 0
        self.is_on_gpu = False

    def begin_own_code(self) -> None:
        """``fully_shard`` begins. What a collective takes for itself is made unseen, and seen when it is read."""
        self._own_code_depth += 1

    def end_own_code(self) -> None:
        """It ends: what was first read inside and is gone was not there before the step."""
        self._own_code_depth -= 1
        if not self._own_code_depth:
            for key, weak in self._seen_inside.items():
                if (storage := weak()) is not None:
                    self._sizes[key] = (storage, storage.nbytes())
            self._seen_inside.clear()

    def allocates(self, tensor: torch.Tensor) -> bool:
        """A storage from before the step gets its memory in it: that is an allocation like any other."""
        storage = tensor.untyped_storage()
        if not storage.nbytes():
            self._made[_private.storage_key(storage)] = _private.weak(storage)
        return False

    def frees(self, tensor: torch.Tensor) -> bool:
        """Not counted."""
        return False

    @property
    def bytes(self) -> int:
        """Bytes of those storages."""
        return sum(size for _, size in self._sizes.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if types and _private.runs_on_parts(types):
            return NotImplemented
        is_lifted = op_facts.base_name(func) == "aten::lift_fresh"
        for tensor in _private.tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                self.is_on_gpu = self.is_on_gpu or tensor.is_cuda
                storage = _private.local(tensor).untyped_storage()
                if is_lifted and storage.resizable():
                    continue  # Made of numbers, unseen, in this step; what shares an array of numpy is not.
                key = _private.storage_key(storage)
                made = self._made.get(key)
                if made is not None and made() is storage:
                    continue
                if self._own_code_depth and key not in self._sizes:
                    self._seen_inside[key] = _private.weak(storage)
                else:
                    self._sizes[key] = (storage, storage.nbytes())
        out = func(*args, **kwargs)
        for tensor in _private.tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                storage = _private.local(tensor).untyped_storage()
                key = _private.storage_key(storage)
                if key not in self._sizes:
                    self._made[key] = _private.weak(storage)
        return out
