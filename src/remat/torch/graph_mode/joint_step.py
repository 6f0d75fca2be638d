"""A joint graph of AOTAutograd, forward and backward pass in one -> Graph, one op for each operator that computes.

Views are no ops: they are made anew wherever they are read. The order is that of eager PyTorch. A random draw that may
run twice has an op in front of it that notes the generator's state, which is a tensor of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import fx

from remat.core.errors import UnsupportedStep
from remat.core.graph import Graph, Op, Tensor
from remat.core.simulator import simulate
from remat.running.cost_model import DeviceProfile, op_time_s
from remat.torch._private import OpOverload, tree_leaves
from remat.torch.graph_mode import nodes
from remat.torch.graph_mode.taken_gradients import UsedGradient
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

_PASSES_OF_AN_UPDATE: Final = 7
"""How often an update goes through the bytes of a parameter: Adam reads gradient, parameter and two slots, and writes
the last three. It is a part of every plan of a step, so that the figure moves shares of time, but no choice."""


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
        handed_over: for ops after which a gradient is taken that somebody waits for: its places among the joint graph's
            results. An update is an op of its own.
        updates: the ops that are updates, and the input that each of them updates.
    """

    graph: Graph
    calls: tuple[fx.Node | None, ...]
    tensors: dict[fx.Node, int]
    first_backward: int
    notes: dict[fx.Node, int]
    handed_over: dict[int, list[int]]
    updates: dict[int, fx.Node]


def joint_step(
    joint: fx.GraphModule,
    num_fwd_outputs: int,
    profile: DeviceProfile,
    static: Sequence[int] = (),
    seconds: Mapping[fx.Node, float] = MappingProxyType({}),
) -> JointStep:
    """The graph of a joint module, in which ``nodes.with_fills`` has been at work.

    A parameter that the step itself updates is updated as soon as its gradient is final and nothing reads the old
    values any more. What would have to read them later is not recomputed.

    Args:
        joint: as AOTAutograd traced it.
        num_fwd_outputs: how many of its outputs are the forward pass'; the others are gradients.
        profile: for the times.
        static: places of the inputs that are parameters or buffers.
        seconds: of the calls that were timed.

    Raises:
        UnsupportedStep: where shapes are not known.
    """
    return _Builder(joint, num_fwd_outputs, profile, static, seconds).build()


def gradient_bytes(step: JointStep) -> int:
    """Bytes of the gradients that a step makes, those that it uses itself among them."""
    graph = step.graph
    made = {number for number in graph.outputs if graph.ops[graph.producer[number] or 0].phase == "backward"}
    made.update(number for op in step.updates for number in graph.ops[op].inputs)
    return sum(graph.tensors[number].size_bytes for number in {graph.roots[number] for number in made})


def late_peak_bytes(step: JointStep, scratch_bytes: int) -> tuple[int, int]:
    """What a step takes whose updates run when the backward pass is over: while they run, and at its plain peak.

    Args:
        step: in which they run early.
        scratch_bytes: what they need then.
    """
    graph = step.graph
    used = tuple(dict.fromkeys(number for op in step.updates for number in graph.ops[op].inputs))
    ops = [op for number, op in enumerate(graph.ops) if number not in step.updates]
    ops.append(Op(name="all updates", inputs=used, recomputable=False, workspace_bytes=scratch_bytes, phase="update"))
    late = dataclasses.replace(graph, ops=tuple(ops), outputs=tuple(dict.fromkeys((*graph.outputs, *used))))
    bytes_ = simulate(late, late.plain_schedule).bytes
    return bytes_[-1], max(bytes_)


class _Builder:
    def __init__(
        self,
        joint: fx.GraphModule,
        num_fwd_outputs: int,
        profile: DeviceProfile,
        static: Sequence[int],
        seconds: Mapping[fx.Node, float],
    ) -> None:
        for node in joint.graph.nodes:
            if any(isinstance(leaf, torch.SymInt) for leaf in tree_leaves(node.meta.get("val"))):
                place = aot_notes.source_of(node)
                raise UnsupportedStep(
                    f"the shape of {node.name} is not known when it is traced; shapes must be fixed"
                    + (f" ({place})" if place else "")
                )
        self._profile = profile
        self._seconds = seconds
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
        returned = [n for n in results[:num_fwd_outputs] if isinstance(n, fx.Node)]
        # The caller holds what the forward pass returns, so that it cannot be dropped and made again.
        self._returned = set(map(nodes.base_of, returned))
        self._forward = self._in_forward(returned)
        self._results = results
        self._waiting = aot_notes.takers_of(joint, num_fwd_outputs)
        updates = [place for place, (_, taker) in self._waiting.items() if isinstance(taker, UsedGradient)]
        held = [one for place, one in enumerate(results) if place not in updates]
        self._kept = [nodes.base_of(n) for n in held if isinstance(n, fx.Node)]
        self._handed_over: dict[int, list[int]] = {}
        self._updates: dict[int, fx.Node] = {}
        self._tensors: list[Tensor] = []
        self._number: dict[fx.Node, int] = {}
        self._ops: list[Op] = []
        self._nodes: list[fx.Node | None] = []
        self._notes: dict[fx.Node, int] = {}

    def build(self) -> JointStep:
        for node in self._inputs:
            self._add_tensor(node, self._roles[node])
        pinned = tuple(range(len(self._tensors)))
        forward = [node for node in self._calls if node in self._forward]
        backward = [node for node in self._calls if node not in self._forward]
        taken_after = self._moments(forward, backward)
        for node in forward:
            self._add_call(node, "forward")
        first_backward = len(self._ops)
        made = tuple(self._add_tensor(node) for node in self._tangents)
        self._add(None, Op("incoming gradients", "tangents", (), made, recomputable=False, phase="backward"))
        self._hand_over(taken_after.get(None, ()))
        for node in backward:
            self._add_call(node, "backward")
            self._hand_over(taken_after.get(node, ()))
        outputs = tuple(dict.fromkeys(self._number[n] for n in self._kept if n in self._number))
        outputs = tuple(n for n in outputs if n not in pinned)
        if self._updates:
            self._keep_what_reads_old_values()
        graph = Graph(tuple(self._ops), tuple(self._tensors), pinned, outputs, free_order=False)
        calls = tuple(self._nodes)
        return JointStep(graph, calls, self._number, first_backward, self._notes, self._handed_over, self._updates)

    def _moments(self, forward: list[fx.Node], backward: list[fx.Node]) -> dict[fx.Node | None, list[int]]:
        """The calls after which gradients are taken: their places; None stands for the start of the backward pass."""
        if not self._waiting:
            return {}
        final: dict[fx.Node, int] = {}
        last_read: dict[fx.Node, int] = {}
        for index, node in enumerate((*forward, *backward)):
            for _, value in nodes.results_of(node):
                final[value] = index
            if nodes.writes(node):
                final[nodes.base_of(node)] = index
            for value in nodes.values_read(node):
                last_read[value] = index
        found: dict[fx.Node | None, list[int]] = {}
        for place, (parameter, taker) in self._waiting.items():
            moment = final.get(nodes.base_of(self._results[place]), -1)
            if isinstance(taker, UsedGradient):
                moment = max(moment, last_read.get(parameter, -1))
            after = moment - len(forward)
            found.setdefault(backward[after] if after >= 0 else None, []).append(place)
        return found

    def _hand_over(self, places: Sequence[int]) -> None:
        """Behind the newest op, the gradients at these places are taken."""
        for place in places:
            parameter, taker = self._waiting[place]
            gradient = self._number[nodes.base_of(self._results[place])]
            newest = len(self._ops) - 1
            if isinstance(taker, UsedGradient):
                newest += 1
                tensor = self._tensors[self._number[parameter]]
                self._updates[newest] = parameter
                update = Op(
                    name=f"update of {tensor.name}",
                    kind="update",
                    inputs=(gradient,),
                    time_s=op_time_s(self._profile, 0.0, _PASSES_OF_AN_UPDATE * tensor.size_bytes),
                    recomputable=False,
                    workspace_bytes=taker.scratch_bytes,
                    phase="update",
                )
                self._add(None, update)
            else:
                # Who takes a gradient copies it, since the step still holds it then.
                op = self._ops[newest]
                workspace_bytes = max(op.workspace_bytes, self._tensors[gradient].size_bytes)
                self._ops[newest] = dataclasses.replace(op, workspace_bytes=workspace_bytes)
            self._handed_over.setdefault(newest, []).append(place)

    def _keep_what_reads_old_values(self) -> None:
        """What reads a parameter runs once if its results are wanted, by another recomputation say, after the update.

        Recomputations come before the first run of what they are for, and first runs keep the order of the graph.
        """
        updated = {self._number[parameter]: op for op, parameter in self._updates.items()}
        wanted = [-1] * len(self._tensors)  # The last op whose first run needs a tensor, recomputed or not.
        for index in reversed(range(len(self._ops))):
            op = self._ops[index]
            until = max((wanted[tensor] for tensor in op.outputs), default=-1)
            if op.recomputable and any(updated.get(tensor, until) < until for tensor in op.inputs):
                op = self._ops[index] = dataclasses.replace(op, recomputable=False)
            for tensor in op.inputs:
                wanted[tensor] = max(wanted[tensor], until if op.recomputable else index, index)

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
                time_s=self._seconds.get(node)
                or op_time_s(
                    self._profile, nodes.flops(node, on_cpu=self._profile.is_cpu), nodes.moved_bytes(node), dtype
                ),
                recomputable=repeats,
                workspace_bytes=nodes.scratch_bytes(node) + nodes.unread_bytes(node),
                in_place=self._in_place(node, outputs),
                phase=phase,
                layer=nodes.layer_of(node),
                source=aot_notes.source_of(node),
            ),
        )

    @staticmethod
    def _real_sizes(node: fx.Node, places: list[int]) -> dict[int, int]:
        if not isinstance(node.target, OpOverload) or nodes.device_of(node).type != "cpu":
            return {}
        args, _ = nodes.arguments(node)
        numbers = range(max(places) + 1) if places else ()
        found = cpu_scratch.real_sizes(node.target, tuple(args), tuple(numbers))
        return {place: found[place] for place in places if place in found}

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
