"""The device that a step runs on: its counter of memory, its size, and what lies there beside the step."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import gc
import logging
import sys
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import tensorflow as tf

from remat.core.errors import UnsupportedStep
from remat.fit.auto_budget import auto_budget_bytes
from remat.running.cost_model import DeviceProfile, device_here, get_profile
from remat.tensorflow import _private
from remat.tensorflow._traces import arguments_of_calls, threads_of_calls
from remat.tensorflow.peak.allocator import AllocatorModel
from remat.tensorflow.trace.sizes import HANDLES, Sizes, handle_bytes, shape_bytes

_log = logging.getLogger("remat")

_CPU_STATISTICS_FROM_BYTES: Final = 256 << 10
"""Smaller blocks go past the heap and its counter: ``kSmallAllocationsThreshold`` of TensorFlow's mkl_cpu_allocator.h.

Where a release changes it, predicted peaks are off by what the heap adds to blocks of such sizes, and measured steps no
longer agree with what ``test_tf_allocator.py`` expects.
"""

_ALL_OF_A_GPU_BYTES: Final = 1 << 40
"""The first region of a GPU's heap: more than any GPU has, since TensorFlow takes all of its memory at once.

With less, the simulated heap would get several regions that never join, and peaks would come out too high.
"""


@dataclass(frozen=True)
class Device:
    """One device of this process.

    Attributes:
        name: as in ``tf.config.experimental.get_memory_info``: "CPU:0", "GPU:0".
        shared_by: how many devices its counter counts together, each of which is taken to use as much as the others.
    """

    name: str
    shared_by: int = 1

    @property
    def is_gpu(self) -> bool:
        """Is it a GPU?"""
        return self.name.startswith("GPU")

    @property
    def allocator(self) -> AllocatorModel:
        """How this device uses and counts memory."""
        if self.is_gpu:
            return AllocatorModel(min_counted_bytes=0, first_region_bytes=_ALL_OF_A_GPU_BYTES)
        if not _private.uses_onednn():
            return AllocatorModel(min_counted_bytes=sys.maxsize, own_kernels="all")
        return AllocatorModel(_CPU_STATISTICS_FROM_BYTES, converts_half=True, own_kernels="not in oneDNN")

    @property
    def has_counter(self) -> bool:
        """Does TensorFlow count this device's memory?"""
        return _has_counter(self.name)

    def counts(self, full_name: str) -> bool:
        """Does this device's counter count what lies on a device, by the name that tensors carry?"""
        name = self.name.partition(":")[0] if self.shared_by > 1 else self.name
        return f"device:{name}" in full_name

    @property
    def in_use_bytes(self) -> int:
        """Bytes in use now by this device's own counter, after garbage is gone; 0 where there is no counter."""
        gc.collect()  # What a failed trace left behind, such as one whose budget was refused, sits in cycles.
        if not self.has_counter:
            _say_once_that_nothing_is_counted(self.name)
            return 0
        return self._statistics("current")

    @property
    def counted_bytes(self) -> int:
        """Bytes in use by this device's own counter, garbage included.

        Raises:
            UnsupportedStep: where there is no counter.
        """
        self._check_counter()
        return self._statistics("current")

    @property
    def peak_bytes(self) -> int:
        """The largest number of bytes in use since the last reset.

        Raises:
            UnsupportedStep: where there is no counter.
        """
        self._check_counter()
        return self._statistics("peak")

    def reset_peak(self) -> None:
        """Start a new peak.

        Raises:
            UnsupportedStep: where there is no counter.
        """
        self._check_counter()
        tf.config.experimental.reset_memory_stats(self.name)

    def auto_budget_bytes(self) -> int:
        """What ``budget="auto"`` means on this device.

        Raises:
            InvalidBudget: on a CPU, whose memory is shared with everything else.
        """
        return auto_budget_bytes(self.name, _private.memory_limit_bytes(self.name) if self.is_gpu else None)

    def _check_counter(self) -> None:
        if not self.has_counter:
            raise UnsupportedStep(
                f"no peak can be measured on {self.name}: {_NO_COUNTER}. Set TF_ENABLE_ONEDNN_OPTS=1 in the "
                "environment before TensorFlow is imported"
            )

    def _statistics(self, key: str) -> int:
        return int(tf.config.experimental.get_memory_info(self.name)[key]) // self.shared_by


_NO_COUNTER = (
    "TensorFlow counts the memory of a CPU only while oneDNN is on, which it turns on by itself only on CPUs with "
    "certain instructions (AVX-512 VNNI and later ones)"
)


@functools.cache
def _has_counter(name: str) -> bool:
    """Asked of the counter itself: which CPUs have one by default differs between versions of TensorFlow."""
    try:
        tf.config.experimental.get_memory_info(name)
    except ValueError:
        return False
    return True


@functools.cache
def _say_once_that_nothing_is_counted(name: str) -> None:
    _log.warning(
        "What lies on %s beside a step is not counted against its budget: %s. The step's own bytes are counted from "
        "its trace. TF_ENABLE_ONEDNN_OPTS=1 turns the counter on.",
        name,
        _NO_COUNTER,
    )


_planned_device: contextvars.ContextVar[Device | None] = contextvars.ContextVar("remat_planned_device", default=None)


@contextlib.contextmanager
def planning_for(device: Device) -> Iterator[None]:
    """Inside, ``current_device`` is another one than that on which TensorFlow puts operations."""
    token = _planned_device.set(device)
    try:
        yield
    finally:
        _planned_device.reset(token)


def current_device() -> Device:
    """The device that a step is planned for; without another word the first GPU, else the CPU."""
    planned = _planned_device.get()
    if planned is not None:
        return planned
    return Device("GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0")


def profile_here() -> DeviceProfile:
    """The figures of the device that a step is planned for."""
    return get_profile(device_here("a100" if current_device().is_gpu else "cpu"))


@dataclass(frozen=True)
class _Argument:
    """What there is to know of a tensor that exists, and that a function will be called with."""

    shape: tf.TensorShape
    dtype: tf.DType
    device: str

    @classmethod
    def of(cls, tensor: tf.Tensor) -> _Argument:
        return cls(tensor.shape, tensor.dtype, tensor.backing_device)

    def may_become(self, tensor: tf.Tensor) -> bool:
        return bool(self.dtype == tensor.dtype and self.shape.is_compatible_with(tensor.shape))


_arguments: dict[int, tuple[_Argument, ...]] = {}
"""By a thread's number, what it has said that functions will be called with, those that its replicas trace, too."""


@contextlib.contextmanager
def called_with(values: Iterable[Any]) -> Iterator[None]:
    """Inside, functions that are planned will be called with these values, though a data set may hand them over.

    Without it they are taken to be called with what the calls that led here were given.

    Args:
        values: those that are no tensors are on their way to the device still. They are not held.
    """
    there = tuple(_Argument.of(value) for value in values if isinstance(value, tf.Tensor))
    del values  # This frame lives as long as the block.
    thread = threading.get_ident()
    before = _arguments.get(thread)
    _arguments[thread] = there
    try:
        yield
    finally:
        if before is None:
            del _arguments[thread]
        else:
            _arguments[thread] = before


def _arguments_here() -> Sequence[_Argument]:
    """What functions traced here will be called with: what ``called_with`` says, or what calls led here."""
    for thread, _ in threads_of_calls():
        if (said := _arguments.get(thread)) is not None:
            return said
    return [_Argument.of(tensor) for tensor in arguments_of_calls()]


def resident_elsewhere_bytes(
    func_graph: _private.FuncGraph, inputs: Sequence[tf.Tensor], carried: Collection[str] = ()
) -> int:
    """Bytes in use on the device now that are no input of a function, by the device's own counter.

    An argument that is on its way still, such as an array of numpy or the next batch of a data set, is in use no more
    than what the function will make itself.

    Args:
        func_graph: the function, whose trace is about to end.
        inputs: those of its inputs that are meant.
        carried: names of inputs that do not exist yet while the function is traced; see ``carried_inputs``.
    """
    device = current_device()
    counted = device.allocator.counted
    known = sum(counted(handle_bytes(tensor)) for tensor in inputs if tensor.dtype == tf.resource)
    captured = {inside.name: outside for outside, inside in func_graph.captures}
    waiting = [argument for argument in _arguments_here() if device.counts(argument.device)]
    for tensor in inputs:
        if tensor.dtype in HANDLES or tensor.name in carried:
            continue
        outside = captured.get(tensor.name)
        if outside is not None and not tf.is_symbolic_tensor(outside):
            known += counted(shape_bytes(outside.shape, outside.dtype))
            continue
        argument = next((one for one in waiting if one.may_become(tensor)), None)
        if argument is not None:
            waiting.remove(argument)
            known += counted(shape_bytes(argument.shape, argument.dtype))
    return max(0, device.in_use_bytes - known)


def appended_bytes(body: _private.FuncGraph, input_shapes: Mapping[str, Sequence[int]]) -> int:
    """Bytes that one iteration of a loop appends to the lists that it hands on.

    Args:
        body: of the loop.
        input_shapes: real shapes of inputs traced with unknown dimensions, by tensor name.
    """
    items = [
        op.inputs[2]
        for op in body.get_operations()
        if op.type == "TensorListSetItem" and op.inputs[0].op.type == "Placeholder"
    ]
    if not items:
        return 0
    sizes = Sizes(body, input_shapes)
    return sum(sizes.bytes(item) or 0 for item in items)
