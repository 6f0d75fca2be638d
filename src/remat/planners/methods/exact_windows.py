"""Exact windows: stretches of the best schedule known, planned again by the stage MILP."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Final

from remat.core.simulator import storage_lifetimes
from remat.planners.linear.stage import StageModel, Stretch
from remat.planners.search import Search
from remat.planners.view.board import Board, expand
from remat.planners.view.problem import Problem

_MOST_OPS: Final = 1000
_MOST_COLUMNS: Final = 2000
_SHORTEST: Final = 8
_MOST_WINDOWS: Final = 4
_MOST_NODES: Final = 200
"""Sizes of the graph, a window's model and length, how many windows, and the nodes of one MILP. Judgements: larger ones
find more and take longer."""
_NODES_OF_MANY: Final = 1
"""The same in a search that is one of many for a step, as under a compiler. With 200 nodes a chain of eight layers took
up to 15 s a search, of which a refusal makes six, and no plan of 80 to 57 % of its peak was cheaper; steps that nothing
else fits into a budget are mostly found at the first node. Of 40 small steps at 80 to 40 %, three cost more so, and one
is refused. Models of more than ``_MOST_COLUMNS`` are left out there: one of 2,540 took 5 to 7 s for its first node,
found nothing, and was asked three times by one plan, which took 30 s with it."""
_SMALL: Final = 60
_MOST_S_OF_SMALL: Final = 15.0
"""Ops of a graph that is solved as an oracle would, and seconds for it: with fifteen instead of ten one more of the
benchmark's 56 cases became optimal; with a minute, chains of 30 layers took a minute to plan."""
_MOST_S: Final = 0.5
"""Elsewhere: with more, a step of 1,646 ops was planned in 62 s with nothing gained."""


def exact_windows(search: Search) -> None:
    """Offer the best schedule with stretches of it replaced by what is optimal there, the rest staying as it is.

    A window is as many stages as make a MILP of some 2,000 columns, so that a graph of some 60 ops is one window. What
    is in memory where it begins and ends stays; first runs keep the order that they have. Where nothing is known that
    fits, only a graph of one window is tried, in program order. Large neighbourhood search
    (Shaw 1998, doi:10.1007/3-540-49481-2_30) with the model of Checkmate (Jain et al. 2020, arXiv:1910.02653). Windows
    with the most recomputation come first. Complexity: at most four MILPs of 200 nodes, or half a second, each;
    of a graph of up to 60 ops fifteen seconds. In a search that is not thorough each MILP ends at its first
    node, and larger ones are left out.
    """
    problem = search.problem
    if not 0 < problem.count <= _MOST_OPS:
        return
    known = problem.graph.plain_schedule if search.best is None else search.best
    order = tuple(dict.fromkeys(known))
    inner = search.reordered(order)
    number = {op: i for i, op in enumerate(order)}
    board = Board(inner.problem, whole=True)
    runs = _Runs(inner.problem, [number[op] for op in known])
    windows = _windows(runs)
    if search.best is None and len(windows) > 1:
        return
    most_s = _MOST_S_OF_SMALL if problem.count <= _SMALL else _MOST_S
    most_nodes = _MOST_NODES if search.thorough else _NODES_OF_MANY
    for first, stop in windows:
        left_s = search.left_s(most_s)
        if left_s <= 0 or (search.best is not None and not runs.again_s(first, stop)):
            continue
        model = StageModel(inner.problem, search.budget_bytes, runs.stretch(first, stop))
        if not search.thorough and len(model.builder.cost) > _MOST_COLUMNS:
            continue  # It would not be solved at its first node.
        found = model.optimum(time.monotonic() + left_s, most_nodes)
        if found is not None:
            before_s = inner.best_time_s
            inner.offer(expand(board, runs.with_stretch(first, stop, found)))
            if inner.best is not None and inner.best_time_s < before_s:
                runs = _Runs(inner.problem, inner.best)


def _windows(runs: _Runs) -> list[tuple[int, int]]:
    """The stretches to try, which overlap by half, those with the most recomputation first."""
    count = runs.problem.count
    length = max(_SHORTEST, _MOST_COLUMNS // max(1, runs.most_live))
    if length > count:
        return [(0, count + 1)]
    starts = range(0, count + 1, math.ceil(length / 2))
    windows = [(start, min(start + length, count + 1)) for start in starts]
    return sorted(windows, key=lambda window: -runs.again_s(*window))[:_MOST_WINDOWS]


class _Runs:
    """A schedule whose first runs stand in program order, cut into stages."""

    def __init__(self, problem: Problem, schedule: Sequence[int]) -> None:
        self.problem = problem
        self.runs = list(schedule)
        first: dict[int, int] = {}
        for step, op in enumerate(self.runs):
            first.setdefault(op, step)
        self._lifetimes = storage_lifetimes(problem.graph, self.runs)
        # Where each stage begins; the last one ends the schedule.
        self.begin = [0, *(first[op] + 1 for op in range(problem.count)), len(self.runs)]
        self.most_live = max((len(self._live(stage)) for stage in range(0, problem.count, 10)), default=0)

    def again_s(self, first: int, stop: int) -> float:
        """Seconds of recomputation in a stretch."""
        op_time_s = self.problem.op_time_s
        seconds = sum(op_time_s[op] for op in self.runs[self.begin[first] : self.begin[stop]])
        return seconds - sum(op_time_s[first : min(stop, self.problem.count)])

    def _live(self, stage: int) -> frozenset[int]:
        """The storages in memory where a stage begins."""
        step, lives = self.begin[stage], self._lifetimes
        alive = (lives.birth < step) & ((step <= lives.last) | lives.kept)
        return frozenset(lives.tensor[alive].tolist())

    def stretch(self, first: int, stop: int) -> Stretch:
        """The stretch with what is in memory at its ends."""
        count = self.problem.count
        return Stretch(first, stop, self._live(first), self._live(stop) if stop <= count else frozenset())

    def with_stretch(self, first: int, stop: int, runs: Sequence[int]) -> list[int]:
        """The schedule with other runs in a stretch."""
        return [*self.runs[: self.begin[first]], *runs, *self.runs[self.begin[stop] :]]
