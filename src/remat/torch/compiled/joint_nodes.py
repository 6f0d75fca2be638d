"""What a node of a joint graph computes and costs, whether it may run twice, and which are made where they are read."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterator
from typing import Any, Final

import torch
from torch import fx

from remat.torch._private import OpOverload, is_mutable, tree_leaves, tree_map_only
from remat.torch._private import is_reduction as is_reduction_operator
from remat.torch.compiled import _inductor
from remat.torch.trace import cpu_scratch, gpu_scratch, op_facts

_POINTWISE: Final = frozenset({"prims::convert_element_type", "prims::inductor_random", "prims::inductor_lookup_seed"})
_CONSTANTS: Final = frozenset({"aten::full", "aten::scalar_tensor", "aten::arange", "prims::iota", "aten::zeros"})
_CONVOLUTIONS: Final = frozenset({"aten::convolution", "aten::convolution_backward"})
_REPEATABLE: Final = frozenset({"aten", "prims"})

_MOST_READ: Final = 1.125
"""How many bytes an element-wise value may be made of to be made anew, as a multiple of its own: a tensor of its size,
and a row's mean and variance. A judgement, not measured: a larger figure keeps more alive for what is made anew, a
smaller one makes BatchNorm's result a tensor of the plan."""
_MOST_FLOPS: Final = 64.0
"""How many floating-point operations an element may take through everything that is made anew for it. A gelu takes 20.
A judgement, not measured: with a larger figure long chains are run over and over, with a smaller one their values are
stored."""


def is_part(node: fx.Node) -> bool:
    """Is the node one of the results of an operator with several?"""
    return node.target is operator.getitem


def is_view_or_constant(node: fx.Node) -> bool:
    """Is the node a view or a constant, which costs nothing to have again?"""
    if node.op == "get_attr":
        return True
    if node.op != "call_function":
        return False
    if is_part(node):
        (whole,) = node.all_input_nodes
        return isinstance(whole.target, OpOverload) and whole.target.is_view
    if not isinstance(node.target, OpOverload) or is_mutable(node.target):
        return False
    return node.target.is_view or (op_facts.base_name(node.target) in _CONSTANTS and not node.all_input_nodes)


def is_pointwise(node: fx.Node) -> bool:
    """Does the operator work element by element, so that it can be a part of another kernel?"""
    if not isinstance(node.target, OpOverload) or is_mutable(node.target) or draws(node):
        return False
    return _has_tag(node, torch.Tag.pointwise) or op_facts.base_name(node.target) in _POINTWISE


def is_reduction(node: fx.Node) -> bool:
    """Is the operator a sum, a maximum or the like, which a kernel can take over what it computes?"""
    return isinstance(node.target, OpOverload) and is_reduction_operator(node.target)


def is_fusible(node: fx.Node) -> bool:
    """Does a kernel of Inductor's own compute the node? It need not store what it reads element by element."""
    return is_pointwise(node) or is_reduction(node)


def draws(node: fx.Node) -> bool:
    """Does the operator draw random numbers, or the seeds for them?"""
    return _has_tag(node, torch.Tag.nondeterministic_seeded)


def may_repeat(node: fx.Node) -> bool:
    """May the node run again with the same result and no other effect?"""
    if is_part(node):
        return True
    if not isinstance(node.target, OpOverload) or node.target.namespace not in _REPEATABLE:
        return False
    if is_mutable(node.target) or _inductor.is_tied(node):
        return False
    inputs = [leaf.meta.get("val") for leaf in node.all_input_nodes]
    on_gpu = any(isinstance(value, torch.Tensor) and value.device.type != "cpu" for value in inputs)
    args, kwargs = _arguments(node)
    return not draws(node) and op_facts.may_repeat(node.target, args, kwargs, on_gpu=on_gpu)


def flops(node: fx.Node) -> float:
    """Floating-point operations of one run."""
    if not isinstance(node.target, OpOverload):
        return 0.0
    args, kwargs = _arguments(node)
    return op_facts.flops(node.target, tuple(args), kwargs, node.meta.get("val"))


def scratch_bytes(node: fx.Node) -> int:
    """Scratch memory that the operator's own kernel takes from PyTorch's allocator.

    Inductor lays convolutions out with their channels last.
    """
    value = next(iter(_tensors(node)), None)
    if not isinstance(node.target, OpOverload) or value is None:
        return 0
    args, kwargs = _arguments(node)
    if value.device.type != "cpu":
        return gpu_scratch.workspace_bytes(node.target, tuple(args), kwargs, node.meta["val"])
    if op_facts.base_name(node.target) in _CONVOLUTIONS:
        args = tree_map_only(torch.Tensor, _with_channels_last, args)
    return cpu_scratch.workspace_bytes(node.target, args, node.meta["val"])


def _with_channels_last(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() != 4:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta", memory_format=torch.channels_last)


def size_bytes(node: fx.Node) -> int:
    """Bytes of the node's value, or values."""
    return sum(math.prod(t.shape) * t.element_size() for t in _tensors(node))


def elements(node: fx.Node) -> int:
    """Elements of the node's largest value."""
    return max((math.prod(t.shape) for t in _tensors(node)), default=0)


def dtype(node: fx.Node) -> str:
    """As graphs write it."""
    return next((str(t.dtype).removeprefix("torch.") for t in _tensors(node)), "float32")


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    return [t for t in tree_leaves(node.meta.get("val")) if isinstance(t, torch.Tensor)]


def _arguments(node: fx.Node) -> Any:
    return tree_map_only(fx.Node, lambda one: one.meta.get("val"), (node.args, node.kwargs))


def _has_tag(node: fx.Node, tag: torch.Tag) -> bool:
    return isinstance(node.target, OpOverload) and tag in node.target.tags


class Inlined(Collection[fx.Node]):
    """The nodes of a joint graph that are made anew wherever they are read, inside of the kernel that reads them.

    Those are views, constants, and element-wise values that are hardly smaller than all that they are made of.

    Args:
        joint: as AOTAutograd traced it.
        results: what the step returns.
        overwritten: inputs that the step writes to.
        resident: inputs that are there throughout the step.
    """

    def __init__(
        self, joint: fx.GraphModule, results: Collection[fx.Node], overwritten: set[fx.Node], resident: set[fx.Node]
    ) -> None:
        self._overwritten = overwritten
        self._resident = resident
        self._sources: dict[fx.Node, tuple[fx.Node, ...]] = {}
        self._flops: dict[fx.Node, float] = {}
        returned = set(results)
        for node in reversed(joint.graph.nodes):
            if node in returned and is_view_or_constant(node):
                returned.update(node.all_input_nodes)
        for node in joint.graph.nodes:
            if is_view_or_constant(node) or (node not in returned and self._is_cheap(node)):
                self._flops[node] = self._flops_through(node)
                self._sources[node] = self.sources(node)

    def __contains__(self, node: object) -> bool:
        return node in self._sources

    def __iter__(self) -> Iterator[fx.Node]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)

    def sources(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """The nodes with a stored value that a node reads, directly or through what is made anew for it."""
        if node in self._sources:
            return self._sources[node]
        found = (base for one in node.all_input_nodes for base in self._sources.get(one, (one,)))
        return tuple(dict.fromkeys(found))

    def flops(self, node: fx.Node) -> float:
        """Floating-point operations that making a node's inputs anew takes."""
        return sum(self._flops.get(one, 0.0) for one in node.all_input_nodes)

    def stored_bytes(self, node: fx.Node) -> int:
        """Bytes of inputs that are made anew and stored, for a node that no kernel of Inductor's can compute."""
        return sum(size_bytes(one) for one in set(self._values_read(node)))

    def _values_read(self, node: fx.Node) -> Iterator[fx.Node]:
        for one in node.all_input_nodes:
            if one in self._sources:
                yield from [one] if is_pointwise(one) else self._values_read(one)

    def _flops_through(self, node: fx.Node) -> float:
        return self.flops(node) + (flops(node) if is_pointwise(node) else 0.0)

    def _is_cheap(self, node: fx.Node) -> bool:
        if node.op != "call_function" or not is_pointwise(node) or not may_repeat(node):
            return False
        sources = self.sources(node)
        if any(base in self._overwritten for base in sources):
            return False
        read = [base for base in sources if base not in self._resident]
        is_small = sum(map(size_bytes, read)) <= _MOST_READ * size_bytes(node)
        return is_small and self._flops_through(node) <= _MOST_FLOPS * elements(node)
