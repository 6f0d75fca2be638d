"""Large results are written into tensors of the same shape that nobody reads any more, rather than into new ones.

A large tensor comes from the operating system page by page, each cleared when it is first touched, and goes back when
it is dropped. In the slices of a language model's head that costs as much as a softmax. A tensor that waits to be
written again holds memory in the meantime, so that it waits only where the pass takes no more than before.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import accumulate
from typing import Any, Final

import torch
from torch import fx

from remat.torch.graph_mode import nodes
from remat.torch.trace import stand_ins

_aten: Final = torch.ops.aten

INTO: Final[dict[Any, tuple[Any, str]]] = {
    getattr(getattr(_aten, name), overload): (getattr(getattr(_aten, name), into), keyword)
    for name, overload, into, keyword in (
        ("_log_softmax", "default", "out", "out"),
        ("_log_softmax_backward_data", "default", "out", "out"),
        ("_softmax", "default", "out", "out"),
        ("_softmax_backward_data", "default", "out", "grad_input"),
        ("add", "Tensor", "out", "out"),
        ("addmm", "default", "out", "out"),
        ("bmm", "default", "out", "out"),
        ("div", "Tensor", "out", "out"),
        ("gelu", "default", "out", "out"),
        ("gelu_backward", "default", "grad_input", "grad_input"),
        ("mm", "default", "out", "out"),
        ("mul", "Tensor", "out", "out"),
        ("nll_loss_backward", "default", "grad_input", "grad_input"),
        ("silu", "default", "out", "out"),
        ("silu_backward", "default", "grad_input", "grad_input"),
        ("sub", "Tensor", "out", "out"),
    )
}
"""By operator, the one that computes the same by the same kernel into a tensor that it is given, and the argument's
name. Their results are always tensors of their own."""

_READERS: Final = frozenset(
    {
        *INTO,
        _aten.add_.Tensor,
        _aten.addmm_.default,
        _aten.clone.default,
        _aten.copy_.default,
        _aten.exp_.default,
        _aten.mul_.Tensor,
        _aten.nll_loss_forward.default,
        _aten.sum.default,
        _aten.sum.dim_IntList,
    }
)
"""Operators that keep nothing of what they only read: their results never lie in its storage. Some others hand on an
argument as it is, a dropout in evaluation for one, though no schema says so."""

_LEAST_BYTES: Final = 2**20
"""Of a tensor that is written again. A judgement: below, an allocator has the memory at hand."""


def reuse_storage(forward: fx.GraphModule, backward: fx.GraphModule) -> int:
    """Have large results on a CPU written into tensors of the same pass that are no longer read.

    Args:
        forward: the forward pass, which is changed. Nodes are in the order in which they run.
        backward: the backward pass, likewise. A placeholder of both has one name, and is held by the caller.

    Returns:
        How many results are.
    """
    given = {node.name for node in forward.graph.find_nodes(op="placeholder")}
    return sum(_Reuse(module.graph, given).count for module in (forward, backward))


class _Reuse:
    """Writes into dropped tensors in one pass.

    Args:
        graph: of the pass.
        given: names of the placeholders that take nothing more in this pass, since the caller holds them.

    Attributes:
        count: how many results are written into another tensor.
    """

    def __init__(self, graph: fx.Graph, given: Collection[str]) -> None:
        self.count = 0
        self._order = list(graph.nodes)
        if not any(map(_can_be_written, self._order)):
            return
        self._last: dict[fx.Node, int] = {}
        self._unsafe: set[fx.Node] = set()
        self._look()
        self._bytes = self._count_bytes(given)
        self._most_bytes = max(self._bytes)
        self._write()

    def _look(self) -> None:
        """Note where each storage is read last, and which ones somebody else may hold."""
        storage: dict[fx.Node, fx.Node] = {}
        for place, node in enumerate(self._order):
            shares = nodes.is_view(node) or nodes.writes(node)
            storage[node] = storage[node.all_input_nodes[0]] if shares else node
            only_reads = nodes.is_view(node) or node.target in _READERS
            for read in (node, *node.all_input_nodes):
                self._last[storage[read]] = place
            if not only_reads:
                self._unsafe.update(storage[read] for read in node.all_input_nodes)

    def _count_bytes(self, given: Collection[str]) -> list[int]:
        """What each node finds on the device and adds to it."""
        changes = [0] * (len(self._order) + 1)
        places = {node: place for place, node in enumerate(self._order)}
        for place, node in enumerate(self._order):
            if node not in self._last or (node.op == "placeholder" and node.name in given):
                continue
            # All results of an operator with several are there from its own place on, also those that nobody reads.
            start = places[node.all_input_nodes[0]] if nodes.is_part(node) else place
            size_bytes = nodes.size_bytes(node)
            if not isinstance(node.meta.get("val"), torch.Tensor):
                size_bytes -= sum(nodes.size_bytes(part) for part in node.users if nodes.is_part(part))
            changes[start] += max(0, size_bytes)
            changes[self._last[node] + 1] -= max(0, size_bytes)
        scratch = map(nodes.scratch_bytes, self._order)
        return [held + beside for held, beside in zip(accumulate(changes[:-1]), scratch, strict=True)]

    def _write(self) -> None:
        dropped: dict[int, list[fx.Node]] = {}
        for node, last in self._last.items():
            if node not in self._unsafe and _can_be_written(node):
                dropped.setdefault(last, []).append(node)
        waiting: dict[Any, list[fx.Node]] = {}
        for place, node in enumerate(self._order):
            if _can_be_written(node):
                self._write_into_one(waiting.get(_kind(node), []), place)
            for one in dropped.get(place, ()):
                waiting.setdefault(_kind(one), []).append(one)

    def _write_into_one(self, waiting: list[fx.Node], place: int) -> None:
        """Have a node write into a tensor that waits; what cannot wait so long is left to the allocator."""
        node = self._order[place]
        while waiting:
            found = waiting.pop()
            size_bytes = nodes.size_bytes(found)
            waits = range(self._last[found] + 1, place)
            if all(self._bytes[moment] + size_bytes <= self._most_bytes for moment in waits):
                for moment in waits:
                    self._bytes[moment] += size_bytes
                node.target, keyword = INTO[node.target]
                node.kwargs = {**node.kwargs, keyword: found}
                self.count += 1
                return


def _can_be_written(node: fx.Node) -> bool:
    """Does the node make a large tensor, and nothing else, that could as well be written into one that is there?"""
    value = node.meta.get("val")
    if node.target not in INTO or not isinstance(value, torch.Tensor):
        return False
    return value.device.type == "cpu" and stand_ins.is_dense(value) and nodes.elements_bytes(node) >= _LEAST_BYTES


def _kind(node: fx.Node) -> Any:
    value = node.meta["val"]
    return tuple(value.shape), tuple(value.stride()), value.dtype
