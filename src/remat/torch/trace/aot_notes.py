"""What AOTAutograd notes on a joint graph: incoming gradients, inputs that are written to, roles and layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from remat.torch._private import tree_leaves


def is_tangent(node: fx.Node) -> bool:
    """Is the node an incoming gradient of the backward pass?"""
    return node.op == "placeholder" and "tangents" in str(node.target)


def overwritten_inputs(joint: fx.GraphModule) -> set[fx.Node]:
    """The inputs of a joint graph that AOTAutograd writes to, in the graph or after it."""
    (output,) = joint.graph.find_nodes(op="output")
    descriptions = output.meta.get("desc", ())
    written = {id(d.mutated_input) for d in tree_leaves(descriptions) if hasattr(d, "mutated_input")}
    found = set()
    for node in joint.graph.find_nodes(op="placeholder"):
        is_target = any(user.target is torch.ops.aten.copy_.default and user.args[0] is node for user in node.users)
        if is_target or id(node.meta.get("desc")) in written:
            found.add(node)
    return found


def roles_of(joint: fx.GraphModule, static: Sequence[int]) -> dict[fx.Node, str]:
    """Roles of the inputs of a joint graph.

    Args:
        joint: the graph.
        static: places of the inputs that are the same in every step, parameters and buffers.
    """
    (output,) = joint.graph.find_nodes(op="output")
    differentiated = {d.grad_of for d in tree_leaves(output.meta.get("desc", ())) if hasattr(d, "grad_of")}
    found = {}
    for place, node in enumerate(joint.graph.find_nodes(op="placeholder")):
        is_parameter = node.meta.get("desc") in differentiated
        found[node] = "batch" if place not in static else "parameter" if is_parameter else "state"
    return found


def layer_of(node: fx.Node) -> str:
    """The path of the module that a node belongs to, as Dynamo writes it."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return str(list(stack.values())[-1][0]) if stack else ""
