"""Updates that run as soon as their gradient is final: a whole step's program in that order.

XLA orders what no tie holds, so that it runs updates early by itself where it can. The order is what planners see: a
plan for the order in which JAX wrote the step would count all gradients to its end, and save what takes no memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from remat.core.graph import Graph
from remat.core.plan import Update
from remat.core.simulator import simulate
from remat.jax.trace.graph import after_donation, label_graph
from remat.jax.variants import Variant
from remat.planners.view.problem import Problem
from remat.transform.early_update import EarlyUpdates, early_updates


class EarlyUpdatesOf:
    """Moves the updates of variants of a function, and says of each what that comes to.

    Args:
        donated: numbers of the arguments whose buffers the results may take over.
    """

    def __init__(self, donated: Sequence[int]) -> None:
        self._donated = tuple(donated)
        self._found: dict[str, Update] = {}

    def moved(self, variant: Variant) -> Variant:
        """The variant with its updates moved; as it is, where that would raise the peak of its plain schedule."""
        found = early_updates(variant.graph)
        before = after_donation(variant.graph, variant.program, self._donated)
        changed = _in_order(variant, found)
        after = after_donation(changed.graph, changed.program, self._donated)
        saved_bytes = _plain_peak(before) - _plain_peak(after)
        if saved_bytes < 0 or not found.moved:
            changed, after, saved_bytes = variant, before, 0
        bound_by = ""
        if found.bound_by is not None:
            op = label_graph(variant.graph, variant.program).ops[found.bound_by]
            bound_by = f"{op.name} ({op.source})" if op.source else op.name
        moved = len(found.moved) if changed is not variant else 0
        self._found[after.fingerprint] = Update(moved, saved_bytes, bound_by, found.waiting_bytes)
        return changed

    def described(self, variant: Variant) -> Update | None:
        """What moving came to for a variant that ``moved`` made; None over several devices."""
        return self._found.get(variant.graph.fingerprint)


def _plain_peak(graph: Graph) -> int:
    return simulate(graph, graph.plain_schedule).peak_bytes


def _in_order(variant: Variant, found: EarlyUpdates) -> Variant:
    program, graph = variant.program, variant.graph
    place = {op: position for position, op in enumerate(found.order)}
    regions = tuple((place[at], tuple(sorted(map(place.__getitem__, again)))) for at, again in program.regions)
    program = dataclasses.replace(
        program, instructions=tuple(program.instructions[op] for op in found.order), regions=tuple(sorted(regions))
    )
    graph = graph.in_order(found.order)
    return dataclasses.replace(variant, program=program, graph=graph, turning_point=Problem.of(graph).turning_point)
