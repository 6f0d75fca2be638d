"""A schedule that can be edited run by run, with the bytes of every step kept up to date.

Runs stand in *slots*, of which there are several for each run, so that a run can be put between two others
without moving them. A change touches only the lives of the storages that the run reads or makes: see
:mod:`remat.planners.walk.lives`. What may be edited is a board's: see :mod:`remat.planners.view.board`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Final

import numpy as np

from remat.planners.view.board import Board, expand
from remat.planners.walk.lives import Lives

SPACING: Final = 6
"""Slots for each run of a fresh ``Slots``; a judgement. Fewer, and edits soon find no empty slot near, so that the runs
are spread anew more often; more, and each change of a range of bytes takes longer."""


class Slots(Lives):
    """One schedule on a board, open to edits.

    Attributes:
        runs: for each op, the slots in which it runs, rising.
        extra_s: seconds of all runs but the first ones.
        repeats: the slots of all runs but the first ones, in no order.
    """

    def __init__(self, board: Board, schedule: Sequence[int], spacing: int = SPACING) -> None:
        runs = [op for op in schedule if board.counts[op]]
        seen = [False] * board.problem.count
        kept = []
        for op in runs:
            if not seen[op] or board.repeatable[op]:
                kept.append(op)
            seen[op] = True
        super().__init__(board, len(kept) * spacing + spacing)
        self.runs: list[list[int]] = [[] for _ in range(board.problem.count)]
        self.extra_s = 0.0
        self.repeats: list[int] = []
        self._repeat_place: dict[int, int] = {}
        self.journal: list[tuple[int, int, bool]] = []
        for place, op in enumerate(kept):
            self._place(place * spacing + spacing // 2, op)
        self._count_all()

    def _place(self, slot: int, op: int) -> None:
        board = self.board
        self.op_at[slot] = op
        if self.runs[op]:
            self.extra_s += board.repeat_time_s[op]
            self._note_repeat(slot)
        self.runs[op].append(slot)
        for s in board.reads[op]:
            self.reads[s].append(slot)
        for s in board.makes[op]:
            self.births[s].append(slot)

    def _forget_repeat(self, slot: int) -> None:
        place = self._repeat_place.pop(slot)
        last = self.repeats.pop()
        if last != slot:
            self.repeats[place] = last
            self._repeat_place[last] = place

    def _note_repeat(self, slot: int) -> None:
        self._repeat_place[slot] = len(self.repeats)
        self.repeats.append(slot)

    def _count_all(self) -> None:
        board, problem = self.board, self.board.problem
        self.count_lives()
        # A slot before a run has what is left out there, and what lay beside the run before it.
        base = np.full(self.size, -1, dtype=np.int64)
        for op, slots in enumerate(self.runs):
            if slots:
                base[slots[0]] = board.base_bytes[op]
        is_first = base >= 0
        places = np.flatnonzero(is_first)
        if len(places):
            upto = np.cumsum(is_first)  # First runs up to a slot, itself counted.
            of_next = base[places[np.minimum(upto - is_first, len(places) - 1)]]
            index = upto - 1
            self._bytes += np.maximum(of_next, base[places[np.maximum(index, 0)]])
        for slot, op in enumerate(self.op_at):
            if op >= 0:
                self._bytes[slot] += problem.graph.ops[op].workspace_bytes

    def mark(self) -> None:
        """Begin a new edit: ``undo`` goes back to here."""
        super().mark()
        self.journal.clear()

    def undo(self) -> None:
        """Take back everything since ``mark``."""
        self.take_back()
        for slot, op, added in reversed(self.journal):
            if added:
                self._forget(slot, op)
            else:
                self._restore(slot, op)
        self.journal.clear()

    def _forget(self, slot: int, op: int) -> None:
        """Empty a slot whose bytes are already those without it."""
        for s in self.board.makes[op]:
            births = self.births[s]
            del births[bisect_left(births, slot)]
        for s in self.board.reads[op]:
            reads = self.reads[s]
            del reads[bisect_left(reads, slot)]
        self._end_run(slot, op)

    def _restore(self, slot: int, op: int) -> None:
        """Fill a slot whose bytes are already those with it."""
        for s in self.board.reads[op]:
            insort(self.reads[s], slot)
        for s in self.board.makes[op]:
            insort(self.births[s], slot)
        self._begin_run(slot, op)

    def _begin_run(self, slot: int, op: int) -> None:
        self.op_at[slot] = op
        if self.runs[op]:
            self.extra_s += self.board.repeat_time_s[op]
            # Where it stands before the first run, that one is now a repeated one.
            self._note_repeat(max(slot, self.runs[op][0]))
        insort(self.runs[op], slot)

    def _end_run(self, slot: int, op: int) -> None:
        self.runs[op].remove(slot)
        if self.runs[op]:
            self.extra_s -= self.board.repeat_time_s[op]
            # Where the first run went, the second one is the first now.
            self._forget_repeat(max(slot, self.runs[op][0]))
        self.op_at[slot] = -1

    def insert(self, slot: int, op: int) -> None:
        """Run an op in an empty slot, after the first births of all that it reads."""
        board = self.board
        self.op_at[slot] = op
        for s in board.reads[op]:
            self.add_read(s, slot)
        for s in board.makes[op]:
            self.add_birth(s, slot)
        workspace = board.workspace_bytes[op]
        if workspace:
            self.add(slot, slot + 1, workspace)
        self._begin_run(slot, op)
        self.journal.append((slot, op, True))

    def remove(self, slot: int) -> None:
        """Empty a slot; its readers then bind to the instance before."""
        board = self.board
        op = self.op_at[slot]
        for s in board.makes[op]:
            self.take_birth(s, slot)
        for s in board.reads[op]:
            self.take_read(s, slot)
        workspace = board.workspace_bytes[op]
        if workspace:
            self.add(slot, slot + 1, -workspace)
        self._end_run(slot, op)
        self.journal.append((slot, op, False))

    def free_before(self, slot: int, reach: int = 12) -> int:
        """The next empty slot below, -1 if none is near."""
        op_at = self.op_at
        for candidate in range(slot - 1, max(-1, slot - 1 - reach), -1):
            if op_at[candidate] < 0:
                return candidate
        return -1

    def empty_slots(self, hot: int, count: int, below: bool) -> list[int]:
        """The nearest empty slots below a slot, or above it, rising."""
        op_at = self.op_at
        reach = 10 * count
        below_hot, above_hot = (
            range(hot - 1, max(-1, hot - 1 - reach), -1),
            range(hot + 1, min(len(op_at), hot + 1 + reach)),
        )
        near = below_hot if below else above_hot
        found = [slot for slot in near if op_at[slot] < 0][:count]
        return found[::-1] if below else found

    def window(self, op: int) -> tuple[int, int]:
        """The open range of slots in which an op may first run, the others staying where they are."""
        board, runs, births = self.board, self.runs, self.births
        low, high = -1, self.size
        for s in board.reads[op]:
            low = max(low, births[s][0])
        for other in board.before[op]:
            low = max(low, runs[other][0])
        for s in board.makes[op]:
            if self.reads[s]:
                high = min(high, self.reads[s][0])
        for other in board.behind[op]:
            high = min(high, runs[other][0])
        if len(runs[op]) > 1:
            high = min(high, runs[op][1])
        return low, high

    def order(self) -> list[int]:
        """The ops that count, in the order in which they run."""
        return [op for op in self.op_at if op >= 0]

    def schedule(self) -> tuple[int, ...]:
        """The schedule of the whole graph: with what is left out of the board, and views made again where needed."""
        return expand(self.board, self.order())
