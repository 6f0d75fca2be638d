"""A joint graph of AOTAutograd, forward and backward pass in one -> Graph, one op for each operator that computes.

Views are no ops: they are made anew wherever they are read. The order is that of eager PyTorch. A random draw that may
run twice has an op in front of it that notes the generator's state, which is a tensor of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
from torch import fx

from remat.core.errors import UnsupportedStep
from remat.core.graph import Graph, Op, Tensor
from remat.running.cost_model import DeviceProfile, op_time_s
from remat.torch._private import OpOverload, tree_leaves
from remat.torch.graph_mode import nodes
from remat.torch.trace import aot_notes, cpu_scratch

_aten: Final = torch.ops.aten

IN_PLACE: Final[dict[Any, Any]] = {
    getattr(getattr(_aten, name), overload): getattr(getattr(_aten, f"{name}_"), overload)
    for name, overloads in {
        "add": ("Tensor", "Scalar"),
        "sub": ("Tensor", "Scalar"),
        "mul": ("Tensor", "Scalar"),
        "div": ("Tensor", "Scalar"),
        **dict.fromkeys(("relu", "neg", "exp", "tanh", "sigmoid", "sqrt", "rsqrt", "reciprocal"), ("default",)),
    }.items()
    for overload in overloads
}
"""Operators that can write their result over their first argument, with the same result. Autograd does so where it sums
gradients, and modules with ``inplace=True`` do. What is missing here needs a tensor more while it runs."""


@dataclass(frozen=True)
class JointStep:
    """A joint graph as planners see it.

    Attributes:
        graph: forward pass first, its order fixed.
        calls: for each op, the node that it stands for; None for the arrival of the incoming gradients, and for what
            notes the state of a generator.
        tensors: the tensor of each value and input.
        first_backward: the op with which the backward pass begins: the arrival of the incoming gradients.
        notes: for each random draw that may run twice, the op that notes the generator's state.
    """

    graph: Graph
    calls: tuple[fx.Node | None, ...]
    tensors: dict[fx.Node, int]
    first_backward: int
    notes: dict[fx.Node, int]


def joint_step(
    joint: fx.GraphModule, num_fwd_outputs: int, profile: DeviceProfile, static: Sequence[int] = ()
) -> JointStep:
    """The graph of a joint module, in which ``nodes.with_fills`` has been at work.

    Args:
        joint: as AOTAutograd traced it.
        num_fwd_outputs: how many of its outputs are the forward pass'; the others are gradients.
        profile: for the times.
        static: places of the inputs that are parameters or buffers.

    Raises:
        UnsupportedStep: where shapes are not known.
    """
    return _Builder(joint, num_fwd_outputs, profile, static).build()


class _Builder:
    def __init__(
        self, joint: fx.GraphModule, num_fwd_outputs: int, profile: DeviceProfile, static: Sequence[int]
    ) -> None:
        for node in joint.graph.nodes:
            if any(isinstance(leaf, torch.SymInt) for leaf in tree_leaves(node.meta.get("val"))):
                raise UnsupportedStep(f"the shape of {node.name} is not known when it is traced; shapes must be fixed")
        self._profile = profile
        self._roles = aot_notes.roles_of(joint, static)
        placeholders = joint.graph.find_nodes(op="placeholder")
        self._inputs = [n for n in placeholders if not aot_notes.is_tangent(n)]
        self._tangents = [n for n in placeholders if aot_notes.is_tangent(n)]
        self._calls = [n for n in joint.graph.nodes if nodes.is_call(n)]
        self._overwritten = aot_notes.overwritten_inputs(joint)
        for node in self._calls:
            self._overwritten.update(map(nodes.base_of, nodes.statistics_of(node)))
        (output,) = joint.graph.find_nodes(op="output")
        results = tree_leaves(output.args)
        self._kept = [nodes.base_of(n) for n in results if isinstance(n, fx.Node)]
        returned = [n for n in results[:num_fwd_outputs] if isinstance(n, fx.Node)]
        # The caller holds what the forward pass returns, so that it cannot be dropped and made again.
        self._returned = set(map(nodes.base_of, returned))
        self._forward = self._in_forward(returned)
        # Who takes a gradient copies it, since the step still holds it then.
        self._taken = {nodes.base_of(results[place]) for place in aot_notes.takers_of(joint, num_fwd_outputs)}
        self._tensors: list[Tensor] = []
        self._number: dict[fx.Node, int] = {}
        self._ops: list[Op] = []
        self._nodes: list[fx.Node | None] = []
        self._notes: dict[fx.Node, int] = {}

    def build(self) -> JointStep:
        for node in self._inputs:
            self._add_tensor(node, self._roles[node])
        pinned = tuple(range(len(self._tensors)))
        for node in self._calls:
            if node in self._forward:
                self._add_call(node, "forward")
        first_backward = len(self._ops)
        made = tuple(self._add_tensor(node) for node in self._tangents)
        self._add(None, Op("incoming gradients", "tangents", (), made, recomputable=False, phase="backward"))
        for node in self._calls:
            if node not in self._forward:
                self._add_call(node, "backward")
        outputs = tuple(dict.fromkeys(self._number[n] for n in self._kept if n in self._number))
        outputs = tuple(n for n in outputs if n not in pinned)
        graph = Graph(tuple(self._ops), tuple(self._tensors), pinned, outputs, free_order=False)
        return JointStep(graph, tuple(self._nodes), self._number, first_backward, self._notes)

    def _in_forward(self, outputs: list[fx.Node]) -> set[fx.Node]:
        """What the forward pass runs: what its outputs need, every effect, and what reads an input before a write."""
        after_gradients: set[fx.Node] = set(self._tangents)
        for node in self._calls:
            if any(value in after_gradients for value in self._makers(node)):
                after_gradients.add(node)
        waiting = list(outputs)
        for node in self._calls:
            if node not in after_gradients and (
                nodes.draws(node)
                or nodes.writes(node)
                or nodes.statistics_of(node)
                or any(value in self._overwritten for value in nodes.values_read(node))
            ):
                waiting.append(node)
        found: set[fx.Node] = set()
        while waiting:
            node = waiting.pop()
            if node not in found:
                found.add(node)
                waiting.extend(node.all_input_nodes)
        return found

    @staticmethod
    def _makers(node: fx.Node) -> list[fx.Node]:
        """The calls and inputs whose results a call reads."""
        return [v.args[0] if nodes.is_part(v) else v for v in nodes.values_read(node)]  # type: ignore[misc]

    def _add_tensor(self, node: fx.Node, role: str = "", size_bytes: int | None = None) -> int:
        value = next(nodes.tensors_of(node), None)
        self._number[node] = len(self._tensors)
        self._tensors.append(
            Tensor(
                nodes.size_bytes(node) if size_bytes is None else size_bytes,
                aot_notes.name_of(node),
                None if value is None else tuple(value.shape),
                "float32" if value is None else str(value.dtype).removeprefix("torch."),
                role=role,
            )
        )
        return self._number[node]

    def _add(self, node: fx.Node | None, op: Op) -> None:
        self._nodes.append(node)
        self._ops.append(op)

    def _add_call(self, node: fx.Node, phase: str) -> None:
        read = tuple(self._number[value] for value in nodes.values_read(node))
        repeats = nodes.may_repeat(node, self._overwritten) and self._returned.isdisjoint(
            value for _, value in nodes.results_of(node)
        )
        if repeats and nodes.draws(node):
            state = len(self._tensors)
            self._tensors.append(Tensor(_state_bytes(nodes.device_of(node).type), f"{node.name}.state", None, "uint8"))
            self._notes[node] = len(self._ops)
            self._add(None, Op(f"{node.name}.state", "state", (), (state,), recomputable=False, phase=phase))
            read = (*read, state)
        results = nodes.results_of(node)
        sizes = self._real_sizes(node, [place for place, _ in results])
        outputs = tuple(self._add_tensor(value, size_bytes=sizes.get(place)) for place, value in results)
        value = next(nodes.tensors_of(node), None)
        dtype = "float32" if value is None else str(value.dtype).removeprefix("torch.")
        self._add(
            node,
            Op(
                name=node.name,
                kind=str(node.target) if isinstance(node.target, OpOverload) else str(node.target.__name__),  # type: ignore[union-attr]
                inputs=read,
                outputs=outputs,
                time_s=op_time_s(self._profile, nodes.flops(node), nodes.moved_bytes(node), dtype),
                recomputable=repeats,
                workspace_bytes=max(self._scratch_bytes(node), self._copied_bytes(node)),
                in_place=self._in_place(node, outputs),
                phase=phase,
                layer=nodes.layer_of(node),
                source=aot_notes.source_of(node),
            ),
        )

    def _copied_bytes(self, node: fx.Node) -> int:
        return max((nodes.size_bytes(value) for _, value in nodes.results_of(node) if value in self._taken), default=0)

    @staticmethod
    def _real_sizes(node: fx.Node, places: list[int]) -> dict[int, int]:
        if not isinstance(node.target, OpOverload) or nodes.device_of(node).type != "cpu":
            return {}
        args, _ = nodes.arguments(node)
        numbers = range(max(places) + 1) if places else ()
        found = cpu_scratch.real_sizes(node.target, tuple(args), tuple(numbers))
        return {place: found[place] for place in places if place in found}

    @staticmethod
    def _scratch_bytes(node: fx.Node) -> int:
        if not isinstance(node.target, OpOverload) or nodes.device_of(node).type != "cpu":
            return 0
        args, _ = nodes.arguments(node)
        return cpu_scratch.workspace_bytes(node.target, tuple(args), node.meta.get("val"))

    def _in_place(self, node: fx.Node, outputs: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        """May the result take over the storage of the first argument? Then the two have one size and one layout."""
        if node.target not in IN_PLACE or not isinstance(node.args[0], fx.Node):
            return ()
        first = node.args[0]
        same = [one for one in node.all_input_nodes if one.op != "get_attr" and nodes.base_of(one) is first]
        if nodes.base_of(first) is not first or first in self._inputs or len(same) != 1 or first in self._tangents:
            return ()
        if sum(1 for one in tree_leaves(node.args) if one is first) != 1:
            return ()
        before, after = first.meta["val"], node.meta["val"]
        if (before.shape, before.stride(), before.dtype) != (after.shape, after.stride(), after.dtype):
            return ()
        if self._tensors[self._number[first]].size_bytes != self._tensors[outputs[0]].size_bytes:
            return ()
        return ((self._number[first], outputs[0]),)


@cache
def _state_bytes(device_type: str) -> int:
    """Bytes of a generator's state."""
    if device_type == "cpu":
        return int(torch.default_generator.get_state().nbytes)
    return 16  # Seed and offset.
