"""The dynamic programme over a chain of blocks: what each stores, and which stretches are run again from where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from remat.planners.view.problem import FloatArray, IntArray
from remat.planners.walk.board import expand

if TYPE_CHECKING:
    from remat.planners.methods.block_chain import BlockChain

LEVELS: Final = 400
"""Bytes are rounded to so many levels of the budget."""

_SPLIT: Final = 1000
_NONE: Final = -1


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
        self.again_cost: dict[tuple[int, int], FloatArray] = {}
        self.again_choice: dict[tuple[int, int], IntArray] = {}
        for length in range(count - 1):
            for start in range(count - length):
                self._again(start, start + length)
        self.first_cost[count] = np.zeros(LEVELS + 1)
        for start in reversed(range(count)):
            self._first(start)

    def _level(self, bytes_: int) -> int:
        return min(LEVELS + 1, max(0, round(bytes_ / self.unit)))

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
        block = chain.blocks[start]
        beside = chain.blocks[end].fixed_backward_bytes + chain.coming[end]
        best, choice = np.full(LEVELS + 1, np.inf), np.full(LEVELS + 1, _NONE, dtype=np.int64)
        for number, option in enumerate(chain.menus[start]):
            # What is made once only is held by whoever runs the block again.
            once_bytes = option.stored_bytes - chain.held[start][number]
            need = option.backward_bytes - once_bytes + block.fixed_backward_bytes
            if start == end:
                run = chain.ending[start][number]
                level = self._level(max(need, run.peak_bytes + beside if run.ops else 0))
                cost = np.full(LEVELS + 1, np.inf)
                cost[level:] = option.extra_s + run.time_s
            else:
                run = chain.storing[start][number]
                held = chain.held[start][number] + chain.beside[start][number]
                cost = self._shifted(self.again_cost[start + 1, end], held, max(need, run.peak_bytes + beside))
                cost += option.extra_s + run.time_s
            self._take(best, choice, cost, number)
        need, time_s = 0, 0.0
        for middle in range(start + 1, end + 1):
            run = chain.passing[middle - 1]
            need = max(need, run.peak_bytes + beside + chain.crossing[middle - 1][start])
            time_s += run.time_s
            later = self._shifted(self.again_cost[middle, end], chain.crossing[middle][start], need)
            self._take(best, choice, later + self.again_cost[start, middle - 1] + time_s, _SPLIT + middle)
        self.again_cost[start, end], self.again_choice[start, end] = best, choice

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
