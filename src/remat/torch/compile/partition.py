"""A schedule of a joint graph -> a forward and a backward module, in the order of the schedule."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import fx

from remat.torch.compile import _inductor
from remat.torch.compile.joint_graph import JointStep
from remat.torch.compile.joint_nodes import is_pointwise, is_tangent


def parted(
    joint: fx.GraphModule, step: JointStep, schedule: Sequence[int], num_fwd_outputs: int
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward pass of a joint module.

    What runs before the incoming gradients arrive is the forward pass, what runs after them the backward pass; what the
    latter reads and does not make itself is saved in between.
    """
    unrolled = _Unrolled(joint, step.inlined)
    cut = schedule.index(step.first_backward)
    for op in schedule[:cut]:
        unrolled.run(step.groups[op])
    unrolled.end_forward(num_fwd_outputs)
    for op in schedule[cut:]:
        unrolled.run(step.groups[op])
    module, saved = unrolled.finished(num_fwd_outputs)
    return _inductor.extracted(module, saved, num_fwd_outputs)


class _Unrolled:
    """A joint graph in which an op that a schedule runs twice stands twice; a read binds to the newest instance."""

    def __init__(self, joint: fx.GraphModule, inlined: Collection[fx.Node]) -> None:
        self._joint = joint
        self._inlined = inlined
        self._graph = fx.Graph()
        self._newest: dict[fx.Node, fx.Node] = {}
        self._views: dict[tuple[fx.Node, tuple[fx.Node, ...]], fx.Node] = {}
        self._values: dict[tuple[fx.Node, tuple[fx.Node, ...]], fx.Node] = {}
        for node in joint.graph.find_nodes(op="placeholder"):
            self._newest[node] = self._graph.node_copy(node)
        (self._output,) = joint.graph.find_nodes(op="output")
        self._results: list[Any] = []
        self._in_forward: set[fx.Node] = set()

    def run(self, group: Sequence[fx.Node]) -> None:
        """The nodes of one op, once more, with values of their own that are made anew."""
        self._values.clear()
        for node in group:
            self._newest[node] = self._graph.node_copy(node, self._resolved)

    def end_forward(self, num_fwd_outputs: int) -> None:
        """From here on nodes belong to the backward pass, which makes its views itself."""
        self._results = [self._result(one) for one in self._outputs[:num_fwd_outputs]]
        self._in_forward = set(self._graph.nodes)
        self._views.clear()
        self._values.clear()

    def finished(self, num_fwd_outputs: int) -> tuple[fx.GraphModule, list[fx.Node]]:
        """The module, and the nodes of the forward pass that the backward pass reads."""
        self._results += [self._result(one) for one in self._outputs[num_fwd_outputs:]]
        read = {one for one in self._results[num_fwd_outputs:] if isinstance(one, fx.Node)}
        for node in self._graph.nodes:
            if node not in self._in_forward:
                read.update(node.all_input_nodes)
        saved = [node for node in self._graph.nodes if node in read & self._in_forward and not is_tangent(node)]
        self._graph.output(tuple(self._results)).meta.update(self._output.meta)
        return fx.GraphModule(self._joint, self._graph), saved

    @property
    def _outputs(self) -> list[Any]:
        (results,) = self._output.args
        assert isinstance(results, list | tuple)
        return list(results)

    def _result(self, value: Any) -> Any:
        return self._resolved(value) if isinstance(value, fx.Node) else value

    def _resolved(self, node: fx.Node) -> fx.Node:
        if node not in self._inlined:
            return self._newest[node]
        known = self._values if is_pointwise(node) else self._views
        key = (node, tuple(self._resolved(one) for one in node.all_input_nodes))
        if key not in known:
            known[key] = self._graph.node_copy(node, self._resolved)
        return known[key]
