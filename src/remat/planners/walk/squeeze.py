"""The smallest peak, by walking under a budget that sinks with every success."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from remat.core.simulator import simulate
from remat.planners.view.problem import Problem
from remat.planners.walk.annealing import Walk
from remat.planners.walk.board import Board, expand

_SHRINK: Final = 0.94
_ROUNDS: Final = 6
_STEPS_PER_OP: Final = 60
_MOST_STEPS: Final = 4000
_MOST_OPS: Final = 2000
_HOT: Final = 3e-3
_COLD: Final = 1e-4


def squeeze(problem: Problem, schedule: Sequence[int]) -> tuple[int, ...]:
    """A schedule with a peak at most that of the given one, where the order is free and the graph is not too large.

    Each round walks (:class:`remat.planners.walk.annealing.Walk`) under a budget of 94 % of the peak so far,
    pinned bytes left out, and the last one ends it. No guarantee; not bound by time, so that it is the same for
    every budget. Complexity: at most 24,000 edits.
    """
    best = tuple(schedule)
    pinned = problem.graph.pinned_bytes
    peak_bytes = simulate(problem.graph, best).peak_bytes
    floor_bytes = problem.largest_step_bytes
    # In a fixed order the walk finds nothing that eviction did not: measured on the traced graphs.
    fixed = not problem.graph.free_order or problem.order_is_tied
    if fixed or problem.count > _MOST_OPS or peak_bytes <= floor_bytes:
        return best
    board = Board(problem, whole=True)
    shrink = _SHRINK
    for seed in range(_ROUNDS):
        budget_bytes = max(floor_bytes, pinned + int(shrink * (peak_bytes - pinned)))
        walk = Walk(board, best, budget_bytes, seed, first_fit=True)
        walk.run(min(_MOST_STEPS, _STEPS_PER_OP * problem.count), _HOT, _COLD, None)
        found = None if walk.best is None else expand(board, walk.best)
        reached_bytes = peak_bytes if found is None else simulate(problem.graph, found).peak_bytes
        if found is None or reached_bytes >= peak_bytes:
            # A smaller step may still succeed.
            shrink = (1 + shrink) / 2
            continue
        best, peak_bytes = found, reached_bytes
        if peak_bytes <= floor_bytes:
            break
    return best
