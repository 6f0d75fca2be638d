"""What one block of a chain can do: how many bytes it stores for its backward part, and what that costs later."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from remat.core.graph import Graph
from remat.core.simulator import simulate, storage_lifetimes
from remat.planners.replay.greedy import cheapest_gap
from remat.planners.replay.improve import undrop
from remat.planners.replay.rematerialize import rematerialize
from remat.planners.replay.residents import TooManyRuns
from remat.planners.view.board import Board, expand
from remat.planners.view.problem import BoolArray, Problem
from remat.planners.walk.annealing import Walk

# Judgements, not measured. More of each makes larger menus, and a programme that is slower and sees more.
_LEVELS: Final = 8
"""Amounts of stored bytes that the menu has options for."""
_PEAKS: Final = (0.85, 0.7, 0.55, 0.45, 0.37, 0.3)
"""Peaks that are tried for each, as shares of the peak without eviction."""
_MOST_RUNS_PER_OP: Final = 6
"""An option that runs its ops more often is given up."""
_SHRINKS: Final = (0.93, 0.97)
_WALK_STEPS: Final = 3000
_HOT: Final = 1e-2
_COLD: Final = 1e-4
_PATIENCE: Final = 500
"""The walks that look for options of smaller peaks: the share of the last peak asked for, first the lower one, their
edits, temperatures as shares of the block's time, and the edits without progress after which a walk gives up. Of six
steps of JAX's zoo, those that found an option took 10 to 172 edits."""


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

    @property
    def peak_bytes(self) -> int:
        """The peak of the whole block."""
        return max(self.forward_bytes, self.backward_bytes)


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
        last = first = option_of(graph, turn, schedule)
        found.append(first)
        for share in _PEAKS:
            target_bytes = int(share * first.backward_bytes)
            if last.backward_bytes <= target_bytes:
                continue
            tight = _follow(problem, drop, target_bytes)
            if tight is None:
                break
            last = option_of(graph, turn, tight)
            found.append(last)
            if last.backward_bytes > target_bytes:
                break
    return undominated(found)


def squeezed(graph: Graph, turn: int, menu: Sequence[Option]) -> list[Option]:
    """Options with smaller peaks than any of a menu, by walking on from the one with the smallest."""
    problem = Problem.of(graph)
    board = Board(problem, whole=False)
    least = min(menu, key=lambda option: (option.peak_bytes, option.extra_s))
    found: list[Option] = []
    seed = 0
    while least.peak_bytes > problem.largest_step_bytes:
        for shrink in _SHRINKS:
            budget_bytes = max(problem.largest_step_bytes, int(shrink * least.peak_bytes))
            walk = Walk(board, least.schedule, budget_bytes, seed, first_fit=True, patience=_PATIENCE)
            walk.run(_WALK_STEPS, _HOT, _COLD, None)
            seed += 1
            if walk.best is not None:
                break
        if walk.best is None:
            break
        schedule = expand(board, walk.best)
        better = option_of(graph, turn, undrop(problem, schedule, simulate(graph, schedule).peak_bytes))
        if better.peak_bytes >= least.peak_bytes:
            break
        least = better
        found.append(least)
    return found


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
    lifetimes = storage_lifetimes(graph, schedule)
    at = schedule.index(turn)
    stored = frozenset(lifetimes.tensor[(lifetimes.birth < at) & (at < lifetimes.last)].tolist())
    return Option(
        tuple(schedule),
        stored,
        sum(graph.tensors[t].size_bytes for t in stored),
        max(timeline.bytes[:at], default=0),
        max(timeline.bytes[at:]),
        timeline.time_s - graph.time_s,
    )


def undominated(options: Sequence[Option]) -> list[Option]:
    """The options that no other beats in everything."""
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
