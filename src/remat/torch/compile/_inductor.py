"""Every symbol of Inductor and AOTAutograd in use; ``tests/torch/test_torch_private.py`` checks each.

Importing this imports Inductor, which takes seconds: only ``remat.torch.compile`` does so.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from unittest import mock

import torch
from torch import fx
from torch._dynamo.exc import BackendCompilerFailed
from torch._functorch import config as functorch_config
from torch._functorch.compile_utils import fx_graph_cse
from torch._functorch.partitioners import (
    _extract_fwd_bwd_modules,
    _must_be_in_backward,
    _must_be_in_forward,
    min_cut_rematerialization_partition,
)
from torch._inductor import ir
from torch._inductor.codegen import wrapper as lines
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.config import patch
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._inductor.virtualized import V

from remat.core.errors import UnsupportedStep
from remat.torch._private import OpOverload, storage_key, tree_leaves, tree_map_only
from remat.torch.compile.kernel_memory import Ledger
from remat.torch.trace import cpu_kernels

__all__ = ["BackendCompilerFailed"]

AS_EVER: Final[Mapping[str, Any]] = {}
"""No change to Inductor's settings."""
FRUGAL: Final[Mapping[str, Any]] = {"allow_buffer_reuse": False, "pattern_matcher": False}
"""Inductor holds a freed buffer back for a later one of its size, and makes a product only where a sum needs it, its
factors being held until then; it weighs neither against the memory that it takes."""

_SETTINGS: Final = "remat_settings"


class _Partitioner(CustomPartitionerFn):
    """Hands a joint graph to a function that parts it."""

    def __init__(self, partition: Callable[..., tuple[fx.GraphModule, fx.GraphModule]]) -> None:
        self._partition = partition

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        return self._partition(gm, **kwargs)

    def uuid(self) -> None:
        """No key for Inductor's caches: what it does follows from a budget and from the time that planning had."""


def backend(partition: Callable[..., tuple[fx.GraphModule, fx.GraphModule]]) -> Callable[..., Any]:
    """A backend for ``torch.compile``: Inductor, with this function to part forward and backward pass.

    What it compiles is not kept on disk: the same graph is parted in another way under another budget.
    """
    patches = {"custom_partitioner_fn": _Partitioner(partition), "fx_graph_cache": False}

    def compile_with(module: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        with functorch_config.patch(enable_autograd_cache=False):
            return compile_fx(module, inputs, inner_compile=_compile_part, config_patches=patches, **kwargs)

    return compile_with


def _compile_part(module: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
    with patch(dict(module.meta.get(_SETTINGS, AS_EVER))):
        return compile_fx_inner(module, inputs, **kwargs)


def use_settings(modules: Iterable[fx.GraphModule], settings: Mapping[str, Any]) -> None:
    """Have these modules compiled with other settings than Inductor's present ones."""
    for module in modules:
        module.meta[_SETTINGS] = settings


def simplified(joint: fx.GraphModule) -> fx.GraphModule:
    """The joint graph without dead code and common subexpressions, as PyTorch's own partitioner begins."""
    joint.graph.eliminate_dead_code()
    joint.graph = fx_graph_cse(joint.graph)
    joint.recompile()
    return joint


def plain_partition(joint: fx.GraphModule, options: dict[str, Any]) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward pass as ``torch.compile`` parts them without a budget."""
    found: tuple[fx.GraphModule, fx.GraphModule] = min_cut_rematerialization_partition(copied(joint), (), **options)
    return found


def extracted(
    joint: fx.GraphModule, saved: list[fx.Node], num_fwd_outputs: int
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward pass with these values handed on between them, in the convention of AOTAutograd."""
    found: tuple[fx.GraphModule, fx.GraphModule] = _extract_fwd_bwd_modules(
        joint, saved, saved_sym_nodes=[], num_fwd_outputs=num_fwd_outputs
    )
    return found


def copied(module: fx.GraphModule) -> fx.GraphModule:
    """The same graph in a module of its own; passes over it leave the first one alone."""
    graph = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        known[node] = graph.node_copy(node, known.__getitem__)
    return fx.GraphModule(module, graph)


def is_tied(node: fx.Node) -> str:
    """The pass that a node must be in, since it writes to an input: "forward", "backward" or "" for neither."""
    if _must_be_in_backward(node):
        return "backward"
    return "forward" if _must_be_in_forward(node) else ""


def is_overwritten(joint: fx.GraphModule) -> Iterator[fx.Node]:
    """The inputs of a joint graph that the step writes to: buffers, mostly."""
    (output,) = joint.graph.find_nodes(op="output")
    descriptions = output.meta.get("desc", ())
    written = {id(d.mutated_input) for d in tree_leaves(descriptions) if hasattr(d, "mutated_input")}
    for node in joint.graph.find_nodes(op="placeholder"):
        is_target = any(user.target is torch.ops.aten.copy_.default and user.args[0] is node for user in node.users)
        if is_target or id(node.meta.get("desc")) in written:
            yield node


def roles_of(joint: fx.GraphModule, static: Sequence[int]) -> dict[fx.Node, str]:
    """Roles of the inputs of a joint graph.

    Args:
        joint: the graph.
        static: places of the inputs that are the same in every step, parameters and buffers.
    """
    (output,) = joint.graph.find_nodes(op="output")
    differentiated = {d.grad_of for d in tree_leaves(output.meta.get("desc", ())) if hasattr(d, "grad_of")}
    found = {}
    for place, node in enumerate(joint.graph.find_nodes(op="placeholder")):
        is_parameter = node.meta.get("desc") in differentiated
        found[node] = "batch" if place not in static else "parameter" if is_parameter else "state"
    return found


def layer_of(node: fx.Node) -> str:
    """The path of the module that a node belongs to, as Dynamo writes it."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return str(list(stack.values())[-1][0]) if stack else ""


class _Read(BaseException):
    """Ends the compilation of a module once its lines are read; no error, so nobody handles it."""


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
    """Of one pass. ``made`` are the results of the forward pass by their names, once that was looked at."""
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
    """Follows the lines of a module's code, and what each does to memory."""

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
        """One line. Those that are not named here allocate nothing, or not from PyTorch's allocator."""
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
    elements = V.graph.sizevars.optimization_hint(V.graph.get_allocation_storage_size(buffer), fallback=0)
    return int(elements) * int(buffer.get_dtype().itemsize)


def _scratch_bytes(kernel: Any) -> int:
    """What the operator's own kernel takes in passing, its arguments laid out as Inductor has them."""
    if kernel.get_device_or_error().type != "cpu":
        return 0
    laid_out = [
        torch.empty_strided([int(n) for n in one.get_size()], [int(n) for n in one.get_stride()], device="meta")
        for one in kernel.inputs
    ]
    found = 0
    for origin in kernel.origins:
        if not isinstance(origin.target, OpOverload):
            continue
        tensors = [one for one in tree_leaves(origin.args) if isinstance(one, fx.Node)]
        values = laid_out if len(laid_out) == len(tensors) else [one.meta["val"] for one in tensors]
        known = dict(zip(tensors, values, strict=True))
        args = tree_map_only(fx.Node, known.__getitem__, tuple(origin.args))
        found = max(found, cpu_kernels.workspace_bytes(origin.target, args, origin.meta["val"]))
    return found


def _place(indices: Sequence[tuple[type, Any]]) -> Hashable:
    """Which of an operator's results."""
    return tuple(at for _, at in indices)
