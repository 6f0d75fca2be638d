"""The stage MILP as it grows: which storages are kept from stage to stage, and which ops run again in each."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

import numpy as np

from remat.planners.linear.highs import ModelBuilder, solve
from remat.planners.view.board import Board
from remat.planners.view.problem import Problem

# Judgements, not measured.
_LEVELS: Final = 2
"""How far behind what a stretch touches ancestors may be computed again in it. More: larger models."""
_ROUNDS: Final = 60
"""Solutions whose broken memory rows are added; a model that needs more is given up, as one that ends too late is."""


@dataclass(frozen=True)
class Stretch:
    """A part of a schedule: the stages from ``first`` up to ``stop``, which is left out.

    Attributes:
        there: the storages in memory when it begins.
        wanted: those that must be there when it ends.
    """

    first: int
    stop: int
    there: frozenset[int] = frozenset()
    wanted: frozenset[int] = frozenset()


@dataclass
class StageModel:
    """``again[t, op]``: op runs again in stage t; ``kept[t, s]``: s is there when t begins.

    Stage t ends with the first run of op t; the last one, which has none, with the step. Without a stretch the model
    is that of the whole step.
    """

    problem: Problem
    budget_bytes: int
    stretch: Stretch | None = None
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
        self.part = self.stretch or Stretch(0, self.problem.count + 1)
        self._add_variables()
        for stage in range(self.part.first, self.part.stop):
            self._add_stage(stage)

    def _add_variables(self) -> None:
        problem, board, part = self.problem, self.board, self.part
        last = problem.last_demand
        final = {s: problem.count if problem.forever[s] else min(last[s], problem.count) for s in problem.storages}
        for s in self._followed:
            first = problem.made_by[s] + 1
            if first <= part.first and s in part.there:
                self._add_fixed(part.first, s)
            for stage in range(max(first, part.first + (first <= part.first)), min(final[s], part.stop - 1) + 1):
                self.kept[stage, s] = self.builder.add_column(is_integer=True)
            if s in part.wanted:
                self._add_fixed(part.stop, s)
        for op, made in enumerate(board.makes):
            if board.repeatable[op] and any(self._has_columns(s) for s in made):
                until = min(max(final[s] for s in made), part.stop - 1)
                for stage in range(max(op + 1, part.first), until + 1):
                    self.again[stage, op] = self.builder.add_column(
                        board.repeat_time_s[op] / self.time_unit, is_integer=True
                    )

    def _add_fixed(self, stage: int, s: int) -> None:
        column = self.kept[stage, s] = self.builder.add_column(is_integer=True)
        self.builder.add_row([(column, 1.0)], low=1.0)

    def _has_columns(self, s: int) -> bool:
        return self.stretch is None or s in self._followed

    @cached_property
    def _followed(self) -> dict[int, None]:
        """All storages; of a stretch those that are there, wanted, made or read in it, and what these are made from."""
        problem, part = self.problem, self.part
        if self.stretch is None:
            return dict.fromkeys(problem.storages)
        ops = range(part.first, min(part.stop, problem.count))
        found = set(part.there | part.wanted)
        found.update(s for op in ops for s in (*self.board.reads[op], *self.board.makes[op]))
        for _ in range(_LEVELS):
            found.update(u for s in tuple(found) for u in self.board.reads[problem.made_by[s]])
        return {s: None for s in problem.storages if s in found}

    def _there(self, stage: int, s: int) -> list[tuple[int, float]]:
        """What makes a storage present in a stage."""
        pairs = (self.kept.get((stage, s)), self.again.get((stage, self.problem.made_by[s])))
        return [(column, 1.0) for column in pairs if column is not None]

    def _add_stage(self, stage: int) -> None:
        problem, board = self.problem, self.board
        for s in board.reads[stage] if stage < problem.count else ():
            self.builder.add_row(self._there(stage, s), 1.0, np.inf)
        for s in self._followed:
            made = problem.made_by[s]
            if stage == problem.count and problem.forever[s]:
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
                for s in self._followed
                if s not in touched and problem.made_by[s] < stage and (stage + 1, s) in self.kept
            ]
            self.builder.add_row(held, -np.inf, (self.room - self._own_bytes(stage)) / self.unit)

    def _own_bytes(self, op: int) -> int:
        own = {*self.board.reads[op], *self.board.makes[op]}
        return sum(self.problem.size[s] for s in own) + self.problem.graph.ops[op].workspace_bytes

    def optimum(
        self, deadline_s: float, most_nodes: int | None = None, *, at_any_cost: bool = False
    ) -> list[int] | None:
        """The runs of the optimum; None where there is none, or the time or the nodes end first.

        The memory rows of recomputations are added where a solution breaks them, until none is broken.

        Args:
            deadline_s: ``time.monotonic()`` at which the search ends.
            most_nodes: of each model that is solved.
            at_any_cost: is it enough that the runs fit? Such runs are found sooner.
        """
        for _ in range(_ROUNDS):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return None
            values = self.solve(left_s, most_nodes, at_any_cost=at_any_cost)
            if values is None:
                return None
            if not self.add_broken_rows(values):
                return self.order(values)
        return None

    def solve(
        self, time_limit_s: float, most_nodes: int | None = None, *, at_any_cost: bool = False
    ) -> list[bool] | None:
        """The solution of the rows so far; None where there is none, or a limit ends the search first."""
        model = self.builder.build()
        if at_any_cost:
            model = replace(model, cost=np.zeros_like(model.cost))
        solution = solve(model, time_limit_s=time_limit_s, most_nodes=most_nodes)
        return None if solution is None or not solution.optimal else [value > 0.5 for value in solution.values]

    def order(self, values: list[bool]) -> list[int]:
        """The runs that a solution stands for."""
        result: list[int] = []
        for stage in range(self.part.first, self.part.stop):
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
        for s in self._followed:
            if s in board.reads[op] or s in board.makes[op] or problem.made_by[s] >= stage:
                continue
            there = self._is_kept(values, stage, s)
            there |= problem.made_by[s] < op and self._runs(values, stage, problem.made_by[s])
            wanted = self._is_kept(values, stage + 1, s) or any(
                reader == stage or self._runs(values, stage, reader)
                for reader in problem.consumers[s]
                if op < reader <= stage
            )
            wanted |= stage == problem.count and problem.forever[s]
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
            always = stage in readers or (stage == problem.count and problem.forever[s])
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
