"""Gradients to which several calls add: their parts go to autograd one by one, in eager PyTorch's order.

What a captured step reads at several places has a gradient of several parts: a tied weight, say. The step adds them up
by itself. Where autograd adds more to that gradient (from another call of the step, from another piece of it, from a
regulariser outside), eager PyTorch adds each part to the sum so far, and a sum of sums has other last bits. Such a
backward pass hands over the parts as they are. All of them are there at its end, which no plan counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx

from remat.torch import _backward_pass
from remat.torch.graph_mode import nodes
from remat.torch.graph_mode.collectives import Take
from remat.torch.graph_mode.joint_step import IN_PLACE
from remat.torch.graph_mode.program import WrittenModule
from remat.torch.graph_mode.taken_gradients import TakenGradient
from remat.torch.trace import aot_notes

_aten: Final = torch.ops.aten
_SUMS: Final = (_aten.add.Tensor, _aten.add_.Tensor)
_WRITES: Final = frozenset(IN_PLACE.values())


class _SameValues(torch.autograd.Function):
    """An input of a captured step, with a way for each part of its gradient: autograd adds up what goes these ways."""

    @staticmethod
    def forward(ctx: Any, owner: InParts, *given: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.owner, ctx.ways, ctx.further = owner, len(given), ()
        return given[0].detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        further, ctx.further = ctx.further, ()
        return (None, *gradients, *further, *(None,) * (ctx.ways - 1 - len(further)))


class InParts:
    """An input of a captured step whose gradient has several parts.

    Args:
        parts: how many.
    """

    def __init__(self, parts: int) -> None:
        self.parts = parts

    def stand_in(self, given: torch.Tensor) -> torch.Tensor:
        """What the captured graph is given in place of the input: the same values."""
        made: torch.Tensor = _SameValues.apply(self, *(given,) * self.parts)  # type: ignore[no-untyped-call]
        return made


@dataclass(frozen=True)
class Apart:
    """The backward pass of a step that hands over gradients in parts.

    Attributes:
        module: as the backward pass, but gradients of several parts are tuples of these.
        inputs: the inputs that such gradients belong to, by the gradients' places.
        takers: whoever else takes such gradients.
    """

    module: fx.GraphModule
    inputs: dict[int, InParts]
    takers: tuple[Any, ...]

    def is_due(self) -> bool:
        """Inside the backward pass of the step: does anybody else add to these gradients?"""
        running = _backward_pass.backward_pass()
        if running is None or any(taker.waits for taker in self.takers):
            return True
        return any(running.edges[_edge_behind(node)] > node.ways for node in _nodes_behind())

    def handed_over(self, gradients: list[Any]) -> list[Any]:
        """The gradients for autograd: the first part of each. The further parts go along with it."""
        behind = {node.owner: node for node in _nodes_behind()}
        for place, owner in self.inputs.items():
            if isinstance(gradients[place], tuple):
                first, *further = gradients[place]
                gradients[place], behind[owner].further = first, tuple(further)
        return gradients


def _nodes_behind() -> Iterator[Any]:
    """The ways for gradients in parts that lead away from the step whose backward pass runs."""
    for node, _ in _backward_pass.running_function().next_functions:
        if isinstance(getattr(node, "owner", None), InParts):
            yield node


def _edge_behind(node: Any) -> Any:
    return _backward_pass.edge_key(*next(edge for edge in node.next_functions if edge[0] is not None))


def apart(joint: fx.GraphModule, backward: fx.GraphModule, num_fwd_outputs: int) -> Apart | None:
    """The backward pass of a program once more, with gradients in parts; None where each has one part.

    Args:
        joint: the joint graph, of whose inputs ``aot_notes.note_parts`` has noted how many parts their gradients have.
        backward: as the plan has it.
        num_fwd_outputs: how many outputs of the joint graph are the forward pass'.
    """
    gradients = aot_notes.gradients_of(joint, num_fwd_outputs)
    if all(aot_notes.parts_of(node) < 2 for node in gradients.values()):
        return None
    writer = _Writer(backward)
    overwritten = aot_notes.overwritten_inputs(joint)
    inputs: dict[int, InParts] = {}
    for place, node in gradients.items():
        if node not in overwritten:
            parts = writer.return_in_parts(place - num_fwd_outputs, aot_notes.parts_of(node))
            if parts > 1:
                inputs[place - num_fwd_outputs] = InParts(parts)
    takers = writer.take_in_parts(
        {taker: aot_notes.parts_of(node) for node, taker in aot_notes.takers_of(joint, num_fwd_outputs).values()}
    )
    if not inputs and not takers:
        return None
    backward.meta[aot_notes.STAND_INS] = {
        aot_notes.place_of(gradients[place + num_fwd_outputs]): one for place, one in inputs.items()
    }
    return Apart(WrittenModule(backward, writer.finished()), inputs, tuple(takers))


class _Writer:
    """A copy of a backward pass, in which sums of parts become tuples of parts."""

    def __init__(self, backward: fx.GraphModule) -> None:
        self._graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in backward.graph.nodes:
            copies[node] = self._graph.node_copy(node, copies.__getitem__)
        self._order = {node: number for number, node in enumerate(self._graph.nodes)}
        self._sums: list[fx.Node] = []

    def return_in_parts(self, place: int, most: int) -> int:
        """Have the gradient at a place among the results in parts; of how many it is."""
        (output,) = self._graph.find_nodes(op="output")
        (results,) = output.args
        assert isinstance(results, list | tuple)
        parts = self._parts_of(results[place], most)
        if len(parts) > 1:
            output.args = ((*results[:place], parts, *results[place + 1 :]),)
        return len(parts)

    def take_in_parts(self, parts: dict[Any, int]) -> list[Any]:
        """Have those who take gradients before the end take them in parts; those who get more than one."""
        found = []
        for node in list(self._graph.nodes):
            taker = node.target
            if isinstance(taker, Take):
                most: tuple[int, ...] = taker.parts
            elif isinstance(taker, TakenGradient):
                most = (parts[taker],)
            else:
                continue
            given = [self._parts_of(one, count) for one, count in zip(node.args, most, strict=True)]
            if any(len(one) > 1 for one in given):
                node.args = tuple(one if len(one) > 1 else one[0] for one in given)
                found.append(taker.group if isinstance(taker, Take) else taker)
        return found

    def _parts_of(self, value: Any, most: int) -> tuple[Any, ...]:
        """The parts whose sum is a gradient, in the order in which autograd adds them up."""
        sums: list[fx.Node] = []
        first = value
        while len(sums) < most - 1 and _is_sum(first):
            sums.insert(0, first)
            first = first.args[0]
        if not sums:
            return (value,)
        self._sums += sums
        read = [(first, sums[0]), *((one.args[1], one) for one in sums)]
        return tuple(self._kept(part, at, sums) for part, at in read)

    def _kept(self, part: fx.Node, at: fx.Node, sums: list[fx.Node]) -> fx.Node:
        """A part as it is where the pass would have added it to others, if the pass writes to it afterwards."""
        base = nodes.base_of(part)
        later = (node for node, number in self._order.items() if number > self._order[at] and node not in sums)
        if not any(node.target in _WRITES and nodes.base_of(node) is base for node in later):
            return part
        with self._graph.inserting_before(at):
            copy = self._graph.call_function(_aten.clone.default, (part,))
        copy.meta = dict(part.meta)
        return copy

    def finished(self) -> fx.Graph:
        """The graph, without the sums."""
        for one in reversed(self._sums):
            if not one.users:
                self._graph.erase_node(one)
        return self._graph


def _is_sum(node: Any) -> bool:
    """Does a node add two parts of a gradient up, as autograd does between its own operators?"""
    return (
        isinstance(node, fx.Node)
        and node.target in _SUMS
        and not node.kwargs
        and all(isinstance(one, fx.Node) for one in node.args)
        and aot_notes.is_sum_of_gradients(node)
    )
