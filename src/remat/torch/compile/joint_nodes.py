"""What a node of a joint graph is: what it computes, what it costs, whether it may run twice."""

from __future__ import annotations

import math
import operator
from typing import Any, Final

import torch
from torch import fx

from remat.torch._private import OpOverload, is_mutable, tree_leaves, tree_map_only
from remat.torch.compile import _inductor
from remat.torch.trace import cpu_kernels, op_facts

_POINTWISE: Final = frozenset({"prims::convert_element_type", "prims::inductor_random", "prims::inductor_lookup_seed"})
_CONSTANTS: Final = frozenset({"aten::full", "aten::scalar_tensor", "aten::arange", "prims::iota", "aten::zeros"})
_CONVOLUTIONS: Final = frozenset({"aten::convolution", "aten::convolution_backward"})
_REPEATABLE: Final = frozenset({"aten", "prims"})


def is_tangent(node: fx.Node) -> bool:
    """Is it an incoming gradient of the backward pass?"""
    return node.op == "placeholder" and "tangents" in str(node.target)


def is_part(node: fx.Node) -> bool:
    """Is it one of the results of an operator with several?"""
    return node.target is operator.getitem


def is_view_or_constant(node: fx.Node) -> bool:
    """Does it cost nothing to have again?"""
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
    """Does it work element by element, so that it can be a part of another kernel?"""
    if not isinstance(node.target, OpOverload) or is_mutable(node.target) or draws(node):
        return False
    return _has_tag(node, torch.Tag.pointwise) or op_facts.base_name(node.target) in _POINTWISE


def is_reduction(node: fx.Node) -> bool:
    """Does it sum up, or the like, what an element-wise kernel makes?"""
    return _has_tag(node, torch.Tag.reduction)


def is_fusible(node: fx.Node) -> bool:
    """Is it computed by a kernel of Inductor's own, which need not store what it reads element by element?"""
    return is_pointwise(node) or is_reduction(node)


def draws(node: fx.Node) -> bool:
    """Does it draw random numbers, or the seeds for them?"""
    return _has_tag(node, torch.Tag.nondeterministic_seeded)


def may_repeat(node: fx.Node) -> bool:
    """May it run again with the same result and no other effect?"""
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
    """Scratch memory that the operator's own kernel takes from PyTorch's allocator on a CPU; 0 elsewhere: not known.

    Inductor lays convolutions out with their channels last.
    """
    value = next(iter(_tensors(node)), None)
    if not isinstance(node.target, OpOverload) or value is None or value.device.type != "cpu":
        return 0
    args, _ = _arguments(node)
    if op_facts.base_name(node.target) in _CONVOLUTIONS:
        args = tree_map_only(torch.Tensor, _with_channels_last, args)
    return cpu_kernels.workspace_bytes(node.target, args, node.meta["val"])


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
