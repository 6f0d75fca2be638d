"""A joint graph of AOTAutograd, forward and backward pass in one -> Graph.

An op of the graph stands for what Inductor will most likely make one kernel of. What is free to have again is no op,
and is made anew wherever it is read: views, constants, and element-wise values that are hardly smaller than all that
they are made of. Other element-wise operators go into the only kernel that reads them, and their values are never
stored.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from remat.core.errors import UnsupportedStep
from remat.core.graph import Graph, Op, Tensor
from remat.running.cost_model import DeviceProfile, op_time_s
from remat.torch._private import OpOverload, is_mutable, tree_leaves
from remat.torch.compiled import _inductor, joint_nodes
from remat.torch.compiled.joint_nodes import Inlined
from remat.torch.trace import aot_notes


@dataclass(frozen=True)
class JointStep:
    """A joint graph as planners see it.

    Attributes:
        graph: forward pass first, its order fixed.
        groups: for each op, the nodes that it stands for, in order; none for the arrival of the incoming gradients.
        first_backward: the op with which the backward pass begins: the arrival of the incoming gradients.
        inlined: the nodes that are made anew wherever they are read.
    """

    graph: Graph
    groups: tuple[tuple[fx.Node, ...], ...]
    first_backward: int
    inlined: Inlined


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
    return _Builder(joint, num_fwd_outputs, profile, aot_notes.roles_of(joint, static)).build()


class _Builder:
    def __init__(
        self, joint: fx.GraphModule, num_fwd_outputs: int, profile: DeviceProfile, roles: dict[fx.Node, str]
    ) -> None:
        self._profile = profile
        self._roles = roles
        nodes = list(joint.graph.nodes)
        self._inputs = [n for n in nodes if n.op == "placeholder" and not aot_notes.is_tangent(n)]
        self._tangents = [n for n in nodes if n.op == "placeholder" and aot_notes.is_tangent(n)]
        self._overwritten = aot_notes.overwritten_inputs(joint)
        (output,) = joint.graph.find_nodes(op="output")
        outputs = [n for n in tree_leaves(output.args) if isinstance(n, fx.Node)]
        self._inlined = Inlined(joint, outputs, self._overwritten, set(self._inputs))
        self._calls = [n for n in nodes if n.op == "call_function" and n not in self._inlined]
        self._kept = list(dict.fromkeys(base for n in outputs for base in self._bases(n)))
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
            base for node in self._calls for base in self._inlined.sources(node) if place.get(base) != place[node]
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
        return JointStep(graph, every, first_backward, self._inlined)

    def _bases(self, node: fx.Node) -> tuple[fx.Node, ...]:
        return self._inlined.sources(node) if node in self._inlined else (node,)

    def _ancestors(self, nodes: list[fx.Node]) -> set[fx.Node]:
        """What the forward pass runs: all that its outputs need, writes to inputs, and every random draw."""
        after_gradients: set[fx.Node] = set(self._tangents)
        for node in self._calls:
            if any(base in after_gradients for base in self._inlined.sources(node)):
                after_gradients.add(node)
        early = [
            n
            for n in self._calls
            if n not in after_gradients and (_inductor.is_tied(n) == "forward" or joint_nodes.draws(n))
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
        """Groups of nodes that become one kernel each, in the order of their last nodes."""
        readers: dict[fx.Node, list[fx.Node]] = {}
        for node in self._calls:
            for base in self._inlined.sources(node):
                readers.setdefault(base, []).append(node)
        last_of: dict[fx.Node, fx.Node] = {}
        kept = set(self._kept)
        for node in reversed(self._calls):
            ends = {last_of[reader] for reader in readers.get(node, ())}
            last_of[node] = node
            if len(ends) == 1 and node not in kept:
                (end,) = ends
                same_pass = (node in self._forward) == (end in self._forward)
                if same_pass and joint_nodes.is_pointwise(node) and joint_nodes.is_fusible(end):
                    last_of[node] = end
        parts: dict[fx.Node, fx.Node] = {}
        members: dict[fx.Node, list[fx.Node]] = {}
        for node in self._calls:
            # The parts of what an operator returns belong to it.
            owner = node.args[0] if joint_nodes.is_part(node) else None
            parts[node] = parts[owner] if isinstance(owner, fx.Node) and owner in parts else last_of[node]
            members.setdefault(parts[node], []).append(node)
        position = {node: at for at, node in enumerate(self._calls)}
        ends_in_order = sorted(members, key=lambda end: (end not in self._forward, position[end]))
        return [tuple(members[end]) for end in ends_in_order]

    def _op(self, group: tuple[fx.Node, ...], number: dict[fx.Node, int]) -> Op:
        inside = set(group)
        end = next(node for node in reversed(group) if not joint_nodes.is_part(node))
        read = list(dict.fromkeys(base for node in group for base in self._inlined.sources(node) if base not in inside))
        flops = sum(joint_nodes.flops(node) + self._inlined.flops(node) for node in group)
        moved = sum(joint_nodes.size_bytes(node) for node in (*read, end))
        repeatable = all(map(joint_nodes.may_repeat, group)) and not any(n in self._overwritten for n in read)
        apart = [node for node in group if not joint_nodes.is_fusible(node)]
        return Op(
            name=end.name,
            kind=str(end.target),
            inputs=tuple(number[node] for node in read),
            time_s=op_time_s(self._profile, flops, moved, joint_nodes.dtype(end)),
            recomputable=repeatable,
            workspace_bytes=sum(self._inlined.stored_bytes(n) + joint_nodes.scratch_bytes(n) for n in apart),
            phase="forward" if end in self._forward else "backward",
            layer=_layer(end),
        )


def _tensor(node: fx.Node, role: str = "") -> Tensor:
    value = node.meta.get("val")
    shape = tuple(value.shape) if isinstance(value, torch.Tensor) else None
    size = 0 if isinstance(value, list | tuple) or _writes(node) else joint_nodes.size_bytes(node)
    return Tensor(size, node.name, shape, joint_nodes.dtype(node), role=role)


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and is_mutable(node.target)


def _layer(node: fx.Node) -> str:
    """``L['self']._modules['h']._modules['0'].mlp`` -> ``h.0.mlp``."""
    path = re.sub(r"\._modules|\]|'|\"|^L\[", " ", aot_notes.layer_of(node)).replace("[", ".")
    return ".".join(part for part in re.split(r"[\s.]+", path) if part and part != "self")
