"""A joint graph of AOTAutograd, forward and backward pass in one, -> Graph.

An op of the graph stands for what Inductor will most likely make one kernel of: element-wise operators go into the only
kernel that reads them, and what they make is never stored. Views and constants are made anew wherever they are read.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import fx

from remat.cost_model import DeviceProfile, op_time_s
from remat.errors import UnsupportedStep
from remat.graph import Graph, Op, Tensor
from remat.torch import _inductor, op_facts
from remat.torch._private import OpOverload, is_mutable, tree_leaves, tree_map_only

_POINTWISE: Final = frozenset({"prims::convert_element_type", "prims::inductor_random", "prims::inductor_lookup_seed"})
_CONSTANTS: Final = frozenset({"aten::full", "aten::scalar_tensor", "aten::arange", "prims::iota", "aten::zeros"})
_REPEATABLE: Final = frozenset({"aten", "prims"})


@dataclass(frozen=True)
class JointStep:
    """A joint graph as planners see it.

    Attributes:
        graph: forward pass first, its order fixed.
        groups: for each op, the nodes that it stands for, in order; none for the arrival of the incoming gradients.
        first_backward: the op with which the backward pass begins, those gradients.
    """

    graph: Graph
    groups: tuple[tuple[fx.Node, ...], ...]
    first_backward: int


def joint_step(
    joint: fx.GraphModule, num_fwd_outputs: int, profile: DeviceProfile, static: Sequence[int] = ()
) -> JointStep:
    """The graph of a joint module.

    Args:
        joint: as AOTAutograd traced it.
        num_fwd_outputs: how many of its outputs are the forward pass'; the others are gradients.
        profile: for the times.
        static: places of the inputs that are parameters or buffers.

    Raises:
        UnsupportedStep: where shapes are not known.
    """
    return _Builder(joint, num_fwd_outputs, profile, _inductor.roles_of(joint, static)).build()


def is_free(node: fx.Node) -> bool:
    """Is it a view or a constant, which costs nothing to have again?"""
    if node.op == "get_attr":
        return True
    if node.op != "call_function" or not isinstance(node.target, OpOverload) or is_mutable(node.target):
        return False
    if node.target.is_view:
        return not isinstance(node.meta.get("val"), list | tuple)
    return op_facts.base_name(node.target) in _CONSTANTS and not node.all_input_nodes


def sources(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes with a value of their own that a node reads, through views."""
    for one in node.all_input_nodes:
        if is_free(one):
            yield from sources(one)
        else:
            yield one


class _Builder:
    def __init__(
        self, joint: fx.GraphModule, num_fwd_outputs: int, profile: DeviceProfile, roles: dict[fx.Node, str]
    ) -> None:
        self._profile = profile
        self._roles = roles
        nodes = list(joint.graph.nodes)
        self._inputs = [n for n in nodes if n.op == "placeholder" and not is_tangent(n)]
        self._tangents = [n for n in nodes if n.op == "placeholder" and is_tangent(n)]
        self._calls = [n for n in nodes if n.op == "call_function" and not is_free(n)]
        self._overwritten = set(_inductor.is_overwritten(joint))
        (output,) = joint.graph.find_nodes(op="output")
        outputs = [n for n in tree_leaves(output.args) if isinstance(n, fx.Node)]
        self._kept = list(dict.fromkeys(base for n in outputs for base in ([n] if not is_free(n) else sources(n))))
        in_forward = [n for n in tree_leaves(output.args)[:num_fwd_outputs] if isinstance(n, fx.Node)]
        self._forward = self._ancestors(in_forward)
        for node in nodes:
            if any(isinstance(leaf, torch.SymInt) for leaf in tree_leaves(node.meta.get("val"))):
                raise UnsupportedStep(
                    f"the shape of {node.name} is not known when it is compiled; shapes must be fixed"
                )

    def build(self) -> JointStep:
        groups = self._grouped()
        number: dict[fx.Node, int] = {}
        tensors: list[Tensor] = []
        for node in self._inputs:
            number[node] = len(tensors)
            tensors.append(_tensor(node, self._roles[node]))
        pinned = tuple(range(len(tensors)))
        place = {node: at for at, group in enumerate(groups) for node in group}
        read_by_others = {
            base for node in self._calls for base in sources(node) if place.get(base) != place[node]
        } | set(self._kept)
        ops: list[Op] = []
        first_backward = sum(1 for group in groups if group[0] in self._forward)
        for at, group in enumerate([*groups[:first_backward], (), *groups[first_backward:]]):
            if at == first_backward:
                made = self._tangents
                op = Op("incoming gradients", "tangents", recomputable=False, phase="backward")
            else:
                made = [node for node in group if node in read_by_others]
                op = self._op(group, number)
            for node in made:
                number[node] = len(tensors)
                tensors.append(_tensor(node))
            ops.append(replace(op, outputs=tuple(number[node] for node in made)))
        outputs = tuple(dict.fromkeys(number[n] for n in self._kept if n in number and number[n] not in pinned))
        graph = Graph(tuple(ops), tuple(tensors), pinned, outputs, free_order=False)
        every = (*groups[:first_backward], (), *groups[first_backward:])
        return JointStep(graph, every, first_backward)

    def _ancestors(self, nodes: list[fx.Node]) -> set[fx.Node]:
        """Everything that the forward pass runs: what its outputs need, writes to inputs, and every random draw."""
        after_gradients: set[fx.Node] = set(self._tangents)
        for node in self._calls:
            if any(base in after_gradients for base in sources(node)):
                after_gradients.add(node)
        early = [
            n for n in self._calls if n not in after_gradients and (_inductor.is_tied(n) == "forward" or _draws(n))
        ]
        found: set[fx.Node] = set()
        waiting = [*nodes, *early]
        while waiting:
            node = waiting.pop()
            if node not in found:
                found.add(node)
                waiting.extend(node.all_input_nodes)
        return found

    def _grouped(self) -> list[tuple[fx.Node, ...]]:
        """Nodes that become one kernel, in the order of the last of each."""
        readers: dict[fx.Node, list[fx.Node]] = {}
        for node in self._calls:
            for base in sources(node):
                readers.setdefault(base, []).append(node)
        last_of: dict[fx.Node, fx.Node] = {}
        kept = set(self._kept)
        for node in reversed(self._calls):
            ends = {last_of[reader] for reader in readers.get(node, ())}
            last_of[node] = node
            if len(ends) == 1 and node not in kept:
                (end,) = ends
                same_pass = (node in self._forward) == (end in self._forward)
                if same_pass and _is_pointwise(node) and (_is_pointwise(end) or _is_reduction(end)):
                    last_of[node] = end
        parts: dict[fx.Node, fx.Node] = {}
        members: dict[fx.Node, list[fx.Node]] = {}
        for node in self._calls:
            # The parts of what an operator returns belong to it.
            owner = node.args[0] if node.target is operator.getitem else None
            parts[node] = parts[owner] if isinstance(owner, fx.Node) and owner in parts else last_of[node]
            members.setdefault(parts[node], []).append(node)
        position = {node: at for at, node in enumerate(self._calls)}
        ends_in_order = sorted(members, key=lambda end: (end not in self._forward, position[end]))
        return [tuple(members[end]) for end in ends_in_order]

    def _op(self, group: tuple[fx.Node, ...], number: dict[fx.Node, int]) -> Op:
        inside = set(group)
        end = next(node for node in reversed(group) if node.target is not operator.getitem)
        read = list(dict.fromkeys(base for node in group for base in sources(node) if base not in inside))
        flops = sum(_flops(node) for node in group)
        moved = sum(_bytes(node) for node in (*read, end))
        repeatable = all(_may_repeat(node) for node in group) and not any(n in self._overwritten for n in read)
        return Op(
            name=end.name,
            kind=str(end.target),
            inputs=tuple(number[node] for node in read),
            time_s=op_time_s(self._profile, flops, moved, _dtype(end)),
            recomputable=repeatable,
            phase="forward" if end in self._forward else "backward",
            layer=_layer(end),
        )


def is_tangent(node: fx.Node) -> bool:
    """Is it an incoming gradient of the backward pass?"""
    return node.op == "placeholder" and "tangents" in str(node.target)


def _has_tag(node: fx.Node, tag: torch.Tag) -> bool:
    return isinstance(node.target, OpOverload) and tag in node.target.tags


def _draws(node: fx.Node) -> bool:
    return _has_tag(node, torch.Tag.nondeterministic_seeded)


def _is_pointwise(node: fx.Node) -> bool:
    if not isinstance(node.target, OpOverload) or is_mutable(node.target) or _draws(node):
        return False
    return _has_tag(node, torch.Tag.pointwise) or op_facts.base_name(node.target) in _POINTWISE


def _is_reduction(node: fx.Node) -> bool:
    return _has_tag(node, torch.Tag.reduction)


def _may_repeat(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, OpOverload) or node.target.namespace not in _REPEATABLE:
        return False
    if is_mutable(node.target) or _inductor.is_tied(node):
        return False
    tensors = [leaf for leaf in tree_leaves((node.args, node.kwargs)) if isinstance(leaf, fx.Node)]
    on_gpu = any(isinstance(v := t.meta.get("val"), torch.Tensor) and v.device.type != "cpu" for t in tensors)
    args, kwargs = _values((node.args, node.kwargs))
    return not _draws(node) and op_facts.may_repeat(node.target, args, kwargs, on_gpu=on_gpu)


def _values(arguments: Any) -> Any:
    return tree_map_only(fx.Node, lambda node: node.meta.get("val"), arguments)


def _flops(node: fx.Node) -> float:
    if not isinstance(node.target, OpOverload):
        return 0.0
    args, kwargs = _values((node.args, node.kwargs))
    return op_facts.flops(node.target, tuple(args), kwargs, node.meta.get("val"))


def _bytes(node: fx.Node) -> int:
    tensors = [t for t in tree_leaves(node.meta.get("val")) if isinstance(t, torch.Tensor)]
    return sum(math.prod(t.shape) * t.element_size() for t in tensors)


def _dtype(node: fx.Node) -> str:
    tensors = [t for t in tree_leaves(node.meta.get("val")) if isinstance(t, torch.Tensor)]
    return str(tensors[0].dtype).removeprefix("torch.") if tensors else "float32"


def _tensor(node: fx.Node, role: str = "") -> Tensor:
    value = node.meta.get("val")
    shape = tuple(value.shape) if isinstance(value, torch.Tensor) else None
    size = 0 if isinstance(value, list | tuple) or _writes(node) else _bytes(node)
    return Tensor(size, node.name, shape, _dtype(node), role=role)


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and is_mutable(node.target)


def _layer(node: fx.Node) -> str:
    """``L['self']._modules['h']._modules['0'].mlp`` -> ``h.0.mlp``."""
    path = re.sub(r"\._modules|\]|'|\"|^L\[", " ", _inductor.layer_of(node)).replace("[", ".")
    return ".".join(part for part in re.split(r"[\s.]+", path) if part and part != "self")
