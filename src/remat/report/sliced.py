"""Which operations a plan runs in slices, by layer."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from remat.core.graph import Graph
from remat.core.labels import layer_of
from remat.core.plan import Plan


@dataclass(frozen=True)
class SlicedLayer:
    """What a plan runs in slices of the ops of one layer.

    Attributes:
        name: the layer's path.
        kinds: kinds of the ops, the most frequent one first.
        ops: how many ops of the step without slices.
        parts: how many ops of the plan's graph stand for them.
        time_s: predicted seconds of all of these together, run once.
    """

    name: str
    kinds: tuple[str, ...]
    ops: int
    parts: int
    time_s: float


def sliced_layers(graph: Graph, plan: Plan) -> tuple[SlicedLayer, ...]:
    """What the plan runs in slices, by layer, the one that takes most time first; nothing where it has no slices.

    A loop that runs all slices stands for every op of its region. It counts as one part of the layer that it is in.
    """
    whole: dict[str, set[int]] = defaultdict(set)
    parts: dict[str, set[int]] = defaultdict(set)
    for part, op in plan.split.stands_for if plan.split is not None else ():
        whole[layer_of(graph, part)].add(op)
        parts[layer_of(graph, part)].add(part)
    found = []
    for name, numbers in parts.items():
        kinds = Counter(graph.ops[part].kind or "op" for part in sorted(numbers))
        time_s = sum(graph.ops[part].time_s for part in numbers)
        ordered = tuple(kind for kind, _ in kinds.most_common())
        found.append(SlicedLayer(name, ordered, len(whole[name]), len(numbers), time_s))
    return tuple(sorted(found, key=lambda layer: (-layer.time_s, -layer.parts, layer.name)))
