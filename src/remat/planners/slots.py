"""A schedule that can be edited run by run, with the bytes of every step kept up to date.

Runs stand in *slots*, of which there are several for each run, so that a run can be put between two others
without moving them. A change touches only the lives of the storages that the run reads or makes: each is one
addition to a range of a numpy array. What may be edited is a board's: see :mod:`remat.planners.board`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from typing import Final

import numpy as np

from remat.planners.board import Board, expand

SPACING: Final = 6
"""Slots for each run of a fresh ``Slots``."""

_END: Final = 1 << 60


class Slots:
    """One schedule on a board, open to edits.

    Attributes:
        bytes: bytes of each slot; of an empty one, those that lie idle across it.
        op_at: the op that runs in each slot, -1 for none.
        runs: for each op, the slots in which it runs, rising.
        extra_s: seconds of all runs but the first ones.
        repeats: the slots of all runs but the first ones, in no order.
        low: the lowest slot whose bytes changed since ``mark``.
        high: one above the highest.
    """

    def __init__(self, board: Board, schedule: Sequence[int], spacing: int = SPACING) -> None:
        self.board = board
        self._lent = board.lent
        runs = [op for op in schedule if board.counts[op]]
        seen = [False] * board.problem.count
        kept = []
        for op in runs:
            if not seen[op] or board.repeatable[op]:
                kept.append(op)
            seen[op] = True
        self.size = len(kept) * spacing + spacing
        self.bytes = np.zeros(self.size, dtype=np.int64)
        self.op_at = [-1] * self.size
        self.runs: list[list[int]] = [[] for _ in range(board.problem.count)]
        count = len(board.problem.graph.tensors)
        self.births: list[list[int]] = [[] for _ in range(count)]
        self.reads: list[list[int]] = [[] for _ in range(count)]
        self.extra_s = 0.0
        self.repeats: list[int] = []
        self._repeat_place: dict[int, int] = {}
        self.low, self.high = self.size, 0
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
        change = np.zeros(self.size + 2, dtype=np.int64)
        for s in problem.storages:
            births, size = self.births[s], problem.size[s]
            for i, birth in enumerate(births):
                stop = births[i + 1] if i + 1 < len(births) else _END
                last, is_read = self._last(s, birth, stop)
                change[birth] += size
                change[last + 1] -= size
                if is_read:
                    credit = self._credit(last, s)
                    change[last] -= credit
                    change[last + 1] += credit
        self.bytes = np.cumsum(change)[: self.size]
        # A slot before a run has what is left out there, and what lay beside the run before it.
        base = np.full(self.size, -1, dtype=np.int64)
        for op, slots in enumerate(self.runs):
            if slots:
                base[slots[0]] = board.base_bytes[op]
        places = np.flatnonzero(base >= 0)
        if len(places):
            of_next = base[places[np.minimum(np.searchsorted(places, np.arange(self.size)), len(places) - 1)]]
            index = np.searchsorted(places, np.arange(self.size), side="right") - 1
            self.bytes += np.maximum(of_next, base[places[np.maximum(index, 0)]])
        for slot, op in enumerate(self.op_at):
            if op >= 0:
                self.bytes[slot] += problem.graph.ops[op].workspace_bytes

    def _last(self, s: int, birth: int, stop: int) -> tuple[int, bool]:
        """The last slot of an instance's life, one beyond all where it never ends, and whether a read ends it."""
        if stop == _END and self.board.forever[s]:
            return self.size, False
        reads = self.reads[s]
        i = bisect_left(reads, stop) - 1
        # A run that makes a storage anew does not read it.
        return (reads[i], True) if i >= 0 and reads[i] > birth else (birth, False)

    def _credit(self, slot: int, s: int) -> int:
        lent = self._lent[self.op_at[slot]]
        return lent.get(s, 0) if lent else 0

    def mark(self) -> None:
        """Begin a new edit: ``undo`` goes back to here."""
        self.journal.clear()
        self.low, self.high = self.size, 0

    def undo(self) -> None:
        """Take back everything since ``mark``."""
        journal = self.journal
        steps = list(reversed(journal))
        for slot, op, added in steps:
            if added:
                self.remove(slot)
            else:
                self.insert(slot, op)
        journal.clear()

    def insert(self, slot: int, op: int) -> None:
        """Run an op in an empty slot, after the first births of all that it reads."""
        board = self.board
        self.op_at[slot] = op
        for s in board.reads[op]:
            self._add_read(s, slot)
        for s in board.makes[op]:
            self._add_birth(s, slot)
        workspace = board.problem.graph.ops[op].workspace_bytes
        if workspace:
            self._add(slot, slot + 1, workspace)
        if self.runs[op]:
            self.extra_s += board.repeat_time_s[op]
            self._note_repeat(max(slot, self.runs[op][0]))
        insort(self.runs[op], slot)
        self.journal.append((slot, op, True))

    def remove(self, slot: int) -> None:
        """Empty a slot; its readers then bind to the instance before."""
        board = self.board
        op = self.op_at[slot]
        for s in board.makes[op]:
            self._take_birth(s, slot)
        for s in board.reads[op]:
            self._take_read(s, slot)
        workspace = board.problem.graph.ops[op].workspace_bytes
        if workspace:
            self._add(slot, slot + 1, -workspace)
        self.runs[op].remove(slot)
        if self.runs[op]:
            self.extra_s -= board.repeat_time_s[op]
            # Where the first run went, the second one is the first now.
            self._forget_repeat(max(slot, self.runs[op][0]))
        self.op_at[slot] = -1
        self.journal.append((slot, op, False))

    def _add(self, start: int, stop: int, amount: int) -> None:
        if start < stop:
            self.bytes[start:stop] += amount
            if start < self.low:
                self.low = start
            if stop > self.high:
                self.high = stop

    def _move_end(self, s: int, old: int, old_is_read: bool, new: int, new_is_read: bool) -> None:
        size = self.board.problem.size[s]
        if new > old:
            self._add(old + 1, new + 1, size)
        else:
            self._add(new + 1, old + 1, -size)
        if old_is_read and (credit := self._credit(old, s)):
            self._add(old, old + 1, credit)
        if new_is_read and (credit := self._credit(new, s)):
            self._add(new, new + 1, -credit)

    def _add_read(self, s: int, slot: int) -> None:
        births, reads = self.births[s], self.reads[s]
        i, j = bisect_left(births, slot), bisect_left(reads, slot)
        stop = births[i] if i < len(births) else _END
        reads.insert(j, slot)
        if (j + 1 < len(reads) and reads[j + 1] < stop) or (stop == _END and self.board.forever[s]):
            return
        birth = births[i - 1]
        is_read = j > 0 and reads[j - 1] > birth
        self._move_end(s, reads[j - 1] if is_read else birth, is_read, slot, True)

    def _take_read(self, s: int, slot: int) -> None:
        births, reads = self.births[s], self.reads[s]
        i, j = bisect_left(births, slot), bisect_left(reads, slot)
        stop = births[i] if i < len(births) else _END
        del reads[j]
        if (j < len(reads) and reads[j] < stop) or (stop == _END and self.board.forever[s]):
            return
        birth = births[i - 1]
        is_read = j > 0 and reads[j - 1] > birth
        self._move_end(s, slot, True, reads[j - 1] if is_read else birth, is_read)

    def _add_birth(self, s: int, slot: int) -> None:
        births = self.births[s]
        i = bisect_left(births, slot)
        stop = births[i] if i < len(births) else _END
        size = self.board.problem.size[s]
        if i == 0:
            births.insert(0, slot)
            last, is_read = self._last(s, slot, stop)
            self._add(slot, last + 1, size)
            if is_read and (credit := self._credit(last, s)):
                self._add(last, last + 1, -credit)
            return
        before = births[i - 1]
        last, _ = self._last(s, before, stop)
        births.insert(i, slot)
        if last < slot:
            self._add(slot, slot + 1, size)
            return
        cut, is_read = self._last(s, before, slot)
        self._add(cut + 1, slot, -size)
        if is_read and (credit := self._credit(cut, s)):
            self._add(cut, cut + 1, -credit)

    def _take_birth(self, s: int, slot: int) -> None:
        births = self.births[s]
        i = bisect_left(births, slot)
        stop = births[i + 1] if i + 1 < len(births) else _END
        size = self.board.problem.size[s]
        last, last_is_read = self._last(s, slot, stop)
        if i == 0:
            del births[0]
            self._add(slot, last + 1, -size)
            if last_is_read and (credit := self._credit(last, s)):
                self._add(last, last + 1, credit)
            return
        before = births[i - 1]
        cut, is_read = self._last(s, before, slot)
        del births[i]
        if last == slot:
            self._add(slot, slot + 1, -size)
            return
        self._add(cut + 1, slot, size)
        if is_read and (credit := self._credit(cut, s)):
            self._add(cut, cut + 1, credit)

    def is_read(self, slot: int) -> bool:
        """Whether anything that the run in a slot makes is read, or wanted at the end."""
        for s in self.board.makes[self.op_at[slot]]:
            births, reads = self.births[s], self.reads[s]
            i = bisect_right(births, slot)
            stop = births[i] if i < len(births) else _END
            if stop == _END and self.board.forever[s]:
                return True
            j = bisect_right(reads, slot)
            if j < len(reads) and reads[j] <= stop:
                return True
        return False

    def idle_across(self, s: int, slot: int) -> tuple[int, int]:
        """The uses of a storage between which it lies idle across a slot; (-1, -1) where it does not."""
        births, reads = self.births[s], self.reads[s]
        j = bisect_right(reads, slot)
        if j == len(reads):
            return -1, -1
        i = bisect_left(births, slot)
        if i == 0 or (i < len(births) and births[i] < reads[j]):
            return -1, -1
        before = births[i - 1]
        if j and reads[j - 1] > before:
            before = reads[j - 1]
        return (before, reads[j]) if before < slot < reads[j] else (-1, -1)

    def free_before(self, slot: int, reach: int = 12) -> int:
        """The next empty slot below, -1 if none is near."""
        op_at = self.op_at
        for candidate in range(slot - 1, max(-1, slot - 1 - reach), -1):
            if op_at[candidate] < 0:
                return candidate
        return -1

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
