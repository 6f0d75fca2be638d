"""A joint graph with a region that runs in slices: ``remat.transform`` finds it and says the order, this writes it.

Two things are changed beforehand so that the head of a language model is one region. The loss divides by the number of
labels that count, which no slice knows: the number is computed from the labels, in front. And the incoming gradient of
the loss arrives only when the forward pass is over. All gradients have it as a factor, so the slices compute with 1 in
its place, and the finished gradients are multiplied by it. This is done only where every operator in between is known
to be linear.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx

from remat.torch import _private
from remat.torch._private import OpOverload, tree_leaves
from remat.torch.graph_mode import _aot, nodes, separable_ops
from remat.torch.trace import aot_notes
from remat.transform.separable import Call, Program, Region, find_region
from remat.transform.split import Slice, write_slices

_log = logging.getLogger("remat")
_aten: Final = torch.ops.aten

_SUMMED_IN: Final = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
"""The type in which slices are added up, where it is not the result's own."""


@dataclass(frozen=True)
class SplitJoint:
    """A joint graph, one region of which runs in slices.

    Attributes:
        joint: the graph.
        stands_for: by the name of a node that a slice runs, the name of the node of the unsplit graph.
    """

    joint: fx.GraphModule
    stands_for: dict[str, str]


class Buffer:
    """A new tensor whose contents the slices write.

    Args:
        like: a tensor of the same shape, strides and device.
        dtype: of the elements.
    """

    def __init__(self, like: torch.Tensor, dtype: torch.dtype) -> None:
        self.__name__ = "buffer"
        self.__module__ = __name__
        self.__qualname__ = self.__name__
        # What a product writes to is contiguous, as its result would be.
        self._shape = tuple(like.shape)
        self._strides = tuple(like.stride()) if nodes.is_dense(like) else None
        self._dtype = dtype
        self._device = like.device

    def __call__(self) -> torch.Tensor:
        """The tensor."""
        if self._strides is None:
            return torch.empty(self._shape, dtype=self._dtype, device=self._device)
        return torch.empty_strided(self._shape, self._strides, dtype=self._dtype, device=self._device)


class Splitter:
    """Splits the region of a joint graph that saves the most, into any number of slices.

    Args:
        joint: the graph, which stays as it is. ``nodes.with_fills`` has been at work on it.
        least_bytes: what lives inside a region before it is worth the trouble.
    """

    def __init__(self, joint: fx.GraphModule, least_bytes: int) -> None:
        self._original = joint
        found = _Prepared(joint)
        self.region = found.region(least_bytes)

    @property
    def saved_bytes(self) -> int:
        """Bytes of what lives inside the region only."""
        return 0 if self.region is None else self.region.saved_bytes

    def split(self, slices: int) -> SplitJoint | None:
        """The graph with the region in slices; None where there is no region, or where it cannot be cut so often."""
        if self.region is None or slices > self.region.length:
            return None
        # Writing changes the graph, so that it is prepared anew. What is found in it is the same.
        prepared = _Prepared(self._original)
        try:
            return _Writer(prepared, self.region).written(slices)
        except RuntimeError as error:
            _log.debug("The region could not be written in %s slices: %s", slices, error)
            return None


class _Prepared:
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
            tuple(tuple(node.meta["val"].shape) for node in self.node_of),
            tuple(nodes.elements_bytes(node) for node in self.node_of),
            frozenset(self.value_of[one] for one in returned if one in self.value_of),
            frozenset(value for value, node in enumerate(self.node_of) if nodes.is_view(node)),
        )
        self.after_gradients = self._behind([n for n in self.graph.nodes if aot_notes.is_tangent(n)])

    def region(self, least_bytes: int) -> Region | None:
        """The region that is split; None where there is none that can be."""
        region = find_region(self.program, (), least_bytes)
        if region is None or (self.is_mixed(region) and self.chain_to(region) is None):
            return None
        return region

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
        """Does the region hold ops of both passes, so that the incoming gradient is put in afterwards?"""
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
        if len(outputs) != len(places) or not _is_pure(node):
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


def _is_pure(node: fx.Node) -> bool:
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
            counts = _call(graph, _aten.ne.Scalar, (labels, ignored), like=node)
            number = _call(graph, _aten.sum.default, (counts,), like=node)
            total = _call(graph, _aten._to_copy.default, (number,), {"dtype": logarithms.meta["val"].dtype}, like=node)
        if 1 in parts:
            parts[1].replace_all_uses_with(total)
        if reduction == separable_ops.MEAN and 0 in parts:
            arguments = (logarithms, labels, None, separable_ops.SUM, ignored)
            with graph.inserting_before(node):
                whole = _call(graph, node.target, arguments, like=node)
                sums = graph.call_function(parts[0].target, (whole, 0))  # type: ignore[arg-type]
                sums.meta = {**parts[0].meta}
                mean = _call(graph, _aten.div.Tensor, (sums, total), like=node)
            parts[0].replace_all_uses_with(mean)
        for part in [*parts.values()]:
            if not part.users:
                graph.erase_node(part)
        if not node.users:
            graph.erase_node(node)


def _call(
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


class _Writer:
    """Writes the slices of a region behind everything that they read."""

    def __init__(self, prepared: _Prepared, region: Region) -> None:
        self._prepared = prepared
        self._region = region
        self._graph = prepared.graph
        self._seeds: dict[fx.Node, fx.Node] = {}
        self._buffers: dict[int, fx.Node] = {}
        self._parts: dict[Any, fx.Node] = {}
        self._stands_for: dict[str, str] = {}
        self._writes: list[tuple[fx.Node, fx.Node]] = []

    def written(self, slices: int) -> SplitJoint | None:
        """The graph with the region in slices."""
        prepared, region, graph = self._prepared, self._region, self._graph
        inside = [prepared.calls[index] for index in region.ways]
        old = [*inside, *(part for node in inside for part in node.users if nodes.is_part(part))]
        scaled = prepared.is_mixed(region)
        chain = (prepared.chain_to(region) or []) if scaled else []
        place = self._make_room(old, set(chain))
        if place is None:
            return None
        with graph.inserting_before(place):
            self._seed(chain)
            for value in sorted((*region.concatenated, *region.summed)):
                self._add_buffer(value)
            write_slices(prepared.program, region, slices, self)
        self._write_products_directly()
        replaced = set(old)
        self._hand_over(replaced, place, scaled)
        for node in reversed(list(graph.nodes)):
            if node in replaced:
                graph.erase_node(node)
        graph.lint()
        prepared.joint.recompile()
        return SplitJoint(prepared.joint, self._stands_for)

    def whole(self, value: int) -> fx.Node:
        """A value from outside of the region."""
        node = self._prepared.node_of[value]
        return self._seeds.get(node, node)

    def part(self, value: int, axis: int, cut: Slice) -> fx.Node:
        """A slice of a value from outside of the region."""
        key = (value, axis, cut.number)
        if key not in self._parts:
            node = self.whole(value)
            self._parts[key] = self._view(node, axis, cut, like=node)
        return self._parts[key]

    def run(self, call: int, operands: Sequence[fx.Node], cut: Slice) -> list[fx.Node]:
        """A slice of a call; its results."""
        prepared = self._prepared
        node = prepared.calls[call]
        assert isinstance(node.target, OpOverload)
        places = results_of(node)
        way = self._region.ways[call]
        given = iter(operands)

        def replaced(one: fx.Node) -> fx.Node:
            return next(given) if isinstance(one.meta.get("val"), torch.Tensor) else one

        args: Any = fx.map_arg(node.args, replaced)
        kwargs: Any = fx.map_arg(dict(node.kwargs), replaced)
        first = way.outputs[0]
        shape = tuple(places[0][1].meta["val"].shape)
        args = separable_ops.sliced_arguments(
            node.target, tuple(args), cut.shape(shape, first if isinstance(first, int) else None)
        )
        made = _call(self._graph, node.target, args, kwargs, like=node, name=f"{node.name}_slice{cut.number}")
        self._stands_for[made.name] = node.name
        if not isinstance(node.meta["val"], list | tuple):
            return [made]
        results = []
        for index, part in places:
            got = self._graph.call_function(part.target, (made, index))  # type: ignore[arg-type]
            got.meta = {**part.meta, "val": made.meta["val"][index]}
            results.append(got)
        return results

    def put(self, value: int, axis: int, cut: Slice, made: fx.Node) -> None:
        """Copy a part to its place in a buffer."""
        place = self._view(self._buffers[value], axis, cut, like=made)
        self._write(_aten.copy_.default, place, made)

    def add(self, value: int, cut: Slice, made: fx.Node) -> None:
        """Add a term to a buffer."""
        self._write(_aten.add_.Tensor if cut.number else _aten.copy_.default, self._buffers[value], made)

    def _write(self, target: Any, place: fx.Node, made: fx.Node) -> None:
        written = self._graph.call_function(target, (place, made))
        written.meta = {**made.meta, "val": place.meta["val"]}
        self._writes.append((written, made))

    def _view(self, node: fx.Node, axis: int, cut: Slice, *, like: fx.Node) -> fx.Node:
        start, stop = cut.of(node.meta["val"].shape[axis])
        return _call(self._graph, _aten.slice.Tensor, (node, axis, start, stop), like=like)

    def _make_room(self, old: list[fx.Node], chain: set[fx.Node]) -> fx.Node | None:
        """Bring what reads of the region behind all that the region reads; the node before which there is room then.

        None where that would move a random draw or a write.
        """
        inside = set(old)
        behind: set[fx.Node] = set()
        order = list(self._graph.nodes)
        for node in order:
            if node not in inside and any(one in inside or one in behind for one in node.all_input_nodes):
                behind.add(node)
        read = {one for node in old for one in node.all_input_nodes if one not in inside and one not in chain}
        read |= {one for node in chain for one in node.all_input_nodes if one not in chain}
        last = max((order.index(one) for one in read), default=0)
        first = min(map(order.index, old))
        last = max(last, first)
        moved = [node for node in order[: last + 1] if node in behind]
        if any(not nodes.is_part(one) and not _is_pure(one) for one in moved):
            return None
        place: fx.Node = next(node for node in order[last + 1 :] if node not in inside)
        for node in moved:
            place.prepend(node)
        return moved[0] if moved else place

    def _seed(self, chain: list[fx.Node]) -> None:
        """What leads from the incoming gradient to the region, once more, with 1 in place of it."""
        for node in chain:
            if aot_notes.is_tangent(node):
                value = node.meta["val"]
                made = self._graph.call_function(
                    _aten.full.default, ([], 1.0), {"dtype": value.dtype, "device": value.device}
                )
                made.meta = {"val": value}
            else:
                made = self._graph.node_copy(node, lambda one: self._seeds.get(one, one))
            self._seeds[node] = made

    def _add_buffer(self, value: int) -> None:
        like = self._prepared.node_of[value]
        dtype = like.meta["val"].dtype
        if value in self._region.summed:
            dtype = _SUMMED_IN.get(dtype, dtype)
        buffer = self._graph.call_function(Buffer(like.meta["val"], dtype), (), {})
        tensor = like.meta["val"]
        with _private.fake_mode_of([tensor]):
            buffer.meta = {**like.meta, "val": torch.empty_like(tensor, dtype=dtype)}
        self._buffers[value] = buffer

    def _write_products_directly(self) -> None:
        """A product of two matrices that is only written to a buffer needs no tensor of its own."""
        for written, made in self._writes:
            place = written.args[0]
            assert isinstance(place, fx.Node)
            if made.target is not _aten.mm.default or set(made.users) != {written}:
                continue
            if made.meta["val"].dtype != place.meta["val"].dtype:
                continue
            keeps = 1 if written.target is _aten.add_.Tensor else 0
            name = made.name.replace("_slice", "_into_slice")
            with self._graph.inserting_before(written):
                product = self._graph.create_node(
                    "call_function", _aten.addmm_.default, (place, *made.args), {"beta": keeps}, name
                )
            product.meta = {**written.meta}
            self._stands_for[product.name] = self._stands_for.pop(made.name)
            self._graph.erase_node(written)
            self._graph.erase_node(made)

    def _hand_over(self, old: set[fx.Node], place: fx.Node, scaled: bool) -> None:
        """What is read outside is the buffers, times the incoming gradient where that was left out."""
        prepared, graph = self._prepared, self._graph
        for value, buffer in self._buffers.items():
            node = prepared.node_of[value]
            result = buffer
            with graph.inserting_before(place):
                if scaled and node in prepared.after_gradients:
                    (tangent,) = (n for n in graph.find_nodes(op="placeholder") if aot_notes.is_tangent(n))
                    result = _call(graph, _aten.mul.Tensor, (result, tangent), like=node)
                if result.meta["val"].dtype != node.meta["val"].dtype:
                    kwargs = {"dtype": node.meta["val"].dtype}
                    result = _call(graph, _aten._to_copy.default, (result,), kwargs, like=node)
            node.replace_all_uses_with(result, delete_user_cb=lambda user: user not in old)
