"""Nested recomputation over a chain of blocks, by dynamic programming over options for each block."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

import numpy as np

from remat.core.graph import Graph
from remat.planners.chain.blocks import Block, find_blocks
from remat.planners.chain.menus import Option, block_menu, squeezed, undominated
from remat.planners.chain.programme import LEVELS, ChainProgram
from remat.planners.registry import register
from remat.planners.search import Search, smallest_peak_schedules
from remat.planners.view.problem import Problem
from remat.planners.walk.board import Board

_TRIES: Final = 5
_CAUTION: Final = 0.997
_DEAREST: Final = 3.0


@register("block_chain")
def block_chain(graph: Graph, budget_bytes: int, *, time_limit_s: float | None = None) -> tuple[int, ...]:
    """For each block of the chain choose what it stores; recompute stretches of blocks from a checkpoint, nested.

    The optimal persistent schedule of a chain (Beaumont et al. 2019, arXiv:1911.13214) with several options for each
    block, as in Rockmate (Zhao et al. 2023, arXiv:2307.01236). Optimal within its model up to the rounding of bytes
    to 400 levels, for the options known. Complexity: O(blocks^2 (blocks + options) levels) numpy work, and one menu
    for each structure of block.
    """
    # Its work is bounded, so that without a limit the result is the same however busy the machine is.
    deadline_s = None if time_limit_s is None else time.monotonic() + time_limit_s
    search = Search(Problem.of(graph), budget_bytes, deadline_s)
    search.offer(graph.plain_schedule)
    if search.best is None and budget_bytes >= search.problem.largest_step_bytes:
        nest_blocks(search)
    return search.result(smallest_peak_schedules(search.problem) if search.best is None else ())


def nest_blocks(search: Search) -> None:
    """Offer the chain's schedules for a budget, and for those that make up for what the model counts wrongly."""
    chain = BlockChain.of(search.problem)
    budget_bytes, largest_bytes = search.budget_bytes, search.problem.plain.peak_bytes
    peaks: dict[tuple[int, ...], int] = {}
    for _ in range(_TRIES if chain.blocks else 0):
        if search.expired:
            return
        schedule = chain.schedule(budget_bytes)
        if schedule is None:
            chain.squeeze()
            schedule = chain.schedule(budget_bytes)
        if schedule is None:
            return
        peak_bytes = peaks.get(schedule) or search.offer_improved(schedule)
        if schedule in peaks and peak_bytes <= search.budget_bytes:
            return
        peaks[schedule] = peak_bytes
        budget_bytes = min(largest_bytes, int(budget_bytes * search.budget_bytes / peak_bytes * _CAUTION))


@dataclass(frozen=True, eq=False)
class _Run:
    """A forward run of a block: its ops, seconds and peak."""

    ops: tuple[int, ...]
    time_s: float
    peak_bytes: int


class BlockChain:
    """The blocks of a step with their menus, and the dynamic programme over them.

    Attributes:
        blocks: in forward order; empty where the step is no chain of blocks.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.board = Board(problem, whole=False)
        self.blocks = find_blocks(self.board)
        self._squeezed: set[tuple[object, ...]] = set()
        self._menus: dict[tuple[object, ...], list[Option]] = {}
        self._structures = [block.structure for block in self.blocks]

    @classmethod
    def of(cls, problem: Problem) -> BlockChain:
        """The chain of a problem, kept with it."""
        known: BlockChain | None = vars(problem).get("_block_chain")
        if known is None:
            known = vars(problem)["_block_chain"] = cls(problem)
        return known

    def _ask_for_menus(self) -> None:
        """Menus take the most time of all, and are only needed where a schedule is asked for."""
        if self._menus:
            return
        for block, structure in zip(self.blocks, self._structures, strict=True):
            if structure not in self._menus:
                self._menus[structure] = block_menu(block.graph, block.turn)
        self._prepare()

    def _prepare(self) -> None:
        size, count = self.problem.size, len(self.blocks)
        self.menus = [self._menus[structure] for structure in self._structures]
        checkpoints: list[frozenset[int]] = [frozenset(), *(block.checkpoint for block in self.blocks)]
        # crossing[i][j]: bytes of checkpoint i beside checkpoint j, where checkpoint i stands behind block i - 1.
        self.crossing = [[sum(size[s] for s in a - b) for b in checkpoints] for a in checkpoints]
        self.passing: list[_Run] = []
        self.storing: list[list[_Run]] = []
        self.ending: list[list[_Run]] = []
        self.beside: list[list[int]] = []
        self.held: list[list[int]] = []
        self.stubborn: list[int] = []
        for block, menu in zip(self.blocks, self.menus, strict=True):
            self.passing.append(self._run(block, block.checkpoint))
            kept = [frozenset(block.storages[t] for t in option.stored) for option in menu]
            self.storing.append([self._run(block, block.checkpoint | k) for k in kept])
            self.ending.append([self._run(block, k) for k in kept])
            stubborn = [sum(size[s] for s in k & block.stubborn) for k in kept]
            self.held.append([option.stored_bytes - bytes_ for option, bytes_ in zip(menu, stubborn, strict=True)])
            self.stubborn.append(sum(size[s] for s in block.stubborn))
            made = {s for op in block.forward for s in self.board.makes[op]}
            self.beside.append([sum(size[s] for s in (block.checkpoint & made) - k) for k in kept])
        self.coming = [sum(b.graph.tensors[t].size_bytes for t in b.graph.ops[b.turn].outputs) for b in self.blocks]
        self.count = count

    def _run(self, block: Block, wanted: frozenset[int]) -> _Run:
        """What makes storages of a block from what stands before it."""
        board, size = self.board, self.problem.size
        made_by = {s: op for op in block.forward if board.repeatable[op] for s in board.makes[op]}
        needed: set[int] = set()
        pending = [made_by[s] for s in wanted if s in made_by]
        while pending:
            op = pending.pop()
            if op not in needed:
                needed.add(op)
                pending += [made_by[s] for s in board.reads[op] if s in made_by]
        ops = tuple(op for op in block.forward if op in needed)
        last = {s: i for i, op in enumerate(ops) for s in (*board.makes[op], *board.reads[op]) if s in made_by}
        last |= {s: len(ops) for s in wanted if s in last}
        change = np.zeros(len(ops) + 2, dtype=np.int64)
        for i, op in enumerate(ops):
            for s in board.makes[op]:
                change[i] += size[s]
                change[last[s] + 1] -= size[s]
        workspace = [self.problem.graph.ops[op].workspace_bytes for op in ops]
        peak = int((np.cumsum(change)[: len(ops)] + np.array(workspace, dtype=np.int64)).max()) if ops else 0
        return _Run(ops, sum(board.repeat_time_s[op] for op in ops), peak)

    def schedule(self, budget_bytes: int) -> tuple[int, ...] | None:
        """The cheapest schedule of the model for a budget, None where there is none."""
        return self.program(budget_bytes).schedule(LEVELS)

    def squeeze(self) -> None:
        """Look for smaller peaks of the block that needs most memory, until it is another or none is found."""
        self._ask_for_menus()
        while self.blocks:
            needs = [
                min(option.peak_bytes for option in menu) + block.fixed_backward_bytes
                for block, menu in zip(self.blocks, self.menus, strict=True)
            ]
            tightest = max(range(len(needs)), key=needs.__getitem__)
            structure, block = self._structures[tightest], self.blocks[tightest]
            if structure in self._squeezed:
                break
            self._squeezed.add(structure)
            menu = self._menus[structure]
            self._menus[structure] = undominated([*menu, *squeezed(block.graph, block.turn, menu)])
            self._prepare()

    def smallest(self) -> tuple[int, ...] | None:
        """The schedule with the smallest peak in the model that takes at most four times as long as the plain step.

        The blocks that bind the peak are squeezed first.
        """
        self.squeeze()
        budget_bytes = self.problem.plain.peak_bytes
        schedule = None
        for _ in range(3):
            program = self.program(budget_bytes)
            feasible = np.flatnonzero(program.first_cost[0] <= _DEAREST * self.problem.graph.time_s)
            if not len(feasible):
                break
            schedule = program.schedule(int(feasible[0]))
            budget_bytes = int(1.3 * feasible[0] * program.unit)
        return schedule

    def program(self, budget_bytes: int) -> ChainProgram:
        """The dynamic programme for budgets up to this one."""
        self._ask_for_menus()
        return ChainProgram(self, budget_bytes)
