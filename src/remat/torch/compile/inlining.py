"""What costs nothing, or next to it, to have again: Inductor makes it inside of whatever kernel reads it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final

from torch import fx

from remat.torch.compile import joint_nodes

_MOST_READ: Final = 1.125
"""Bytes that an element-wise value may be made of, in its own: a tensor of its size, and a row's mean and variance."""
_MOST_FLOPS: Final = 64.0
"""Of one element, through whatever is made anew for it: a gelu has 20. It keeps chains from being run over and over."""


class Inlined(Collection[fx.Node]):
    """The nodes of a joint graph that are made anew wherever they are read.

    Those are views, constants, and element-wise values that are hardly smaller than all that they are made of.

    Args:
        joint: as AOTAutograd traced it.
        results: what the step returns.
        overwritten: inputs that the step writes to.
        resident: inputs that are there throughout the step.
    """

    def __init__(
        self, joint: fx.GraphModule, results: Collection[fx.Node], overwritten: set[fx.Node], resident: set[fx.Node]
    ) -> None:
        self._overwritten = overwritten
        self._resident = resident
        self._sources: dict[fx.Node, tuple[fx.Node, ...]] = {}
        self._flops: dict[fx.Node, float] = {}
        returned = set(results)
        for node in reversed(joint.graph.nodes):
            if node in returned and joint_nodes.is_view_or_constant(node):
                returned.update(node.all_input_nodes)
        for node in joint.graph.nodes:
            if joint_nodes.is_view_or_constant(node) or (node not in returned and self._is_cheap(node)):
                self._flops[node] = self._flops_through(node)
                self._sources[node] = self.sources(node)

    def __contains__(self, node: object) -> bool:
        return node in self._sources

    def __iter__(self) -> Iterator[fx.Node]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)

    def sources(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """The nodes with a value of their own that a node reads, through what is made anew for it."""
        if node in self._sources:
            return self._sources[node]
        found = (base for one in node.all_input_nodes for base in self._sources.get(one, (one,)))
        return tuple(dict.fromkeys(found))

    def flops(self, node: fx.Node) -> float:
        """What making its inputs anew takes."""
        return sum(self._flops.get(one, 0.0) for one in node.all_input_nodes)

    def stored_bytes(self, node: fx.Node) -> int:
        """Bytes of what is made anew and stored, for a node that no kernel of Inductor's can compute."""
        return sum(joint_nodes.size_bytes(one) for one in set(self._values_read(node)))

    def _values_read(self, node: fx.Node) -> Iterator[fx.Node]:
        for one in node.all_input_nodes:
            if one in self._sources:
                yield from [one] if joint_nodes.is_pointwise(one) else self._values_read(one)

    def _flops_through(self, node: fx.Node) -> float:
        return self.flops(node) + (joint_nodes.flops(node) if joint_nodes.is_pointwise(node) else 0.0)

    def _is_cheap(self, node: fx.Node) -> bool:
        if node.op != "call_function" or not joint_nodes.is_pointwise(node) or not joint_nodes.may_repeat(node):
            return False
        sources = self.sources(node)
        if any(base in self._overwritten for base in sources):
            return False
        read = [base for base in sources if base not in self._resident]
        is_small = sum(map(joint_nodes.size_bytes, read)) <= _MOST_READ * joint_nodes.size_bytes(node)
        return is_small and self._flops_through(node) <= _MOST_FLOPS * joint_nodes.elements(node)
