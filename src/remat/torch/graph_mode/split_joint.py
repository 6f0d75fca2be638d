"""A joint graph with regions in slices: ``remat.transform`` finds them and says the order, this writes them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx

from remat.torch import _private
from remat.torch._private import OpOverload
from remat.torch.graph_mode import nodes, separable_ops
from remat.torch.graph_mode.separable_joint import SeparableJoint, add_call, is_pure, results_of
from remat.torch.trace import aot_notes, stand_ins
from remat.transform.inner import InnerLayers, find_inner_layers
from remat.transform.merged_axes import count_merged, merged_shape
from remat.transform.order import order_around
from remat.transform.separable import Region, find_region
from remat.transform.split import Slice, write_slices

_log = logging.getLogger("remat")
_aten: Final = torch.ops.aten

_SUMMED_IN: Final = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
"""The type in which slices are added up, where it is not the result's own."""


@dataclass(frozen=True)
class SplitJoint:
    """A joint graph, some regions of which run in slices.

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
        self._strides = tuple(like.stride()) if stand_ins.is_dense(like) else None
        self._dtype = dtype
        self._device = like.device

    def __call__(self) -> torch.Tensor:
        """The tensor."""
        if self._strides is None:
            return torch.empty(self._shape, dtype=self._dtype, device=self._device)
        return torch.empty_strided(self._shape, self._strides, dtype=self._dtype, device=self._device)


class Splitter:
    """Splits regions of a joint graph into any number of slices: the one that saves the most, or inner layers as well.

    Args:
        joint: the graph, which stays as it is. ``nodes.with_fills`` has been at work on it.
        least_bytes: what lives inside a region before it is worth the trouble.
        inner: are inner layers cut, too, whose forward part then runs once more in the backward pass?

    Attributes:
        regions: what is split, in the order in which it runs; empty where there is nothing.
    """

    def __init__(self, joint: fx.GraphModule, least_bytes: int, *, inner: bool = False) -> None:
        self._original = joint
        found = SeparableJoint(joint)
        self._layers: InnerLayers | None = None
        self.regions: tuple[Region, ...] = ()
        if not inner:
            region = find_region(found.program, (), least_bytes)
            self.regions = () if region is None else (region,)
        elif (layers := find_inner_layers(found.program, least_bytes, found.can_write)) is not None:
            self._layers = layers
            found.take(layers)
            order = order_around(layers.program, layers.regions) or ()
            self.regions = tuple(one for one in order if isinstance(one, Region))
        if not all(found.can_write(region) for region in self.regions):
            self.regions = ()

    @property
    def saved_bytes(self) -> int:
        """Bytes of what lives inside the regions only."""
        return sum(region.saved_bytes for region in self.regions)

    def split(self, slices: int) -> SplitJoint | None:
        """The graph with its regions in slices; None where there are none, or where they cannot be cut so often."""
        if slices > min((region.length for region in self.regions), default=0):
            return None
        # Writing changes the graph, so that it is prepared anew. What is found in it is the same.
        prepared = SeparableJoint(self._original)
        if self._layers is not None:
            prepared.take(self._layers)
        stands_for: dict[str, str] = {}
        try:
            for region in self.regions:
                written = _Writer(prepared, region).written(slices)
                if written is None:
                    return None
                stands_for |= written
        except RuntimeError as error:
            _log.debug("The regions could not be written in %s slices: %s", slices, error)
            return None
        prepared.joint.recompile()
        return SplitJoint(prepared.joint, stands_for)


class _Writer:
    """Writes the slices of a region behind everything that they read."""

    def __init__(self, prepared: SeparableJoint, region: Region) -> None:
        self._prepared = prepared
        self._region = region
        self._graph = prepared.graph
        self._seeds: dict[fx.Node, fx.Node] = {}
        self._buffers: dict[int, fx.Node] = {}
        self._parts: dict[Any, fx.Node] = {}
        self._copies: dict[int, fx.Node] = {}
        self._stands_for: dict[str, str] = {}
        self._writes: list[tuple[fx.Node, fx.Node]] = []

    def written(self, slices: int) -> dict[str, str] | None:
        """Write the region in slices; None where there is no room for it. See ``SplitJoint.stands_for``."""
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
        return self._stands_for

    def whole(self, value: int) -> fx.Node:
        """A value from outside of the region."""
        node = self._prepared.node_of[value]
        return self._seeds.get(node, node)

    def part(self, value: int, axis: int, cut: Slice) -> fx.Node:
        """A slice of a value from outside of the region."""
        key = (value, axis, cut.number)
        if key not in self._parts:
            node = self.whole(value)
            if count_merged(node.meta["val"].shape, axis) > 1 and not node.meta["val"].is_contiguous():
                node = self._side_by_side(value, node)
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
        if isinstance(first, int) and (count := count_merged(shape, first)) > 1:
            shape, first = merged_shape(shape, count), 0
        args = separable_ops.sliced_arguments(
            node.target, tuple(args), cut.shape(shape, first if isinstance(first, int) else None)
        )
        made = add_call(self._graph, node.target, args, kwargs, like=node, name=f"{node.name}_slice{cut.number}")
        self._stands_for[made.name] = prepared.name_of(call)
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

    def _side_by_side(self, value: int, node: fx.Node) -> fx.Node:
        """A copy of a value whose rows lie one behind the other, so that its first axes can be taken together."""
        if value not in self._copies:
            kwargs = {"memory_format": torch.contiguous_format}
            self._copies[value] = add_call(self._graph, _aten.clone.default, (node,), kwargs, like=node)
        return self._copies[value]

    def _view(self, node: fx.Node, axis: int, cut: Slice, *, like: fx.Node) -> fx.Node:
        shape = node.meta["val"].shape
        if (count := count_merged(shape, axis)) > 1:
            shape, axis = merged_shape(shape, count), 0
            node = add_call(self._graph, _aten.view.default, (node, list(shape)), like=like)
        start, stop = cut.of(shape[axis])
        return add_call(self._graph, _aten.slice.Tensor, (node, axis, start, stop), like=like)

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
        if any(not nodes.is_part(one) and not is_pure(one) for one in moved):
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
                    result = add_call(graph, _aten.mul.Tensor, (result, tangent), like=node)
                if result.meta["val"].dtype != node.meta["val"].dtype:
                    kwargs = {"dtype": node.meta["val"].dtype}
                    result = add_call(graph, _aten._to_copy.default, (result,), kwargs, like=node)
            node.replace_all_uses_with(result, delete_user_cb=lambda user: user not in old)
            prepared.node_of[value] = result
