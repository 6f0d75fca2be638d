"""Which values of a loop's body to stack for the backward loop, at a given number of bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from remat.core.graph import Graph
from remat.jax.trace import op_facts
from remat.jax.trace.program import Program
from remat.planners.linear.highs import LinearModel, solve
from remat.planners.view.problem import FloatArray

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

    A small keep MILP as of ``remat.planners.keep_milp``: y_v stacks value v, r_i runs instruction i again. What the
    backward body needs is kept or made again; an instruction that runs again finds what it reads kept, made again, or
    given to the loop. One memory row: stacks count once for each iteration, what is made again for one.

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
    count, runs = len(values), len(body.instructions)
    size = np.array([op_facts.size_bytes(body.avals[value]) for value in values], dtype=np.float64)
    cost = np.array([op.time_s for op in graph.ops], dtype=np.float64) * length
    rows: list[list[tuple[int, float]]] = []
    low: list[float] = []
    high: list[float] = []
    for value in wanted:
        made = [(count + producer[value], 1.0)] if value in producer else []
        rows.append([(column[value], 1.0), *made])
        low.append(1.0)
        high.append(np.inf)
    for number, instruction in enumerate(body.instructions):
        for value in instruction.reads:
            if value in free:
                continue
            made = [(count + producer[value], -1.0)] if value in producer else []
            rows.append([(count + number, 1.0), (column[value], -1.0), *made])
            low.append(-np.inf)
            high.append(0.0)
    scale = max(1.0, float(size.max(initial=0.0))) * length
    again = np.array([sum(graph.tensors[v].size_bytes for v in i.outputs) for i in body.instructions])
    memory = [(k, length * size[k] / scale) for k in range(count)]
    memory += [(count + n, float(again[n]) / scale) for n in range(runs)]
    allowed = np.array(
        [
            all(op_facts.may_repeat(step.eqn) and once.isdisjoint(step.outputs) for step in instruction.steps)
            for instruction in body.instructions
        ],
        dtype=np.float64,
    )
    everything = sum(length * size[column[value]] for value in wanted)

    def best(objective: FloatArray, limit: float) -> FloatArray | None:
        entries = [*rows, memory]
        triplets = [(row, k, value) for row, terms in enumerate(entries) for k, value in terms]
        solution = solve(
            LinearModel(
                cost=objective,
                low=np.zeros(count + runs),
                high=np.concatenate([np.ones(count), allowed]),
                row_low=np.array([*low, -np.inf]),
                row_high=np.array([*high, limit]),
                rows=np.array([t[0] for t in triplets], dtype=np.int64),
                columns=np.array([t[1] for t in triplets], dtype=np.int64),
                values=np.array([t[2] for t in triplets], dtype=np.float64),
                is_integer=np.ones(count + runs, dtype=np.int64),
            ),
            time_limit_s=_TIME_LIMIT_S,
            gap=_GAP,
        )
        return None if solution is None else solution.values

    bytes_alone = np.zeros(count + runs)
    for k, value in memory:
        bytes_alone[k] = value
    seconds = np.concatenate([1e-6 * size / scale, cost / max(float(cost.max(initial=0.0)), 1e-300)])
    found = best(seconds, share * everything / scale)
    if found is None:
        least = best(bytes_alone + 1e-6 * seconds, np.inf)
        if least is None:
            return frozenset(wanted)
        smallest = float(bytes_alone @ np.round(least))
        found = best(seconds, smallest * (1 + 1e-6))
        found = least if found is None else found
    return frozenset(value for value in values if found[column[value]] > 0.5)
