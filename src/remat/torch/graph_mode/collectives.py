"""What ``fully_shard`` does around a step, as operators of its joint graph, which plans count and schedules run.

AOTAutograd traces a step that reads whole parameters. Here each group of them becomes the result of a gather, which may
run again like any other operator, and their gradients are read by a reduction, which runs once. So a plan says how long
parameters stay gathered, and when they are gathered again. All processes follow one schedule, so that they send in one
order (``api/ranks.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import fx

from remat.core.errors import UnsupportedStep
from remat.core.graph import Graph
from remat.torch.trace import aot_notes

if TYPE_CHECKING:
    from remat.torch.graph_mode._sharded import ShardedGroup

SIZE_BYTES: Final = "remat_size_bytes"
"""Where a node carries the bytes of what it makes, if these are not those of the tensor that stands for it."""

_PASSES_OF_A_COLLECTIVE: Final = 16
"""How often a collective counts for going through its bytes. A judgement: links between devices are some ten times
slower than memory. With a smaller figure, plans gather parameters once more rather than recompute what is cheap; with a
larger one they recompute rather than gather a second time, as ``fully_shard`` does."""


class ShardedParameter:
    """A whole parameter among the inputs of a captured graph.

    Args:
        group: with which it is gathered.
        place: in the group.
    """

    def __init__(self, group: ShardedGroup, place: int) -> None:
        self.group = group
        self.place = place

    def stand_in(self, parameter: torch.Tensor) -> torch.Tensor:
        """What the captured graph is given in place of the parameter: itself."""
        return parameter

    def __call__(self, gradient: torch.Tensor) -> None:
        """A reduction takes the gradient, with those of the whole group."""
        raise AssertionError("the gradient of a sharded parameter is reduced")


class OwnCode:
    """A call into ``fully_shard``'s engine.

    Args:
        group: of parameters.

    Attributes:
        group: of parameters.
        scratch_bytes: what the call needs while it runs, beside what it reads and makes.
        moved_bytes: what it reads and writes, by which it is timed.
    """

    name = ""
    scratch_bytes = 0
    moved_bytes = 0

    def __init__(self, group: ShardedGroup) -> None:
        self.group = group
        self.__name__ = self.__qualname__ = self.name
        self.__module__ = __name__

    def __call__(self, *given: Any) -> Any:
        """Do what the operator stands for."""
        raise NotImplementedError


class Gather(OwnCode):
    """Gives the whole parameters of a group their values; does nothing where they have them."""

    name = "gather"

    def __init__(self, group: ShardedGroup) -> None:
        super().__init__(group)
        self.scratch_bytes = group.gather_scratch_bytes
        self.moved_bytes = _PASSES_OF_A_COLLECTIVE * group.gathered_bytes

    def __call__(self, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The parameters themselves."""
        self.group.gather()
        return parameters


class LetGo(OwnCode):
    """Takes the memory of a group's whole parameters away, behind what reads them last."""

    name = "let_go"

    def __call__(self) -> None:
        """Do so."""
        self.group.let_go()


class Take(OwnCode):
    """Takes the gradients of a group. They go as soon as ``fully_shard`` has copied them into what it sends.

    Args:
        group: of parameters.
        places: in the group, of the parameters that have gradients.
        parts: of how many parts each of the gradients is.
    """

    name = "take_gradients"

    def __init__(self, group: ShardedGroup, places: Sequence[int], parts: Sequence[int]) -> None:
        super().__init__(group)
        self._places = tuple(places)
        self.parts = tuple(parts)

    def __call__(self, *gradients: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
        """Do so. What is sent, which stands for the result in the graph, is made by the reduction right behind it."""
        self.group.take(self._places, gradients)


class Reduce(OwnCode):
    """Reduces the gradients that were taken over the processes, each process's part into ``grad``.

    Args:
        group: of parameters.
        sent_bytes: what is sent.
        scratch_bytes: what that needs while it runs.
    """

    name = "reduce"

    def __init__(self, group: ShardedGroup, sent_bytes: int, scratch_bytes: int) -> None:
        super().__init__(group)
        self.scratch_bytes = scratch_bytes
        self.moved_bytes = _PASSES_OF_A_COLLECTIVE * sent_bytes

    def __call__(self, sent: None) -> None:
        """Do so."""
        self.group.reduce()


class GatheredParameter:
    """One of the parameters that a gather has given values: a view of what it made.

    Args:
        place: among the gather's results.
    """

    def __init__(self, place: int) -> None:
        self._place = place
        self.__name__ = self.__qualname__ = "gathered"
        self.__module__ = __name__

    def __call__(self, parameters: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """The parameter."""
        return parameters[self._place]


def sent_goes(sent: None) -> None:
    """The moment at which ``fully_shard`` lets go of what it sent for an earlier reduction."""


def is_gather(node: fx.Node) -> bool:
    """Does the node gather parameters?"""
    return isinstance(node.target, Gather)


def is_reduced(node: Any) -> bool:
    """Does the node stand for gradients that a reduction has put into ``grad``?"""
    return isinstance(node, fx.Node) and isinstance(node.target, Reduce)


def with_collectives(joint: fx.GraphModule, num_fwd_outputs: int) -> None:
    """Put gathers in front of what reads the parameters of ``fully_shard``, and reductions behind their gradients.

    Args:
        joint: as AOTAutograd traced it; ``aot_notes.note_inputs`` has noted which inputs are such parameters.
        num_fwd_outputs: how many of its outputs are the forward pass'.

    Raises:
        UnsupportedStep: where the step writes to such a parameter, or reads one outside of its module.
    """
    places = {
        node: place
        for place, (node, taker) in aot_notes.takers_of(joint, num_fwd_outputs).items()
        if isinstance(taker, ShardedParameter)
    }
    groups: dict[ShardedGroup, dict[fx.Node, int]] = {}
    for node in joint.graph.find_nodes(op="placeholder"):
        taken = aot_notes.taken_out(node, ShardedParameter)
        if taken is not None:
            groups.setdefault(taken.group, {})[node] = taken.place
    if not groups:
        return
    written = aot_notes.overwritten_inputs(joint)
    if any(node in written for group in groups.values() for node in group):
        raise UnsupportedStep("it writes to a parameter under fully_shard")
    (output,) = joint.graph.find_nodes(op="output")
    for group, parameters in groups.items():
        _add_gather(joint.graph, group, parameters)
    _add_reductions(joint.graph, groups, places, output)


def _add_gather(graph: fx.Graph, group: ShardedGroup, parameters: dict[fx.Node, int]) -> None:
    sizes = group.shards_bytes
    for node, place in parameters.items():
        node.meta[SIZE_BYTES] = sizes[place]
    # What the step does not read of the group is gathered with the rest.
    first = next(iter(parameters))
    first.meta[SIZE_BYTES] += sum(sizes) - sum(sizes[place] for place in parameters.values())
    users = {user for node in parameters for user in node.users if user.op != "output"}
    if any(aot_notes.classes_around(user).isdisjoint(group.classes) for user in users if aot_notes.is_in_forward(user)):
        raise UnsupportedStep("it reads a parameter under fully_shard outside of its module, where it is not whole")
    reader = next((node for node in graph.nodes if node in users), None)
    if reader is None:
        return
    with graph.inserting_before(reader):
        gather = graph.call_function(Gather(group), tuple(parameters))
        views = [graph.call_function(GatheredParameter(place), (gather,)) for place in range(len(parameters))]
    gather.meta = {**reader.meta, "val": first.meta["val"], SIZE_BYTES: group.gathered_bytes}
    for node, view in zip(parameters, views, strict=True):
        view.meta = dict(node.meta)
        node.replace_all_uses_with(view, delete_user_cb=lambda user: user is not gather)


def _add_reductions(
    graph: fx.Graph, groups: dict[ShardedGroup, dict[fx.Node, int]], places: dict[fx.Node, int], output: fx.Node
) -> None:
    (given,) = output.args
    assert isinstance(given, list | tuple)
    results = list(given)
    order = {node: number for number, node in enumerate(graph.nodes)}
    behind: list[tuple[fx.Node, ShardedGroup, list[tuple[int, int, int]]]] = []
    for group, parameters in groups.items():
        found = [(place, places[one], aot_notes.parts_of(one)) for one, place in parameters.items() if one in places]
        found = [one for one in found if isinstance(results[one[1]], fx.Node)]
        if found:
            behind.append((max((results[at] for _, at, _ in found), key=order.__getitem__), group, sorted(found)))
    waiting: list[fx.Node] = []
    for last, group, found in sorted(behind, key=lambda one: order[one[0]]):
        places_in_group = [place for place, _, _ in found]
        part_bytes, sent_bytes, scratch_bytes = group.reduced_bytes(places_in_group)
        gradients = tuple(results[at] for _, at, _ in found)
        with graph.inserting_after(last):
            sent = graph.call_function(Take(group, places_in_group, [parts for _, _, parts in found]), gradients)
        with graph.inserting_after(sent):
            part = graph.call_function(Reduce(group, sent_bytes, scratch_bytes), (sent,))
        for node, size_bytes in ((part, part_bytes), (sent, sent_bytes)):
            like = gradients[0].meta["val"].new_empty(size_bytes, dtype=torch.uint8)
            node.meta = {**last.meta, "val": like, SIZE_BYTES: size_bytes}
        if len(waiting) == group.kept_buffers:
            with graph.inserting_before(sent):
                graph.call_function(sent_goes, (waiting.pop(0),)).meta = {"val": None}
        waiting.append(sent)
        for _, at, _ in found:
            results[at] = None
        results[found[0][1]] = part
    with graph.inserting_before(output):
        for sent in waiting:
            graph.call_function(sent_goes, (sent,)).meta = {"val": None}
    output.args = (tuple(results),)


def as_fully_shard_does(graph: Graph, calls: Sequence[fx.Node | None], first_backward: int) -> tuple[int, ...]:
    """The plain order of a step, with parameters gathered again in the backward pass where ``fully_shard`` does so.

    Args:
        graph: of the step.
        calls: for each op, the node that it stands for.
        first_backward: the op with which the backward pass begins.
    """
    again = {
        output: op
        for op, node in enumerate(calls[:first_backward])
        if node is not None and isinstance(node.target, Gather) and node.target.group.comes_again
        for output in graph.ops[op].outputs
    }
    found: list[int] = []
    for op in graph.plain_schedule:
        if op >= first_backward:
            found.extend(again.pop(tensor) for tensor in graph.ops[op].inputs if tensor in again)
        found.append(op)
    return tuple(found)
