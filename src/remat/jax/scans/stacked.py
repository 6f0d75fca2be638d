"""Which values of a loop's body to stack for the backward loop, at a given number of bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from remat.core.graph import Graph
from remat.jax.trace import op_facts
from remat.jax.trace.program import Program
from remat.planners.linear.keep import KeepModel
from remat.planners.view.problem import BoolArray, FloatArray

_TIME_LIMIT_S = 2.0
_GAP = 0.005


def cheapest_choice(
    body: Program,
    graph: Graph,
    needed: Sequence[int],
    free: frozenset[int],
    once: frozenset[int],
    length: int,
    share: float,
) -> frozenset[int]:
    """The values to keep so that recomputing the rest costs least.

    The model is :class:`remat.planners.linear.keep.KeepModel` over the values and instructions of the body, with one
    limit on bytes: a stack counts once for each iteration, a value that is made again counts once.

    Args:
        body: the forward body.
        graph: its graph.
        needed: ids of the values that the backward body reads.
        free: ids that it can read anyhow.
        once: ids of values that must not be made again, whatever made them.
        length: iterations.
        share: of the bytes of keeping everything that is needed, 0 for the least that is possible.
    """
    wanted = [value for value in dict.fromkeys(needed) if value not in free]
    producer = {value: n for n, instruction in enumerate(body.instructions) for value in instruction.outputs}
    values = list(dict.fromkeys([*wanted, *producer, *(v for i in body.instructions for v in i.reads)]))
    values = [value for value in values if value not in free]
    column = {value: k for k, value in enumerate(values)}
    size = np.array([op_facts.size_bytes(body.avals[value]) for value in values], dtype=np.float64)
    cost = np.array([op.time_s for op in graph.ops], dtype=np.float64) * length
    scale = max(1.0, float(size.max(initial=0.0))) * length
    again = np.array([sum(graph.tensors[v].size_bytes for v in i.outputs) for i in body.instructions], dtype=np.float64)
    kept_bytes, again_bytes = length * size / scale, again / scale
    may_repeat = [
        all(
            op_facts.may_repeat(equation.eqn) and once.isdisjoint(equation.outputs)
            for equation in instruction.equations
        )
        for instruction in body.instructions
    ]
    everything = sum(length * size[column[value]] for value in wanted)

    def best(keep_cost: FloatArray, again_cost: FloatArray, room: float) -> tuple[BoolArray, BoolArray] | None:
        made_by = [producer.get(value) for value in values]
        model = KeepModel(keep_cost.tolist(), again_cost.tolist(), made_by, may_repeat)
        for value in wanted:
            model.require(column[value])
        for number, instruction in enumerate(body.instructions):
            for value in instruction.reads:
                if value not in free:
                    model.require_read(number, column[value])
        model.limit(enumerate(kept_bytes.tolist()), enumerate(again_bytes.tolist()), room)
        return model.solve(time_limit_s=_TIME_LIMIT_S, gap=_GAP)

    seconds = 1e-6 * size / scale, cost / max(float(cost.max(initial=0.0)), 1e-300)
    found = best(*seconds, share * everything / scale)
    if found is None:
        least = best(kept_bytes + 1e-6 * seconds[0], again_bytes + 1e-6 * seconds[1], np.inf)
        if least is None:
            return frozenset(wanted)
        smallest = float(kept_bytes @ least[0] + again_bytes @ least[1])
        found = best(*seconds, smallest * (1 + 1e-6)) or least
    return frozenset(value for value, is_kept in zip(values, found[0], strict=True) if is_kept)
