"""Every symbol of Inductor and AOTAutograd in use; ``tests/torch/test_torch_private.py`` checks each.

Importing this imports Inductor, which takes seconds: only ``remat.torch.compile`` does so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

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
from torch._inductor import ir, memory
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.config import patch
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._inductor.virtualized import V
from torch.utils._ordered_set import OrderedSet

from remat.torch._private import tree_leaves
from remat.torch.kernel_memory import Buffer, peak_of_kernels

__all__ = ["BackendCompilerFailed"]


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
            return compile_fx(module, inputs, config_patches=patches, **kwargs)

    return compile_with


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


class _Lowered(BaseException):
    """Ends the compilation of a module once its kernels and their order are known; no error, so nobody handles it."""

    def __init__(self, peak_bytes: int) -> None:
        self.peak_bytes = peak_bytes


def peak_bytes(module: fx.GraphModule, *, is_backward: bool) -> int:
    """What a module allocates at its peak once compiled: Inductor is asked for its kernels, and none is built.

    The module's parameters do not count; what was saved for a backward pass does until its last use.
    """

    def look(nodes: list[Any]) -> list[Any]:
        raise _Lowered(_peak_of(nodes))

    module = copied(module)
    (output,) = module.graph.find_nodes(op="output")
    output.meta["user_visible_output_idxs"] = []
    inputs = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    try:
        with patch({"_post_fusion_custom_pass": look, "fx_graph_cache": False}):
            compile_fx_inner(module, inputs, is_backward=is_backward)
    except _Lowered as found:
        return found.peak_bytes
    return 0  # There is nothing to compile.


def _peak_of(nodes: list[Any]) -> int:
    """As Inductor's own last passes have it: it may still change the order of kernels."""
    scheduler = V.graph.scheduler
    inputs, outputs = OrderedSet(V.graph.graph_inputs), OrderedSet(V.graph.get_output_names())
    ordered = memory.reorder_for_peak_memory(
        nodes, scheduler.name_to_buf, scheduler.name_to_fused_node, inputs, outputs
    )
    freed = memory.get_freeable_input_buf(ordered, inputs)
    lifetimes, _, _ = memory.compute_memory_timeline(ordered, freed, outputs)
    of_name = {one.buffer.get_name(): one for one in lifetimes}
    taken_over: set[str] = set()
    found = []
    for one in lifetimes:
        node = getattr(one.buffer, "node", None)
        within = one.end_step == one.start_step and len(ordered[one.start_step].get_nodes()) > 1
        found.append(
            Buffer(
                name=one.buffer.get_name(),
                size_bytes=one.size_alloc,
                freed_bytes=one.size_free,
                start=one.start_step,
                end=one.end_step if one.end_step >= 0 else None,
                is_pooled=node is not None and bool(node.should_allocate()),
                kind=_kind(node, one.size_free),
                takes_over=None if within else _taken_over(one, of_name, taken_over),
                is_stored=not within or node is None,
            )
        )
    return peak_of_kernels(found, len(ordered))


def _kind(node: Any, size_bytes: int) -> str:
    """What two buffers have in common of which one can be given the memory of the other."""
    if node is None or isinstance(node.layout, ir.MultiOutputLayout | ir.NoneLayout):
        return ""
    return f"{node.get_device()} {node.get_dtype()} {size_bytes}"


def _taken_over(made: Any, of_name: dict[str, Any], taken_over: set[str]) -> str | None:
    """The input that a kernel may overwrite with this result, since nobody reads it later."""
    kernel = getattr(made.buffer, "defining_op", None)
    if kernel is None:
        return None
    for read in kernel.read_writes.reads:
        before = V.graph.scheduler.name_to_buf.get(read.name)
        if before is None or read.name in taken_over:
            continue
        life = of_name[read.name]
        fits = life.end_step == made.start_step and life.size_free == made.size_alloc
        if fits and any(user.node is kernel and user.can_inplace for user in before.users):
            taken_over.add(read.name)
            return str(read.name)
    return None
