"""Nested recomputation over a chain of blocks: what each block stores, which stretches are run again from where.

The dynamic programme of the optimal persistent schedule of a chain (Beaumont et al. 2019, arXiv:1911.13214), with
several options for each block as in Rockmate (Zhao et al. 2023, arXiv:2307.01236).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from remat.core.simulator import bytes_alive
from remat.planners.chain.blocks import Block, find_blocks
from remat.planners.chain.menus import Option, block_menu, squeezed, undominated
from remat.planners.view.board import Board, expand
from remat.planners.view.problem import FloatArray, IntArray, Problem

LEVELS: Final = 400
"""Bytes are rounded to so many levels of the budget. A judgement: time grows with the levels, and with half of them
the rounding of some fifty blocks can add up to a tenth of the budget."""

_DEAREST: Final = 3.0
"""Plain steps of extra time that the schedule of the smallest peak may take; a judgement, nobody would run more."""

_SPLIT: Final = 1000
_NONE: Final = -1
"""Codes in the tables of choices: from the first on, "begin the next checkpoint at block code - 1000"; below it the
number of an option, of which a block has far fewer; -1 for no choice."""


_WALLS: Final[FloatArray] = np.where(np.arange(LEVELS + 1) < np.arange(LEVELS + 2)[:, None], np.inf, 0.0)
"""For each number of levels: infinite below it, else nothing."""


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
                self._menus[structure] = _remembered(block, (), partial(block_menu, block.graph, block.turn))
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
        last |= {s: len(ops) - 1 for s in wanted if s in last}
        born = {s: i for i, op in enumerate(ops) for s in board.makes[op]}
        alive = bytes_alive(
            np.array(list(born.values()), dtype=np.int64),
            np.array([last[s] + 1 for s in born], dtype=np.int64),
            np.array([size[s] for s in born], dtype=np.int64),
            len(ops),
        )
        workspace = np.array([self.problem.graph.ops[op].workspace_bytes for op in ops], dtype=np.int64)
        peak = int((alive + workspace).max()) if ops else 0
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
            more = _remembered(block, ("squeezed",), partial(squeezed, block.graph, block.turn, menu))
            self._menus[structure] = undominated([*menu, *more])
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


_menus: OrderedDict[tuple[object, ...], list[Option]] = OrderedDict()
"""Options of blocks by all that they depend on. Menus take most of the time of a search over blocks, and a step is
often planned for several budgets, such as the smallest one that an error has named."""

_MOST_MENUS: Final = 64
"""A judgement: a step has a few structures of block, and a menu of them takes some 100 kB at most."""


def _remembered(block: Block, kind: tuple[str, ...], make: Callable[[], list[Option]]) -> list[Option]:
    """Options that were worked out before for an equal block, or those that ``make`` works out."""
    # The structure rounds seconds. What is found must not depend on a step that differs by less.
    key = (*block.structure, tuple(op.time_s for op in block.graph.ops), *kind)
    if key not in _menus:
        _menus[key] = make()
    _menus.move_to_end(key)
    while len(_menus) > _MOST_MENUS:
        _menus.popitem(last=False)
    return _menus[key]


class ChainProgram:
    """Tables over memory levels.

    ``first_cost[s]``: least extra seconds of the blocks from s on, forward for the first time and backward.
    ``again_cost[s, t]``: the same for blocks s to t, run forward again from checkpoint s.
    """

    def __init__(self, chain: BlockChain, budget_bytes: int) -> None:
        self.chain = chain
        self.unit = max(budget_bytes, 1) / LEVELS
        count = chain.count
        self.first_cost: list[FloatArray] = [np.zeros(0)] * (count + 1)
        self.first_choice: list[IntArray] = [np.zeros(0, np.int64)] * (count + 1)
        self.again_cost: FloatArray = np.full((count, count, LEVELS + 1), np.inf)
        self.again_choice: dict[tuple[int, int], IntArray] = {}
        self._crossing = np.array(chain.crossing, dtype=np.int64)
        self._passing_peaks = np.array([run.peak_bytes for run in chain.passing], dtype=np.int64)
        self._passing_times = np.array([run.time_s for run in chain.passing])
        # The costs from each block to the present last one, behind as many levels at which nothing fits.
        self._to_end: FloatArray = np.full((count, 2 * (LEVELS + 1)), np.inf)
        for end in range(count):
            for start in reversed(range(end + 1)):
                if end - start < count - 1:
                    self._again(start, end)
                    self._to_end[start, LEVELS + 1 :] = self.again_cost[start, end]
        self.first_cost[count] = np.zeros(LEVELS + 1)
        for start in reversed(range(count)):
            self._first(start)

    def _level(self, bytes_: int) -> int:
        return min(LEVELS + 1, max(0, round(bytes_ / self.unit)))

    def _levels(self, sizes: IntArray) -> IntArray:
        return np.clip(np.rint(sizes / self.unit), 0, LEVELS + 1).astype(np.int64)

    def _shifted(self, cost: FloatArray, bytes_: int, need_bytes: int) -> FloatArray:
        """The cost with so many bytes less, infinite below the bytes that are needed in any case."""
        shift, need = self._level(bytes_), self._level(need_bytes)
        result = np.full(LEVELS + 1, np.inf)
        start = max(shift, need)
        if start <= LEVELS:
            result[start:] = cost[start - shift : LEVELS + 1 - shift]
        return result

    @staticmethod
    def _take(best: FloatArray, choice: IntArray, other: FloatArray, code: int) -> None:
        better = other < best
        best[better] = other[better]
        choice[better] = code

    def _first(self, start: int) -> None:
        chain = self.chain
        block = chain.blocks[start]
        best, choice = np.full(LEVELS + 1, np.inf), np.full(LEVELS + 1, _NONE, dtype=np.int64)
        for number, option in enumerate(chain.menus[start]):
            need = max(
                option.forward_bytes + block.fixed_forward_bytes, option.backward_bytes + block.fixed_backward_bytes
            )
            held = option.stored_bytes + chain.beside[start][number]
            cost = option.extra_s + self._shifted(self.first_cost[start + 1], held, need)
            self._take(best, choice, cost, number)
        need = stubborn = 0
        for middle in range(start + 1, chain.count):
            passed = chain.blocks[middle - 1]
            stubborn += chain.stubborn[middle - 1]
            need = max(
                need,
                chain.passing[middle - 1].peak_bytes
                + passed.fixed_forward_bytes
                + stubborn
                + chain.crossing[middle - 1][start],
            )
            later = self._shifted(self.first_cost[middle], chain.crossing[middle][start] + stubborn, need)
            earlier = self._shifted(self.again_cost[start, middle - 1], stubborn, 0)
            self._take(best, choice, later + earlier, _SPLIT + middle)
        self.first_cost[start], self.first_choice[start] = best, choice

    def _again(self, start: int, end: int) -> None:
        chain = self.chain
        block, menu = chain.blocks[start], chain.menus[start]
        beside = chain.blocks[end].fixed_backward_bytes + chain.coming[end]
        # Storages that must not be made twice are held since the first run, where their bytes are counted.
        needs = [
            option.backward_bytes - (option.stored_bytes - held) + block.fixed_backward_bytes
            for option, held in zip(menu, chain.held[start], strict=True)
        ]
        if start == end:
            runs = chain.ending[start]
            levels = [
                max(need, run.peak_bytes + beside if run.ops else 0) for need, run in zip(needs, runs, strict=True)
            ]
            costs = _WALLS[self._levels(np.array(levels, dtype=np.int64))]
        else:
            runs = chain.storing[start]
            levels = [max(need, run.peak_bytes + beside) for need, run in zip(needs, runs, strict=True)]
            held_bytes = np.add(chain.held[start], chain.beside[start])
            costs = self._later([start + 1] * len(menu), held_bytes, np.array(levels, dtype=np.int64))
        costs += np.array([option.extra_s + run.time_s for option, run in zip(menu, runs, strict=True)])[:, None]
        codes = np.arange(len(menu))
        if start < end:
            # Or the next checkpoint stands further on.
            crossing = self._crossing[:, start]
            most_bytes = np.maximum.accumulate(self._passing_peaks[start:end] + crossing[start:end] + beside)
            later = self._later(np.arange(start + 1, end + 1), crossing[start + 1 : end + 1], most_bytes)
            later += self.again_cost[start, start:end]
            later += np.cumsum(self._passing_times[start:end])[:, None]
            costs = np.concatenate([costs, later])
            codes = np.concatenate([codes, _SPLIT + np.arange(start + 1, end + 1)])
        cheapest = costs.argmin(axis=0)
        best = costs[cheapest, np.arange(LEVELS + 1)]
        self.again_cost[start, end] = best
        self.again_choice[start, end] = np.where(np.isfinite(best), codes[cheapest], _NONE)

    def _later(self, starts: Sequence[int] | IntArray, held_bytes: IntArray, need_bytes: IntArray) -> FloatArray:
        """The costs from each of some blocks to the present last one, see ``_shifted``."""
        places = np.arange(LEVELS + 1) + (LEVELS + 1 - self._levels(held_bytes))[:, None]
        rows = np.multiply(starts, self._to_end.shape[1])
        # One flat index is three times as quick as two, and a sum with what is infinite as quick as a mask twice over.
        result: FloatArray = self._to_end.ravel().take(places + rows[:, None])
        result += _WALLS[self._levels(need_bytes)]
        return result

    def schedule(self, level: int) -> tuple[int, ...] | None:
        """The schedule of least cost within a number of levels."""
        chain = self.chain
        if not chain.count or not np.isfinite(self.first_cost[0][level]):
            return None
        forward = [op for op in range(chain.blocks[-1].backward[0]) if chain.board.counts[op]]
        runs: list[int] = []
        self._follow_first(level, runs)
        return expand(chain.board, [*forward, *runs])

    def _follow_first(self, level: int, runs: list[int]) -> None:
        """Append the backward runs, last block first."""
        chain, start, pending = self.chain, 0, list[tuple[int, int, int, int]]()
        while start < chain.count:
            code = int(self.first_choice[start][level])
            if code < _SPLIT:
                pending.append((0, start, code, 0))
                option = chain.menus[start][code]
                level -= self._level(option.stored_bytes + chain.beside[start][code])
                start += 1
            else:
                middle = code - _SPLIT
                stubborn = sum(chain.stubborn[start:middle])
                pending.append((1, start, middle - 1, level - self._level(stubborn)))
                level -= self._level(chain.crossing[middle][start] + stubborn)
                start = middle
        for is_nested, start, number, level in reversed(pending):
            if is_nested:
                self._follow_again(start, number, level, runs)
            else:
                self._append_backward(start, number, runs)

    def _follow_again(self, start: int, end: int, level: int, runs: list[int]) -> None:
        chain = self.chain
        code = int(self.again_choice[start, end][level])
        if code >= _SPLIT:
            middle = code - _SPLIT
            for number in range(start, middle):
                runs.extend(chain.passing[number].ops)
            self._follow_again(middle, end, level - self._level(chain.crossing[middle][start]), runs)
            self._follow_again(start, middle - 1, level, runs)
            return
        runs.extend((chain.storing if start < end else chain.ending)[start][code].ops)
        if start < end:
            held = chain.held[start][code] + chain.beside[start][code]
            self._follow_again(start + 1, end, level - self._level(held), runs)
        self._append_backward(start, code, runs)

    def _append_backward(self, number: int, code: int, runs: list[int]) -> None:
        chain = self.chain
        block = chain.blocks[number]
        schedule: Sequence[int] = chain.menus[number][code].schedule
        at = schedule.index(block.turn)
        runs.extend(block.ops[op] for op in schedule[at + 1 :])
