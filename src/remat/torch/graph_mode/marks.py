"""Marks in a captured function: the values that its code marked, found again in the joint graph."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import fx

from remat.torch.graph_mode import nodes

_LIBRARY: Final = torch.library.Library("remat", "FRAGMENT")
_LIBRARY.define("mark(Tensor value, int number) -> ()")
_LIBRARY.impl("mark", lambda value, number: None, "CompositeExplicitAutograd")

mark: Final[Any] = torch.ops.remat.mark.default
"""Marks a tensor with a number. It computes nothing, and stands in no program."""

fx.node.has_side_effect(mark)  # Otherwise AOTAutograd leaves it out, since nobody reads it.


def taken_out(joint: fx.GraphModule) -> dict[int, list[fx.Node]]:
    """The values and inputs that are marked, by number; the marks themselves are gone afterwards."""
    found: dict[int, list[fx.Node]] = {}
    for node in joint.graph.find_nodes(op="call_function", target=mark):
        value, number = node.args
        found.setdefault(number, []).append(nodes.base_of(value))
        joint.graph.erase_node(node)
    return found
