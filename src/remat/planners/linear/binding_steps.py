"""Which steps of a schedule bind: the samples of a window model, chosen anew by what its solution leaves out."""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import numpy as np

from remat.planners.linear.window import WindowModel
from remat.planners.view.problem import FloatArray

_MOST_NEW: Final = 4
_MOST_NEW_OF_WINDOW: Final = 2
_MOST_KEPT: Final = 6
"""Steps that are added at once, of them in one window, and samples that stay. The model grows with the square of their
sum: with 8, 3 and 8 a ResNet50 took 8 s for a model that proved less than one of 9 samples in 3 s."""
_WORTH: Final = 1e-3
"""The least multiplier of a sample that stays, as a share of the largest. A judgement: others hardly add to a bound."""
_LEAST_EXCESS: Final = 2e-3
"""Of the budget: a step that is less above it hardly binds. A judgement; smaller, and samples are added for nothing."""


def binding_steps(model: WindowModel, values: FloatArray, multipliers: FloatArray) -> tuple[int, ...]:
    """The samples to look at next: those that are worth most, and the steps at which the solution needs too much.

    Args:
        model: whose solution it is.
        values: of its columns.
        multipliers: of its rows.

    Returns:
        Ops, rising.
    """
    worth = np.abs(multipliers[model.memory_rows])
    order = np.argsort(-worth, kind="stable")[:_MOST_KEPT]
    kept = {int(model.places[sample]) for sample in order if worth[sample] > _WORTH * worth.max()}
    excess = needed_bytes(model, values) - model.budget_bytes
    excess[model.places] = 0.0
    edges = [0, *(int(place) + 1 for place in model.places), model.problem.count]
    new: list[tuple[float, int]] = []
    for start, stop in pairwise(edges):
        within = sorted(range(start, stop), key=lambda op: (-excess[op], op))[:_MOST_NEW_OF_WINDOW]
        new += [(float(excess[op]), op) for op in within if excess[op] > _LEAST_EXCESS * model.budget_bytes]
    new.sort(key=lambda pair: (-pair[0], pair[1]))
    return tuple(sorted(kept | {op for _, op in new[:_MOST_NEW]}))


def needed_bytes(model: WindowModel, values: FloatArray) -> FloatArray:
    """For each op, the bytes that a solution needs at its first run at least, as far as the samples around it tell.

    A storage that a first run reads further on in the window is there unless its op runs again in between, and so is
    one that is kept across the next sample. What is there for a recomputation only is left out.
    """
    problem, places = model.problem, model.places
    change = np.zeros(problem.count + 2)
    beside = np.zeros(problem.count + 1)
    touching = [{*problem.storages_read[op], *problem.storages_made[op]} for op in range(problem.count)]
    edges = [-1, *(int(place) for place in places), problem.count - 1]
    for number, (start, stop) in enumerate(pairwise(edges)):
        last = {s: op for op in range(start + 1, stop + 1) for s in problem.storages_read[op]}
        if number == len(places):
            roots = problem.graph.roots
            last |= {roots[t]: problem.count for t in problem.graph.outputs}
        of_storage: dict[int, list[tuple[int, int, float]]] = {}
        for s in model.followed:
            made = problem.made_by[s]
            if made > stop:
                continue
            column = None if number == 0 else model.again(made, number - 1)
            again = 0.0 if column is None else float(values[column])
            born, read = max(made, start), last.get(s, -1)
            after = model.kept.get((s, number)) if number < len(places) else None
            spans = [(born + 1, read, 1.0 - again)] if read > born else []
            if after is not None:
                spans.append((max(born, read) + 1, stop + 1, float(values[after]) - again))
            of_storage[s] = [(low, high, problem.size[s] * part) for low, high, part in spans if part > 0]
            for low, high, bytes_ in of_storage[s]:
                if low < high:
                    change[low] += bytes_
                    change[high] -= bytes_
        for op in range(start + 1, stop + 1):
            for s in touching[op]:
                beside[op] += sum(bytes_ for low, high, bytes_ in of_storage.get(s, ()) if low <= op < high)
    own = np.array(problem.own_bytes, dtype=np.float64)
    return np.cumsum(change)[: problem.count] - beside[: problem.count] + own + problem.graph.pinned_bytes
