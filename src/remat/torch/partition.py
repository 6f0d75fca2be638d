"""A schedule of a joint graph -> a forward and a backward module, in the order of the schedule."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from remat.torch import _inductor
from remat.torch.joint_graph import JointStep, is_free, sources


def parted(
    joint: fx.GraphModule, step: JointStep, schedule: Sequence[int], num_fwd_outputs: int
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward pass of a joint module.

    What runs before the incoming gradients arrive is the forward pass, what runs after them the backward pass; what the
    latter reads and does not make itself is saved in between.
    """
    cut = schedule.index(step.first_backward)
    before, after = schedule[:cut], [op for op in schedule[cut:] if op != step.first_backward]
    saved = _saved(joint, step, after, num_fwd_outputs)
    forward, backward = _inductor.extracted(joint, saved, num_fwd_outputs)
    ordered_backward = _ordered(joint, backward, step, after)
    for node in ordered_backward.graph.nodes:
        if node.op in ("call_function", "get_attr"):
            node.meta["autograd_backward"] = True
    return _ordered(joint, forward, step, before), ordered_backward


def _saved(joint: fx.GraphModule, step: JointStep, after: Sequence[int], num_fwd_outputs: int) -> list[fx.Node]:
    """What the backward pass reads before, or without, making it."""
    made: set[fx.Node] = set()
    found: dict[fx.Node, None] = {}
    for op in after:
        for node in step.groups[op]:
            found.update((base, None) for base in sources(node) if base not in made and not _arrives(base))
            made.add(node)
    (output,) = joint.graph.find_nodes(op="output")
    (results,) = output.args
    assert isinstance(results, list | tuple)
    for node in results[num_fwd_outputs:]:
        if isinstance(node, fx.Node):
            bases = sources(node) if is_free(node) else [node]
            found.update((base, None) for base in bases if base not in made and not _arrives(base))
    order = {node: at for at, node in enumerate(joint.graph.nodes)}
    return sorted(found, key=order.__getitem__)


def _arrives(node: fx.Node) -> bool:
    return node.op == "placeholder" and "tangents" in str(node.target)


def _ordered(joint: fx.GraphModule, module: fx.GraphModule, step: JointStep, ops: Sequence[int]) -> fx.GraphModule:
    """A module with the same inputs and outputs that runs these ops, some of them more than once."""
    by_name = {node.name: node for node in joint.graph.nodes}
    graph = fx.Graph()
    newest: dict[str, fx.Node] = {}
    views: dict[tuple[str, tuple[fx.Node, ...]], fx.Node] = {}
    for node in module.graph.find_nodes(op="placeholder"):
        newest[node.name] = graph.node_copy(node)

    def resolved(node: fx.Node) -> fx.Node:
        if not is_free(node) or node.name in newest:
            return newest[node.name]
        inputs = tuple(resolved(one) for one in node.all_input_nodes)
        if (node.name, inputs) not in views:
            views[node.name, inputs] = graph.node_copy(node, resolved)
        return views[node.name, inputs]

    for op in ops:
        for node in step.groups[op]:
            newest[node.name] = graph.node_copy(node, resolved)
    (output,) = module.graph.find_nodes(op="output")
    graph.node_copy(output, lambda node: resolved(by_name[node.name]))
    graph.eliminate_dead_code()
    graph.lint()
    return fx.GraphModule(module, graph)
