"""What the bytes of a step are: parameters, optimizer state, activations, gradients, workspace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from remat.core.graph import Graph
from remat.core.simulator import bytes_alive, simulate, storage_lifetimes

CATEGORIES: Final[dict[str, str]] = {
    "parameters": "weights of the model, trained or not",
    "optimizer_state": "slots of the optimizer",
    "inputs": "the batch, seeds, metrics and whatever else is resident for the whole step",
    "activations": "what the forward pass makes",
    "gradients": "what the backward pass makes, of activations and of parameters",
    "update": "what the optimizer's update makes",
    "other": "what operations of an unknown phase make",
    "workspace": "scratch memory of the running operation",
}
"""The categories that the bytes of every moment are divided into, in the order in which they are shown."""

_OF_ROLE: Final = {"parameter": "parameters", "optimizer_state": "optimizer_state"}
_OF_PHASE: Final = {"forward": "activations", "backward": "gradients", "update": "update"}


@dataclass(frozen=True)
class LiveTensor:
    """A tensor that is alive at some moment.

    Attributes:
        tensor: its id.
        size_bytes: of its storage.
        category: a key of ``CATEGORIES``.
        op: index of the op that made it, None for an input of the step.
    """

    tensor: int
    size_bytes: int
    category: str
    op: int | None


@dataclass(frozen=True)
class Breakdown:
    """The bytes of one moment of a step.

    Attributes:
        step: position in the schedule, None for an empty one.
        size_bytes: bytes by category; every key of ``CATEGORIES`` is there. They add up to ``total_bytes``.
        total_bytes: all of them.
        largest: the largest tensors alive, inputs of the step among them.
    """

    step: int | None
    size_bytes: dict[str, int]
    total_bytes: int
    largest: tuple[LiveTensor, ...]


def breakdown(graph: Graph, schedule: Sequence[int] | None = None, *, largest: int = 10) -> Breakdown:
    """The bytes that are in memory at the peak of a schedule, by category, and the largest tensors.

    Args:
        graph: the training step. Roles and phases come from the front end that traced it; where they are missing, bytes
            fall into "inputs" and "other".
        schedule: op indices; None means the plain step.
        largest: how many of the largest tensors to name.
    """
    order = graph.plain_schedule if schedule is None else tuple(schedule)
    timeline = simulate(graph, order)
    pinned = _pinned(graph)
    made = [_live(graph, tensor) for tensor in timeline.live_at_peak]
    named = sorted((*pinned, *made), key=lambda live: (-live.size_bytes, live.tensor))[:largest]
    by_category = bytes_by_category(graph, order)
    step = timeline.peak_step
    if step is None:
        size_bytes = dict.fromkeys(CATEGORIES, 0)
        for live in pinned:
            size_bytes[live.category] += live.size_bytes
    else:
        size_bytes = {name: int(values[step]) for name, values in by_category.items()}
    return Breakdown(step, size_bytes, timeline.peak_bytes, tuple(named))


def bytes_by_category(graph: Graph, schedule: Sequence[int]) -> dict[str, list[int]]:
    """For each category the bytes at every position of a schedule; together they are ``Timeline.bytes``.

    An output that takes over the storage of an input in place counts where the input does at that one position.
    """
    count = len(schedule)
    found = {name: np.zeros(count, dtype=np.int64) for name in CATEGORIES}
    if count:
        lifetimes = storage_lifetimes(graph, schedule)
        category = [_category(graph, tensor) for tensor in range(len(graph.tensors))]
        names = [category[tensor] for tensor in lifetimes.tensor.tolist()]
        for name in set(names):
            chosen = np.array([other == name for other in names])
            born, gone = lifetimes.birth[chosen], lifetimes.last[chosen] + 1
            found[name] += bytes_alive(born, gone, lifetimes.size_bytes[chosen], count)
        for target in np.flatnonzero(lifetimes.taken_over >= 0).tolist():
            source = int(lifetimes.taken_over[target])
            shared = min(int(lifetimes.size_bytes[source]), int(lifetimes.size_bytes[target]))
            found[names[target]][lifetimes.birth[target]] -= shared
    for live in _pinned(graph):
        found[live.category] += live.size_bytes
    by_category = {name: values.tolist() for name, values in found.items()}
    by_category["workspace"] = [graph.ops[op].workspace_bytes for op in schedule]
    return by_category


def _pinned(graph: Graph) -> list[LiveTensor]:
    roots = dict.fromkeys(graph.roots[tensor] for tensor in graph.inputs)
    return [_live(graph, root) for root in roots]


def _live(graph: Graph, tensor: int) -> LiveTensor:
    return LiveTensor(tensor, graph.tensors[tensor].size_bytes, _category(graph, tensor), graph.producer[tensor])


def _category(graph: Graph, tensor: int) -> str:
    maker = graph.producer[tensor]
    if maker is None:
        return _OF_ROLE.get(graph.tensors[tensor].role, "inputs")
    return _OF_PHASE.get(graph.ops[maker].phase, "other")
