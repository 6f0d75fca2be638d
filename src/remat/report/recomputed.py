"""What a plan recomputes, by kind of operation and by layer."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from remat.core.graph import Graph
from remat.core.labels import layer_of
from remat.core.plan import Plan
from remat.core.schedule import recomputed_ops


@dataclass(frozen=True)
class RecomputedGroup:
    """What a plan recomputes of the ops of one kind or one layer.

    Attributes:
        name: the kind, or the layer's path.
        kinds: kinds of the recomputed ops, the one with the most extra runs first.
        ops: how many ops of the group run more than once.
        total_ops: how many ops of the group the graph has.
        extra_runs: runs beyond the first.
        extra_time_s: predicted seconds of those runs.
    """

    name: str
    kinds: tuple[str, ...]
    ops: int
    total_ops: int
    extra_runs: int
    extra_time_s: float


def recomputed_kinds(graph: Graph, plan: Plan) -> tuple[RecomputedGroup, ...]:
    """What the plan recomputes, by kind of operation, the one that costs most time first."""
    return _recomputed(graph, plan, [op.kind for op in graph.ops])


def recomputed_layers(graph: Graph, plan: Plan) -> tuple[RecomputedGroup, ...]:
    """What the plan recomputes, by layer, the one that costs most time first.

    Where a graph names no layers, the path in the name of an op stands for its layer.
    """
    return _recomputed(graph, plan, [layer_of(graph, index) for index in range(len(graph.ops))])


def _recomputed(graph: Graph, plan: Plan, group_of: Sequence[str]) -> tuple[RecomputedGroup, ...]:
    members: dict[str, dict[int, int]] = defaultdict(dict)
    for index, extra in recomputed_ops(plan.schedule).items():
        members[group_of[index]][index] = extra
    total = Counter(group_of)
    found = []
    for name, extras in members.items():
        kinds: Counter[str] = Counter()
        for index, extra in extras.items():
            kinds[graph.ops[index].kind or "op"] += extra
        found.append(
            RecomputedGroup(
                name,
                tuple(kind for kind, _ in kinds.most_common()),
                len(extras),
                total[name],
                sum(extras.values()),
                sum(extra * graph.ops[index].time_s for index, extra in extras.items()),
            )
        )
    return tuple(sorted(found, key=lambda group: (-group.extra_time_s, -group.extra_runs, group.name)))
