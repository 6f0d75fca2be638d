"""What a plan recomputes, by layer."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from remat.core.graph import Graph
from remat.core.labels import layer_of
from remat.core.plan import Plan
from remat.core.schedule import recomputed_ops


@dataclass(frozen=True)
class RecomputedLayer:
    """What a plan recomputes of one layer.

    Attributes:
        layer: its path; for a graph without layers the path in the names of its ops.
        kinds: kinds of the recomputed ops, the one with the most runs first.
        ops: how many of its ops run more than once.
        extra_runs: runs beyond the first.
        extra_time_s: predicted seconds of those runs.
    """

    layer: str
    kinds: tuple[str, ...]
    ops: int
    extra_runs: int
    extra_time_s: float


def recomputed_layers(graph: Graph, plan: Plan) -> tuple[RecomputedLayer, ...]:
    """What the plan recomputes, by layer, the one that costs most time first."""
    ops: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for index, extra in recomputed_ops(plan.schedule).items():
        ops[layer_of(graph, index)].append((index, extra))
    found = []
    for layer, members in ops.items():
        kinds: Counter[str] = Counter()
        for index, extra in members:
            kinds[graph.ops[index].kind or "op"] += extra
        found.append(
            RecomputedLayer(
                layer,
                tuple(kind for kind, _ in kinds.most_common()),
                len(members),
                sum(extra for _, extra in members),
                sum(extra * graph.ops[index].time_s for index, extra in members),
            )
        )
    return tuple(sorted(found, key=lambda entry: (-entry.extra_time_s, -entry.extra_runs, entry.layer)))
