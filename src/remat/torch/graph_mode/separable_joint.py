"""A joint graph as the search for regions sees it, with what changes beforehand.

Two things are changed so that the head of a language model is one region. The loss divides by the number of labels that
count, which no slice knows: the number is computed from the labels, in front. And the incoming gradient of the loss
arrives only when the forward pass is over. All gradients have it as a factor, so the slices compute with 1 in its
place, and the finished gradients are multiplied by it. This is done only where every operator in between is known to be
linear. The forward ops of inner layers are copied to the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import fx

from remat.torch import _private
from remat.torch._private import OpOverload, tree_leaves
from remat.torch.graph_mode import _aot, nodes, separable_ops
from remat.torch.trace import aot_notes
from remat.transform.inner import InnerLayers
from remat.transform.merged_axes import with_merged
from remat.transform.separable import Call, Program, Region

_aten: Final = torch.ops.aten


class SeparableJoint:
    """A copy of a joint graph, its losses taken apart, and what the search for regions sees of it."""

    def __init__(self, joint: fx.GraphModule) -> None:
        self.joint = _copied(joint)
        self.graph = self.joint.graph
        _take_losses_apart(self.graph)
        self.calls = [n for n in self.graph.nodes if n.op == "call_function" and not nodes.is_part(n)]
        self.value_of: dict[fx.Node, int] = {}
        self.node_of: list[fx.Node] = []
        for node in self.graph.nodes:
            if isinstance(node.meta.get("val"), torch.Tensor) and node.op != "output":
                self.value_of[node] = len(self.node_of)
                self.node_of.append(node)
        (output,) = self.graph.find_nodes(op="output")
        returned = [one for one in tree_leaves(output.args) if isinstance(one, fx.Node)]
        self.program = Program(
            tuple(map(self._call, self.calls)),
            tuple(with_merged(tuple(node.meta["val"].shape)) for node in self.node_of),
            tuple(nodes.elements_bytes(node) for node in self.node_of),
            frozenset(self.value_of[one] for one in returned if one in self.value_of),
            frozenset(value for value, node in enumerate(self.node_of) if nodes.is_view(node)),
        )
        self.after_gradients = self._behind([n for n in self.graph.nodes if aot_notes.is_tangent(n)])
        self._copies: dict[fx.Node, str] = {}

    def take(self, layers: InnerLayers) -> None:
        """Write the copies of calls that inner layers need in front of the backward pass, which reads them."""
        own_calls = self.calls
        first_copy = next(new for new, old in enumerate(layers.origin) if new != old)
        place = own_calls[first_copy]
        self.node_of += [self.node_of[value] for value in layers.value_origin[len(self.node_of) :]]
        self.calls = [own_calls[old] for old in layers.origin]
        for number, (old, call) in enumerate(zip(layers.origin, layers.program.calls, strict=True)):
            before = self.program.calls[old]
            others = {self.node_of[one]: new for one, new in zip(before.inputs, call.inputs, strict=True) if one != new}
            node = own_calls[old]
            if number >= first_copy and old < first_copy:
                with self.graph.inserting_before(place):
                    self.calls[number] = self._copy(node, others, call.outputs)
            else:
                for one, new in others.items():
                    node.replace_input_with(one, self.node_of[new])
        self.program = layers.program

    def _copy(self, node: fx.Node, others: dict[fx.Node, int], values: Sequence[int]) -> fx.Node:
        copy = self.graph.node_copy(node, lambda one: self.node_of[others[one]] if one in others else one)
        self._copies[copy] = node.name
        places = results_of(node)
        for (_, part), value in zip(places, values, strict=True):
            made = copy if part is node else self.graph.node_copy(part, lambda one: copy)
            self.node_of[value], self.value_of[made] = made, value
        return copy

    def name_of(self, call: int) -> str:
        """The name of the node of the unsplit graph that a call is, or is a copy of."""
        node = self.calls[call]
        return self._copies.get(node) or str(node.name)

    def can_write(self, region: Region) -> bool:
        """Is it known what the region's slices compute with where they need the gradient of the loss too early?"""
        return not self.is_mixed(region) or self.chain_to(region) is not None

    def chain_to(self, region: Region) -> list[fx.Node] | None:
        """What leads from the incoming gradient to the region, itself first; None where that is not one linear way."""
        tangents = [n for n in self.graph.find_nodes(op="placeholder") if aot_notes.is_tangent(n)]
        inside = {self.calls[index] for index in region.ways}
        if len(tangents) != 1 or tangents[0].meta["val"].dim():
            return None
        chain: set[fx.Node] = set()
        waiting = [one for node in inside for one in node.all_input_nodes]
        while waiting:
            node = waiting.pop()
            if nodes.is_part(node):
                (node,) = node.all_input_nodes
            if node in self.after_gradients and node not in inside and node not in chain:
                chain.add(node)
                waiting.extend(node.all_input_nodes)
        if not all(one is tangents[0] or self._is_linear(one) for one in chain):
            return None
        if not all(self._is_linear(one) for one in inside if one in self.after_gradients):
            return None
        dependent = [one for one in (*chain, *inside) if one in self.after_gradients]
        if any(t.dtype == torch.float16 for one in dependent for t in nodes.tensors_of(one)):
            return None  # Who scales the loss does so that these gradients are not too small for half precision.
        widest = max(self.program.size_bytes[self.value_of[one]] for one in inside if one in self.value_of)
        if any(nodes.elements_bytes(one) > widest for one in chain):
            return None
        return sorted(chain, key=list(self.graph.nodes).index)

    def is_mixed(self, region: Region) -> bool:
        """Does the region hold ops of both passes, so that the incoming gradient is put in afterwards?

        Copies of an inner layer's forward ops belong to the backward pass.
        """
        if any(self.calls[index] in self._copies for index in region.ways):
            return False
        dependent = [self.calls[index] in self.after_gradients for index in region.ways]
        return any(dependent) and not all(dependent)

    def _is_linear(self, node: fx.Node) -> bool:
        if not isinstance(node.target, OpOverload):
            return False
        # Zeros have any factor: where a loss divides by what may be 0, its gradient is chosen to be 0 there.
        among = [one in self.after_gradients or _is_zero(one) for one in _operands(node)]
        return separable_ops.is_linear(node.target, among, node.args)

    def _behind(self, starts: list[fx.Node]) -> set[fx.Node]:
        found = set(starts)
        for node in self.graph.nodes:
            if node.op == "call_function" and any(one in found for one in node.all_input_nodes):
                found.add(node)
        return found

    def _call(self, node: fx.Node) -> Call:
        inputs = tuple(self.value_of[one] for one in node.all_input_nodes if one in self.value_of)
        places = results_of(node)
        outputs = tuple(self.value_of[one] for _, one in places if one in self.value_of)
        if len(outputs) != len(places) or not is_pure(node):
            return Call(inputs, outputs)
        args, kwargs = nodes.arguments(node)
        operands = _operands(node)
        ways = separable_ops.ways_of(node.target, tuple(args), kwargs, node.meta["val"])  # type: ignore[arg-type]
        return Call(
            tuple(self.value_of[one] for one in operands),
            outputs,
            tuple(type(way)(way.inputs, tuple(way.outputs[place] for place, _ in places)) for way in ways),
        )


def results_of(node: fx.Node) -> list[tuple[int, fx.Node]]:
    """What a node of any kind makes, each with its place; those of several that nobody reads are left out."""
    if isinstance(node.meta.get("val"), list | tuple):
        return sorted((int(user.args[1]), user) for user in node.users if nodes.is_part(user))  # type: ignore[arg-type]
    return [(0, node)]


def _is_zero(node: fx.Node) -> bool:
    """Is a value filled with zeros, whatever the step is given?"""
    if node.target is _aten.zeros_like.default:
        return True
    places: dict[Any, int] = {_aten.scalar_tensor.default: 0, _aten.full.default: 1, _aten.full_like.default: 1}
    place = places.get(node.target)
    return place is not None and len(node.args) > place and bool(node.args[place] == 0)


def is_pure(node: fx.Node) -> bool:
    """Does a node neither write nor draw, and read nothing but tensors of the graph?"""
    if not isinstance(node.target, OpOverload) or nodes.writes(node) or nodes.statistics_of(node):
        return False
    return not nodes.draws(node) and all(one.op != "get_attr" for one in node.all_input_nodes)


def _operands(node: fx.Node) -> list[fx.Node]:
    """The tensors among the arguments of a call, in their order, as often as they stand there."""
    leaves = tree_leaves((node.args, dict(node.kwargs)))
    return [one for one in leaves if isinstance(one, fx.Node) and isinstance(one.meta.get("val"), torch.Tensor)]


def _copied(joint: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in joint.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    return fx.GraphModule(joint, graph)


def _take_losses_apart(graph: fx.Graph) -> None:
    """Sums in place of means, divided by the number of labels that count, which is computed from the labels."""
    losses = (_aten.nll_loss_forward.default, _aten.nll_loss2d_forward.default)
    for node in [one for target in losses for one in graph.find_nodes(op="call_function", target=target)]:
        logarithms, labels, weight, reduction, ignored = node.args
        if weight is not None or logarithms.meta["val"].dim() not in (2, 4):
            continue
        parts = dict(results_of(node))
        with graph.inserting_before(node):
            counts = add_call(graph, _aten.ne.Scalar, (labels, ignored), like=node)
            number = add_call(graph, _aten.sum.default, (counts,), like=node)
            total = add_call(
                graph, _aten._to_copy.default, (number,), {"dtype": logarithms.meta["val"].dtype}, like=node
            )
        if 1 in parts:
            parts[1].replace_all_uses_with(total)
        if reduction == separable_ops.MEAN and 0 in parts:
            arguments = (logarithms, labels, None, separable_ops.SUM, ignored)
            with graph.inserting_before(node):
                whole = add_call(graph, node.target, arguments, like=node)
                sums = graph.call_function(parts[0].target, (whole, 0))  # type: ignore[arg-type]
                sums.meta = {**parts[0].meta}
                mean = add_call(graph, _aten.div.Tensor, (sums, total), like=node)
            parts[0].replace_all_uses_with(mean)
        for part in [*parts.values()]:
            if not part.users:
                graph.erase_node(part)
        if not node.users:
            graph.erase_node(node)


def add_call(
    graph: fx.Graph,
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    like: fx.Node,
    name: str | None = None,
) -> fx.Node:
    """A call that stands for a part of what another node does; its result is that of tensors without memory."""
    made = graph.create_node("call_function", target, args, kwargs or {}, name)
    args, kwargs = nodes.arguments(made)
    with _private.fake_mode_of(_private.tree_leaves((args, kwargs))), _aot.below_autograd():
        value = target(*args, **kwargs)
    made.meta = {**like.meta, "val": value}
    return made
