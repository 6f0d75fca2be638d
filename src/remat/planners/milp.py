"""Stage MILP: exact in program order for small graphs, the oracle that other planners are measured against."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from remat.graph import Graph
from remat.planners.board import Board, expand
from remat.planners.highs import solve
from remat.planners.linear_model import ModelBuilder
from remat.planners.peak_greedy import drop_greedily
from remat.planners.problem import Problem
from remat.planners.registry import register
from remat.planners.rematerialize import last_demand
from remat.planners.search import Search, smallest_peak_schedules

_MOST_OPS: Final = 400
_MOST_OPS_UNLIMITED: Final = 50
_ROUNDS: Final = 60
_LIMIT_S: Final = 60.0


@register("milp")
def milp(graph: Graph, budget_bytes: int, *, time_limit_s: float | None = None) -> tuple[int, ...]:
    """Solve the stage MILP with HiGHS; memory rows inside a stage are added only where a solution breaks them.

    Jain et al. 2020, "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization" (arXiv:1910.02653).
    Stage t ends with the first run of op t; before it, earlier ops may run again, each once and in program order.
    What a stage keeps for the next one is a variable, and what lives during a recomputation follows from it. Optimal
    where it ends in time, among schedules of this form, views counted with their storages and outputs never taking
    over an input's storage. Where the time ends first, above 400 ops, and above 50 where no time is given, what
    peak-greedy reaches is returned. Complexity: exponential at worst; O(ops^2) variables, fewer where tensors die
    early.
    """
    deadline_s = time.monotonic() + (_LIMIT_S if time_limit_s is None else time_limit_s)
    search = Search(Problem.of(graph), budget_bytes)
    search.offer(graph.plain_schedule)
    most_ops = _MOST_OPS_UNLIMITED if time_limit_s is None else _MOST_OPS
    if search.best is None and budget_bytes >= search.problem.largest_step_bytes:
        found = solve_stages(search.problem, budget_bytes, deadline_s) if len(graph.ops) <= most_ops else None
        if found is not None:
            search.offer(found)
        if search.best is None:
            drop_greedily(search)
    return search.result(smallest_peak_schedules(search.problem) if search.best is None else ())


def solve_stages(problem: Problem, budget_bytes: int, deadline_s: float) -> tuple[int, ...] | None:
    """The optimum of the stage MILP as a schedule; None where there is none, or the time ends first."""
    model = _Stages(problem, budget_bytes)
    if not model.again and not model.kept:
        return problem.graph.plain_schedule if problem.plain.peak_bytes <= budget_bytes else None
    for _ in range(_ROUNDS):
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            return None
        values = model.solve(left_s)
        if values is None:
            return None
        if not model.add_broken_rows(values):
            return expand(model.board, model.order(values))
    return None


@dataclass
class _Stages:
    """The MILP as it grows. ``again[t, op]``: op runs again in stage t; ``kept[t, s]``: s is there when t begins."""

    problem: Problem
    budget_bytes: int
    board: Board = field(init=False)
    builder: ModelBuilder = field(default_factory=ModelBuilder)
    again: dict[tuple[int, int], int] = field(default_factory=dict)
    kept: dict[tuple[int, int], int] = field(default_factory=dict)
    known_rows: set[tuple[int, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.board = Board(self.problem, whole=True)
        self.unit = float(max([1, *self.problem.size]))
        self.time_unit = max([1e-300, *self.board.repeat_time_s])
        self.room = self.budget_bytes - self.problem.graph.pinned_bytes
        self._add_variables()
        for stage in range(self.problem.count + 1):
            self._add_stage(stage)

    def _add_variables(self) -> None:
        problem, board = self.problem, self.board
        last = last_demand(problem)
        for s in problem.storages:
            final = problem.count if board.forever[s] else min(last[s], problem.count)
            for stage in range(problem.made_by[s] + 1, final + 1):
                self.kept[stage, s] = self.builder.add_column(is_integer=True)
        for op, made in enumerate(board.makes):
            if board.repeatable[op]:
                final = max(problem.count if board.forever[s] else last[s] for s in made)
                for stage in range(op + 1, min(final, problem.count) + 1):
                    self.again[stage, op] = self.builder.add_column(
                        board.repeat_time_s[op] / self.time_unit, is_integer=True
                    )

    def _there(self, stage: int, s: int) -> list[tuple[int, float]]:
        """What makes a storage present in a stage."""
        pairs = (self.kept.get((stage, s)), self.again.get((stage, self.problem.made_by[s])))
        return [(column, 1.0) for column in pairs if column is not None]

    def _add_stage(self, stage: int) -> None:
        problem, board = self.problem, self.board
        for s in board.reads[stage] if stage < problem.count else ():
            self.builder.add_row(self._there(stage, s), 1.0, np.inf)
        for s in problem.storages:
            made = problem.made_by[s]
            if stage == problem.count and board.forever[s]:
                self.builder.add_row(self._there(stage, s), 1.0, np.inf)
            later = self.kept.get((stage + 1, s))
            if later is not None and made < stage:
                self.builder.add_row([(later, 1.0), *((c, -1.0) for c, _ in self._there(stage, s))], -np.inf, 0.0)
        for op in range(min(stage, problem.count)):
            column = self.again.get((stage, op))
            if column is None:
                continue
            for s in board.reads[op]:
                self.builder.add_row([(column, 1.0), *((c, -1.0) for c, _ in self._there(stage, s))], -np.inf, 0.0)
        if stage < problem.count:
            touched = {*board.reads[stage], *board.makes[stage]}
            held = [
                (self.kept[stage + 1, s], problem.size[s] / self.unit)
                for s in problem.storages
                if s not in touched and problem.made_by[s] < stage and (stage + 1, s) in self.kept
            ]
            self.builder.add_row(held, -np.inf, (self.room - self._own_bytes(stage)) / self.unit)

    def _own_bytes(self, op: int) -> int:
        own = {*self.board.reads[op], *self.board.makes[op]}
        return sum(self.problem.size[s] for s in own) + self.problem.graph.ops[op].workspace_bytes

    def solve(self, time_limit_s: float) -> list[bool] | None:
        solution = solve(self.builder.build(), time_limit_s=time_limit_s)
        return None if solution is None or not solution.optimal else [value > 0.5 for value in solution.values]

    def order(self, values: list[bool]) -> list[int]:
        """The runs that a solution stands for, without those that nothing reads."""
        result: list[int] = []
        for stage in range(self.problem.count + 1):
            result += [op for op in range(min(stage, self.problem.count)) if self._runs(values, stage, op)]
            result += [stage] if stage < self.problem.count else []
        return result

    def _runs(self, values: list[bool], stage: int, op: int) -> bool:
        column = self.again.get((stage, op))
        return column is not None and values[column]

    def _is_kept(self, values: list[bool], stage: int, s: int) -> bool:
        column = self.kept.get((stage, s))
        return column is not None and values[column]

    def add_broken_rows(self, values: list[bool]) -> bool:
        """Add the memory rows of recomputations at which this solution exceeds the budget; False if there is none."""
        broken = False
        for (stage, op), column in self.again.items():
            if (
                values[column]
                and (stage, op) not in self.known_rows
                and self._live_bytes(values, stage, op) > self.room
            ):
                self.known_rows.add((stage, op))
                self._add_transient(stage, op)
                broken = True
        return broken

    def _live_bytes(self, values: list[bool], stage: int, op: int) -> int:
        problem, board = self.problem, self.board
        total = self._own_bytes(op)
        for s in problem.storages:
            if s in board.reads[op] or s in board.makes[op] or problem.made_by[s] >= stage:
                continue
            there = self._is_kept(values, stage, s)
            there |= problem.made_by[s] < op and self._runs(values, stage, problem.made_by[s])
            wanted = self._is_kept(values, stage + 1, s) or any(
                reader == stage or self._runs(values, stage, reader)
                for reader in problem.consumers[s]
                if op < reader <= stage
            )
            wanted |= stage == problem.count and board.forever[s]
            if there and wanted and not self._made_again_later(values, stage, op, s):
                total += problem.size[s]
        return total

    def _made_again_later(self, values: list[bool], stage: int, op: int, s: int) -> bool:
        """Kept in vain: a run later in the stage replaces the storage before anything reads it."""
        made = self.problem.made_by[s]
        if made <= op or not self._runs(values, stage, made):
            return False
        return not any(op < r < made and self._runs(values, stage, r) for r in self.problem.consumers[s])

    def _add_transient(self, stage: int, op: int) -> None:
        problem, board = self.problem, self.board
        running = self.again[stage, op]
        entries: list[tuple[int, float]] = []
        largest = 0
        for s in problem.storages:
            made = problem.made_by[s]
            if s in board.reads[op] or s in board.makes[op] or made >= stage:
                continue
            there = [self.kept.get((stage, s)), self.again.get((stage, made)) if made < op else None]
            wanted = [self.kept.get((stage + 1, s))]
            readers = [r for r in problem.consumers[s] if op < r <= stage]
            wanted += [self.again.get((stage, r)) for r in readers if r < stage]
            always = stage in readers or (stage == problem.count and board.forever[s])
            live = self.builder.add_column()
            for first in (column for column in there if column is not None):
                # A later run of the maker may replace it; then it need not live on.
                later = self.again.get((stage, made)) if made > op else None
                replaced = [(later, 1.0)] if later is not None else []
                if always:
                    self.builder.add_row([(live, 1.0), (first, -1.0), *replaced], 0.0, np.inf)
                for second in (column for column in wanted if column is not None):
                    self.builder.add_row([(live, 1.0), (first, -1.0), (second, -1.0), *replaced], -1.0, np.inf)
            entries.append((live, problem.size[s] / self.unit))
            largest += problem.size[s]
        most = self.room - self._own_bytes(op)
        slack = max(0, largest - most) / self.unit
        self.builder.add_row([*entries, (running, slack)], -np.inf, most / self.unit + slack)
