"""What a step allocates at its peak once Inductor has compiled it, read from the code that Inductor writes."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from unittest import mock

import torch
from torch import fx

from remat.core.errors import UnsupportedStep
from remat.torch._private import OpOverload, storage_key, tree_leaves, tree_map_only
from remat.torch.compiled._inductor import (
    PythonWrapperCodegen,
    V,
    compile_fx_inner,
    copied,
    ir,
    lines,
    number_of,
    patch,
)
from remat.torch.trace import cpu_trials, gpu_scratch

AS_EVER: Final[Mapping[str, Any]] = {}
"""No change to Inductor's settings."""
FRUGAL: Final[Mapping[str, Any]] = {"allow_buffer_reuse": False, "pattern_matcher": False}
"""Two habits of Inductor off that weigh nothing against memory. It holds a freed buffer back for a later one of its
size, and makes a product only where a sum needs it, so that the factors are held until then."""


class _Read(BaseException):
    """Ends the compilation of a module once its lines are read. It is no ``Exception``, so that nobody handles it."""


def peak_bytes(modules: Iterable[fx.GraphModule], settings: Mapping[str, Any] = AS_EVER) -> int:
    """What a step allocates at its peak once compiled: Inductor writes its code, and no kernel is built.

    The inputs of the step do not count; what was saved for the backward pass does until it is freed. Scratch memory
    within operators that are not Inductor's own is predicted.

    Args:
        modules: forward and backward pass, in the convention of AOTAutograd.
        settings: Inductor's, where they are not the present ones.

    Raises:
        UnsupportedStep: if Inductor writes no code in which that could be read.
    """
    made: dict[str, _Result] = {}
    return max(_peak_of(copied(module), made, settings) for module in modules)


@dataclass(frozen=True)
class _Result:
    """What Inductor makes of a result of the forward pass.

    Attributes:
        strides: its layout, which may differ from that in eager mode.
        is_input: is it an input as it came? One that convolutions read is handed on as its copy with channels last.
    """

    strides: tuple[int, ...]
    is_input: bool


def _peak_of(module: fx.GraphModule, made: dict[str, _Result], settings: Mapping[str, Any]) -> int:
    """The peak of one pass. The forward pass, which comes first, adds its results to ``made`` by their names."""
    (output,) = module.graph.find_nodes(op="output")
    results = tree_leaves(output.args)
    inputs = module.graph.find_nodes(op="placeholder")
    is_backward = any("tangents" in node.name for node in inputs)
    # Gradients get the layout that they have in eager mode; what is saved may have another.
    visible = [n for n, node in enumerate(results) if is_backward and isinstance(node, fx.Node)]
    output.meta["user_visible_output_idxs"] = visible
    values = {node.name: _laid_out(node.meta["val"], made.get(node.name)) for node in inputs}
    memory = _Memory()
    memory.receive({name: value for name, value in values.items() if not _is_input_of_step(name, made.get(name))})
    if not any(node.op == "call_function" for node in module.graph.nodes):
        return memory.ledger.peak_bytes

    def read_lines(wrapper: PythonWrapperCodegen, is_inference: bool) -> None:
        plan_memory(wrapper, is_inference)
        for line in wrapper.lines:
            memory.run(line)
        for node, result in zip(results, V.graph.graph_outputs, strict=True):
            if isinstance(node, fx.Node) and result.has_tensor_output():
                strides = tuple(int(n) for n in result.get_stride())
                made[node.name] = _Result(strides, result.get_name() in V.graph.graph_inputs)
        raise _Read

    plan_memory = PythonWrapperCodegen.run_wrapper_ir_passes
    shown = mock.patch.object(PythonWrapperCodegen, "run_wrapper_ir_passes", read_lines)
    try:
        with shown, patch({**settings, "fx_graph_cache": False}):
            compile_fx_inner(module, list(values.values()), is_backward=is_backward)
    except _Read:
        return memory.ledger.peak_bytes
    raise UnsupportedStep("Inductor wrote no Python code for this step, in which its memory could be read")


def _is_input_of_step(name: str, result: _Result | None) -> bool:
    return name.startswith("primals") and (result is None or result.is_input)


def _laid_out(value: Any, result: _Result | None) -> Any:
    """A value in the layout that it has when it arrives, as AOTAutograd tells it."""
    if not isinstance(value, torch.Tensor) or result is None or result.strides == value.stride():
        return value
    return value.as_strided(value.shape, result.strides)


class _Memory:
    """Follows the lines of a module's code, and counts what each does to memory."""

    def __init__(self) -> None:
        self.ledger = Ledger()

    def receive(self, inputs: Mapping[str, Any]) -> None:
        """What the forward pass saved. Views of one storage hold it together."""
        holders: dict[int, str] = {}
        for name, value in inputs.items():
            if not isinstance(value, torch.Tensor):
                continue
            storage = value.untyped_storage()
            holder = holders.setdefault(storage_key(storage), name)
            if holder == name:
                self.ledger.allocate(name, storage.nbytes())
            else:
                self.ledger.share(name, holder)

    def run(self, line: Any) -> None:
        """Follow one line. A kind that is not named here allocates nothing, or not from PyTorch's allocator."""
        ledger = self.ledger
        match line:
            case lines.AllocateLine():
                ledger.allocate(line.node.get_name(), _size_bytes(line.node))
            case lines.ReuseLine():
                ledger.share(line.reused_as.get_name(), line.node.get_name())
                if line.delete_old:
                    ledger.free(line.node.get_name())
            case lines.ReinterpretLine():
                ledger.share(line.reused_as.get_name(), line.node.get_name())
            case lines.FreeLine():
                ledger.free(line.node.get_name())
            case lines.FreeIfNotReusedLine() if not line.is_reused:
                ledger.free(line.node.get_name())
            case lines.MultiOutputLine():
                ledger.share(line.result_name, line.arg_name, _place(line.indices))
            case lines.ExternKernelAllocLine():
                self._allocate_results(line.node)
                ledger.scratch(_scratch_bytes(line.node))
            case lines.ExternKernelOutLine():
                ledger.scratch(_scratch_bytes(line.node))

    def _allocate_results(self, kernel: Any) -> None:
        name = kernel.get_name()
        if shared := kernel.get_inputs_that_alias_output():
            self.ledger.share(name, shared[0])
        elif isinstance(kernel.layout, ir.MultiOutputLayout):
            results = [one for one in tree_leaves(kernel.outputs) if isinstance(one, ir.MultiOutput)]
            self.ledger.allocate_parts(name, {_place(one.indices): _size_bytes(one) for one in results})
        elif not isinstance(kernel.layout, ir.NoneLayout):
            self.ledger.allocate(name, _size_bytes(kernel))


def _size_bytes(buffer: Any) -> int:
    elements = number_of(V.graph.get_allocation_storage_size(buffer))
    return elements * int(buffer.get_dtype().itemsize)


def _scratch_bytes(kernel: Any) -> int:
    """Scratch memory of an operator's own kernel, its arguments laid out as Inductor has them."""
    if kernel.get_device_or_error().type != "cpu":
        return max(map(_scratch_on_gpu, kernel.origins), default=0)
    with V.fake_mode:
        laid_out = [_stand_in(one) for one in kernel.inputs]
    found = 0
    for origin in kernel.origins:
        if not isinstance(origin.target, OpOverload):
            continue
        tensors = [one for one in tree_leaves(origin.args) if isinstance(one, fx.Node)]
        values = laid_out if len(laid_out) == len(tensors) else [one.meta["val"] for one in tensors]
        known = dict(zip(tensors, values, strict=True))
        args = tree_map_only(fx.Node, known.__getitem__, tuple(origin.args))
        kwargs = tree_map_only(fx.Node, lambda one: one.meta["val"], dict(origin.kwargs))
        found = max(found, cpu_trials.scratch_bytes(origin.target, args, kwargs, origin.meta["val"]))
    return found


def _stand_in(buffer: Any) -> torch.Tensor:
    size, stride = ([int(n) for n in numbers] for numbers in (buffer.get_size(), buffer.get_stride()))
    return torch.empty_strided(size, stride, dtype=buffer.get_dtype(), device="cpu")


def _scratch_on_gpu(origin: fx.Node) -> int:
    """The same on a GPU, the arguments laid out as in the joint graph."""
    if not isinstance(origin.target, OpOverload) or "val" not in origin.meta:
        return 0
    args, kwargs = tree_map_only(fx.Node, lambda one: one.meta["val"], (tuple(origin.args), dict(origin.kwargs)))
    return gpu_scratch.workspace_bytes(origin.target, args, kwargs, origin.meta["val"])


def _place(indices: Sequence[tuple[type, Any]]) -> Hashable:
    """Which of an operator's results."""
    return tuple(at for _, at in indices)


class Ledger:
    """The storages that a module has allocated, and the names that hold them; one goes with the last of its names.

    A name that was never introduced stands for something that is there anyway, a parameter say, and counts nothing.

    Attributes:
        bytes: allocated now.
        peak_bytes: the most that was allocated at one time.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self.peak_bytes = 0
        self._sizes: list[int] = []
        self._holders: list[int] = []
        self._held: dict[str, dict[Hashable, int]] = {}

    def allocate(self, name: str, size_bytes: int) -> None:
        """Let a name hold a new storage."""
        self.allocate_parts(name, {None: size_bytes})

    def allocate_parts(self, name: str, sizes: dict[Hashable, int]) -> None:
        """Let a name hold a new storage for each of its parts: the results of an operator."""
        parts = {}
        for part, size_bytes in sizes.items():
            parts[part] = len(self._sizes)
            self._sizes.append(size_bytes)
            self._holders.append(0)
            self.bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        self._hold(name, parts)

    def share(self, name: str, of: str, part: Hashable = None) -> None:
        """Let a name hold what another one holds; only the given part of it, if it has that part."""
        parts = self._held.get(of, {})
        self._hold(name, {part: parts[part]} if part in parts else dict(parts))

    def free(self, name: str) -> None:
        """Let go of whatever the name holds."""
        for storage in self._held.pop(name, {}).values():
            self._holders[storage] -= 1
            if not self._holders[storage]:
                self.bytes -= self._sizes[storage]

    def scratch(self, size_bytes: int) -> None:
        """Bytes that are allocated and freed again within a kernel."""
        self.peak_bytes = max(self.peak_bytes, self.bytes + size_bytes)

    def _hold(self, name: str, parts: dict[Hashable, int]) -> None:
        for storage in parts.values():
            self._holders[storage] += 1
        self.free(name)
        self._held[name] = parts
