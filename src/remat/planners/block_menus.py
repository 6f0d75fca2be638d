"""What one block of a chain can do: how many bytes it stores for its backward part, and what that costs later."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from remat.graph import Graph
from remat.planners.improve import undrop
from remat.planners.peak_greedy import cheapest_gap
from remat.planners.problem import BoolArray, Problem
from remat.planners.rematerialize import TooManyRuns, rematerialize
from remat.simulator import simulate

_LEVELS: Final = 10
_PEAKS: Final = (1.0, 0.85, 0.7, 0.55, 0.45, 0.37, 0.3)
_MOST_RUNS_PER_OP: Final = 6


@dataclass(frozen=True, eq=False)
class Option:
    """One way to run a block.

    Attributes:
        schedule: of the block's graph.
        stored: the tensors made before the turn that live across it.
        stored_bytes: their bytes.
        forward_bytes: the peak before the turn.
        backward_bytes: the peak from the turn on.
        extra_s: seconds of recomputation.
    """

    schedule: tuple[int, ...]
    stored: frozenset[int]
    stored_bytes: int
    forward_bytes: int
    backward_bytes: int
    extra_s: float


def block_menu(graph: Graph, turn: int) -> list[Option]:
    """The options of a block that no other beats in all of bytes stored, peaks and seconds.

    Args:
        graph: forward ops, one op at ``turn`` that makes what comes in from later blocks, backward ops.
        turn: the index of that op.

    Stored tensors are dropped one after another, the cheapest per byte first; each stage of that is then run within
    smaller and smaller peaks. Complexity: some seventy replays of the block.
    """
    problem = Problem.of(graph)
    found: list[Option] = []
    for drop in _stages(problem, turn):
        schedule = _follow(problem, drop, None)
        if schedule is None:
            continue
        first = option_of(graph, turn, schedule)
        found.append(first)
        for share in _PEAKS[1:]:
            tight = _follow(problem, drop, int(share * first.backward_bytes))
            if tight is not None:
                found.append(option_of(graph, turn, tight))
    return _undominated(found)


def _follow(problem: Problem, drop: BoolArray, budget_bytes: int | None) -> tuple[int, ...] | None:
    try:
        schedule = rematerialize(
            problem,
            drop,
            budget_bytes,
            distance_power=0.5,
            patience=10.0,
            max_runs=_MOST_RUNS_PER_OP * problem.count + 50,
        )
    except TooManyRuns:
        return None
    return schedule


def _stages(problem: Problem, turn: int) -> Iterator[BoolArray]:
    """Decisions with fewer and fewer bytes stored across the turn, about ten."""
    drop = problem.no_drops()
    start, end, size = problem.gap_start, problem.gap_end, problem.gap_size
    across = problem.may_drop & (start < turn) & (end > turn) & (size > 0)
    cost = np.array([problem.op_time_s[problem.made_by[int(s)]] for s in problem.gap_storage], dtype=np.float64)
    left = float(size[across].sum())
    step = left / _LEVELS
    due = left
    while True:
        if left <= due:
            yield drop.copy()
            due = min(due - step, left - 0.5 * step)
        candidates = np.flatnonzero(across)
        if not len(candidates):
            break
        gap = cheapest_gap(problem, drop, candidates, cost)
        across[gap] = False
        drop[gap] = True
        left -= float(size[gap])
    yield drop


def option_of(graph: Graph, turn: int, schedule: Sequence[int]) -> Option:
    """What a schedule of a block amounts to."""
    timeline = simulate(graph, schedule)
    at = schedule.index(turn)
    coming = set(graph.ops[turn].outputs)
    pinned = set(graph.inputs)
    made = {t for op in schedule[:at] for t in graph.ops[op].outputs}
    stored: set[int] = set()
    for op in reversed(schedule[at + 1 :]):
        stored -= set(graph.ops[op].outputs)
        stored |= set(graph.ops[op].inputs)
    later = {t for op in schedule[at + 1 :] for t in graph.ops[op].outputs}
    stored |= {t for t in graph.outputs if t not in later}
    stored = (stored & made) - coming - pinned
    return Option(
        tuple(schedule),
        frozenset(stored),
        sum(graph.tensors[t].size_bytes for t in stored),
        max(timeline.bytes[:at], default=0),
        max(timeline.bytes[at:]),
        timeline.time_s - graph.time_s,
    )


def _undominated(options: Sequence[Option]) -> list[Option]:
    kept: list[Option] = []
    order = sorted(options, key=lambda o: (o.extra_s, o.stored_bytes, o.backward_bytes, o.forward_bytes))
    for option in order:
        beaten = any(
            other.stored_bytes <= option.stored_bytes
            and other.backward_bytes <= option.backward_bytes
            and other.forward_bytes <= option.forward_bytes
            for other in kept
        )
        if not beaten:
            kept.append(option)
    return kept
