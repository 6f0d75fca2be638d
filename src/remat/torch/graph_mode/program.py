"""A schedule -> a forward and a backward graph of operators, in exactly the schedule's order.

An op that the schedule runs twice stands twice. A read binds to the newest run. Views, and numbers that Python takes
out of tensors, are made right before they are first read. What the backward pass reads and does not make itself is
saved by the forward pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from remat.core.graph import Graph
from remat.torch._private import OpOverload
from remat.torch.graph_mode import nodes
from remat.torch.graph_mode.calls import Again, note_state
from remat.torch.graph_mode.collectives import LetGo, is_gather, is_reduced
from remat.torch.graph_mode.joint_step import IN_PLACE, JointStep
from remat.torch.trace import aot_notes, op_facts


class WrittenModule(fx.GraphModule):
    """A graph that is never called: ``source`` makes the function that runs.

    PyTorch would generate code for it, and again for the copy that AOTAutograd makes of each backward pass. For a GPT-2
    of 24 layers that takes a second.
    """

    def recompile(self) -> Any:
        """Generate no code."""

    def __deepcopy__(self, memo: Any) -> WrittenModule:
        """The module itself: nobody changes its graph any more."""
        return self


@dataclass(frozen=True)
class Program:
    """Both passes of a step under a schedule.

    Attributes:
        forward: takes the step's inputs; returns its results, then what is saved.
        backward: takes what was saved, then the incoming gradients; returns the gradients.
        donated: places of saved tensors that the backward pass writes over.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    donated: tuple[int, ...]


def program_of(joint: fx.GraphModule, step: JointStep, schedule: Sequence[int], num_fwd_outputs: int) -> Program:
    """The forward and the backward graph of a joint module under a schedule."""
    return _Writer(joint, step, schedule, num_fwd_outputs).program()


@dataclass
class _Pass:
    """One of the two graphs while it is written.

    Attributes:
        graph: so far.
        newest: for each value of the joint graph, the node of its newest run in this pass.
        views: for each view of the joint graph and what it was made of, its node.
        states: for each random draw, the node with the generator's state.
    """

    graph: fx.Graph = field(default_factory=fx.Graph)
    newest: dict[fx.Node, fx.Node] = field(default_factory=dict)
    views: dict[Any, fx.Node] = field(default_factory=dict)
    states: dict[fx.Node, fx.Node] = field(default_factory=dict)


class _Writer:
    def __init__(self, joint: fx.GraphModule, step: JointStep, schedule: Sequence[int], num_fwd_outputs: int) -> None:
        self._joint = joint
        self._step = step
        self._schedule = schedule
        self._num_fwd_outputs = num_fwd_outputs
        (self._output,) = joint.graph.find_nodes(op="output")
        self._forward = _Pass()
        self._backward = _Pass()
        self._now = self._forward
        # In the backward pass: for each node that it reads of the forward pass, the placeholder that stands for it.
        self._saved: dict[fx.Node, fx.Node] = {}
        self._donated: set[fx.Node] = set()
        self._tangents: list[fx.Node] = []
        # Gathers whose parameters have their values.
        self._gathered: dict[fx.Node, None] = {}
        self._takers = aot_notes.takers_of(joint, num_fwd_outputs)

    def program(self) -> Program:
        schedule, step = self._schedule, self._step
        for node in self._joint.graph.find_nodes(op="placeholder"):
            if not aot_notes.is_tangent(node):
                self._forward.newest[node] = self._copied(node)
        runs = Counter(schedule)
        draw_of_note = {note: node for node, note in step.notes.items()}
        last_reads = _last_reads(step.graph, schedule)
        gathers = [(step.tensors[node], node) for node in step.calls if node is not None and is_gather(node)]
        ran: set[int] = set()
        results: list[Any] = []
        for position, op in enumerate(schedule):
            if op == step.first_backward:
                results = [self._result(one) for one in self._outputs[: self._num_fwd_outputs]]
                self._now = self._backward
                self._add_tangents()
                self._gather_again()
            elif (node := step.calls[op]) is not None:
                takes_over = any((source, position) in last_reads for source, _ in step.graph.ops[op].in_place)
                self._run(node, is_first=op not in ran, takes_over=takes_over)
            elif op in draw_of_note and runs[op + 1] > 1:
                # The draw is the next op. A state that nobody puts in again is not noted.
                self._note_state(draw_of_note[op])
            if op not in ran:
                self._hand_over(step.handed_over.get(op, ()))
            ran.add(op)
            self._let_go(gather for tensor, gather in gathers if (tensor, position) in last_reads)
        places = range(self._num_fwd_outputs, len(self._outputs))
        gradients = [
            None if place in self._takers or is_reduced(self._outputs[place]) else self._result(self._outputs[place])
            for place in places
        ]
        return self._finished(results, gradients)

    @property
    def _outputs(self) -> list[Any]:
        (results,) = self._output.args
        assert isinstance(results, list | tuple)
        return list(results)

    def _add_tangents(self) -> None:
        for node in self._joint.graph.find_nodes(op="placeholder"):
            if aot_notes.is_tangent(node):
                self._backward.newest[node] = self._copied(node)
                self._tangents.append(self._backward.newest[node])

    def _gather_again(self) -> None:
        """What is gathered when the backward pass begins has its values, unless somebody took them in between."""
        for gather in self._gathered:
            self._backward.newest[gather] = self._copied(gather)

    def _let_go(self, gathers: Iterable[fx.Node]) -> None:
        """Take the memory of parameters away that nobody reads before they are gathered again."""
        for gather in gathers:
            self._gathered.pop(gather, None)
            self._now.graph.call_function(LetGo(gather.target.group), ())  # type: ignore[union-attr]

    def _note_state(self, draw: fx.Node) -> None:
        device = nodes.device_of(draw)
        noted = self._now.graph.call_function(note_state, (device,))
        noted.meta["val"] = torch.empty(1, dtype=torch.uint8)
        self._now.states[draw] = noted

    def _run(self, node: fx.Node, *, is_first: bool, takes_over: bool) -> None:
        graph = self._now.graph
        if takes_over and self._may_be_written(node.args[0]):
            made = graph.create_node("call_function", IN_PLACE[node.target], *self._arguments(node), name=node.name)
        elif is_first:
            made = self._copied(node)
        elif nodes.draws(node):
            args, kwargs = self._arguments(node)
            state = self._state_of(node)
            made = graph.create_node("call_function", Again(node.target), (state, *args), kwargs, node.name)
        else:
            args, kwargs = self._arguments(node)
            made = graph.create_node(
                "call_function", node.target, self._without_statistics(node, args), kwargs, node.name
            )
        made.meta = dict(node.meta)
        if is_gather(node):
            self._gathered[node] = None
        if isinstance(node.meta.get("val"), list | tuple):
            for _, part in nodes.results_of(node):
                self._now.newest[part] = graph.node_copy(part, lambda _: made)
        else:
            self._now.newest[node] = made

    def _hand_over(self, places: Sequence[int]) -> None:
        """Have gradients taken that somebody waits for."""
        for place in places:
            _, taker = self._takers[place]
            self._now.graph.call_function(taker, (self._result(self._outputs[place]),))

    def _may_be_written(self, argument: Any) -> bool:
        """Is what an operator would write over this step's own? Then it is noted where the forward pass saved it."""
        found = self._resolved(argument)
        if found.op == "placeholder":
            if found not in self._saved.values():
                return False
            self._donated.add(found)
        return True

    def _without_statistics(self, node: fx.Node, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of a second run: a normalisation over the batch does without its running statistics."""
        if not isinstance(node.target, OpOverload) or not nodes.statistics_of(node):
            return args
        values, _ = nodes.arguments(node)
        again = op_facts.repeatable_call(node.target, tuple(values))
        return tuple(None if value is None else arg for value, arg in zip(again, args, strict=True))

    def _arguments(self, node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args: Any = fx.map_arg(node.args, self._resolved)
        kwargs: Any = fx.map_arg(dict(node.kwargs), self._resolved)
        return args, kwargs

    def _copied(self, node: fx.Node) -> fx.Node:
        return self._now.graph.node_copy(node, self._resolved)

    def _state_of(self, draw: fx.Node) -> fx.Node:
        if draw not in self._now.states:
            self._now.states[draw] = self._save(self._forward.states[draw])
        return self._now.states[draw]

    def _resolved(self, node: fx.Node) -> fx.Node:
        """The node in the present pass that stands for one of the joint graph."""
        now = self._now
        if node in now.newest:
            return now.newest[node]
        if node.op == "get_attr":
            now.newest[node] = now.graph.node_copy(node)
            return now.newest[node]
        if nodes.writes(node):
            # What an operator wrote to: the argument itself.
            return self._resolved(node.args[0])  # type: ignore[arg-type]
        if nodes.is_view(node) or nodes.is_number(node):
            key = (node, tuple(map(self._resolved, node.all_input_nodes)))
            if key not in now.views:
                now.views[key] = self._copied(node)
            return now.views[key]
        assert now is self._backward, f"{node.name} is read before it is made"
        now.newest[node] = self._save(self._forward.newest[node])
        return now.newest[node]

    def _save(self, made: fx.Node) -> fx.Node:
        """The placeholder of the backward pass for a node of the forward pass."""
        if made not in self._saved:
            graph = self._backward.graph
            with graph.inserting_before(self._tangents[0]):
                placeholder = graph.placeholder(made.name)
            placeholder.meta = dict(made.meta)
            self._saved[made] = placeholder
        return self._saved[made]

    def _result(self, value: Any) -> Any:
        return self._resolved(value) if isinstance(value, fx.Node) else value

    def _finished(self, results: list[Any], gradients: list[Any]) -> Program:
        # AOTAutograd wants what need not be checked for writes in between behind the rest.
        saved = sorted(self._saved, key=lambda one: bool(one.meta.get("saved_tensor_with_no_vc_check", False)))
        placeholders = [self._saved[one] for one in saved]
        for placeholder in placeholders:
            self._tangents[0].prepend(placeholder)
        descriptions = list(self._output.meta.get("desc", ()))
        forward = self._forward.graph.output((*results, *saved))
        backward = self._backward.graph.output(tuple(gradients))
        if descriptions:
            forward.meta["desc"] = [*descriptions[: self._num_fwd_outputs], *(None for _ in saved)]
            backward.meta["desc"] = descriptions[self._num_fwd_outputs :]
        return Program(
            WrittenModule(self._joint, self._forward.graph),
            WrittenModule(self._joint, self._backward.graph),
            tuple(place for place, one in enumerate(placeholders) if one in self._donated),
        )


def _last_reads(graph: Graph, schedule: Sequence[int]) -> set[tuple[int, int]]:
    """Pairs of a tensor and a position at which the storage of the tensor is read for the last time before it goes."""
    found: set[tuple[int, int]] = set()
    read_later = set(graph.outputs) | set(graph.inputs)
    for position in reversed(range(len(schedule))):
        op = graph.ops[schedule[position]]
        read_later.difference_update(op.outputs)
        for tensor in op.inputs:
            if tensor not in read_later:
                found.add((tensor, position))
        read_later.update(op.inputs)
    return found
