"""The lives of storages in a schedule that is open to edits, with the bytes of every slot kept up to date.

A storage lives from each run that makes it to its last reader before it is made anew. Each change of a life is one
addition to a range of a numpy array. These are noted, and made when somebody asks for the bytes: many edits are given
up before anybody does.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Final

import numpy as np

from remat.planners.view.board import Board
from remat.planners.view.problem import IntArray

_END: Final = 1 << 60
"""Above every slot: where the last life of a storage ends."""


class Lives:
    """The lives of the storages of a board.

    Attributes:
        op_at: the op that runs in each slot, -1 for none.
        births: for each storage, the slots in which it is made, rising.
        reads: for each storage, the slots in which it is read, rising.
        low: the lowest slot whose ``bytes``, as they were last asked for, changed since ``mark``.
        high: one above the highest.
    """

    def __init__(self, board: Board, size: int) -> None:
        self.board = board
        self._lent = board.lent
        self._forever = board.problem.forever
        self._size = board.problem.size
        self.size = size
        self._bytes: IntArray = np.zeros(size, dtype=np.int64)
        self.op_at = [-1] * size
        count = len(board.problem.graph.tensors)
        self.births: list[list[int]] = [[] for _ in range(count)]
        self.reads: list[list[int]] = [[] for _ in range(count)]
        self.low, self.high = size, 0
        self._noted: list[tuple[int, int, int]] = []  # First slot, one above the last, bytes to add.
        self._before: list[tuple[int, IntArray]] = []  # First slot and bytes as they were, each time some were added.

    @property
    def bytes(self) -> IntArray:
        """Bytes of each slot; of an empty one, those that lie idle across it."""
        if self._noted:
            self._make_additions()
        return self._bytes

    @bytes.setter
    def bytes(self, counted: IntArray) -> None:
        self._noted.clear()
        self._bytes = counted

    def _make_additions(self) -> None:
        low, high = self.size, 0
        for start, stop, _ in self._noted:
            if start < low:
                low = start
            if stop > high:
                high = stop
        counted = self._bytes
        self._before.append((low, counted[low:high].copy()))
        for start, stop, amount in self._noted:
            part = counted[start:stop]
            part += amount
        self._noted.clear()
        self.low, self.high = min(self.low, low), max(self.high, high)

    def mark(self) -> None:
        """Begin to note changes of bytes: ``take_back`` goes back to here."""
        if self._noted:
            self._make_additions()
        self._before.clear()
        self.low, self.high = self.size, 0

    def take_back(self) -> None:
        """The bytes as they were at ``mark``."""
        self._noted.clear()
        for low, before in reversed(self._before):
            self._bytes[low : low + len(before)] = before
        self._before.clear()

    def count_lives(self) -> None:
        """Work out the bytes of every slot from the births and reads."""
        problem = self.board.problem
        change = [0] * (self.size + 2)
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
        self.bytes = np.cumsum(np.array(change, dtype=np.int64))[: self.size]

    def _last(self, s: int, birth: int, stop: int) -> tuple[int, bool]:
        """The last slot of an instance's life, one beyond all where it never ends, and whether a read ends it."""
        if stop == _END and self._forever[s]:
            return self.size, False
        reads = self.reads[s]
        i = bisect_left(reads, stop) - 1
        # A run that makes a storage anew does not read it.
        return (reads[i], True) if i >= 0 and reads[i] > birth else (birth, False)

    def _credit(self, slot: int, s: int) -> int:
        lent = self._lent[self.op_at[slot]]
        return lent.get(s, 0) if lent else 0

    def add(self, start: int, stop: int, amount: int) -> None:
        """Add bytes to a range of slots."""
        if start < stop:
            self._noted.append((start, stop, amount))

    def _move_end(self, s: int, old: int, old_is_read: bool, new: int, new_is_read: bool) -> None:
        size = self._size[s]
        if new > old:
            self._noted.append((old + 1, new + 1, size))
        else:
            self.add(new + 1, old + 1, -size)
        if old_is_read and (credit := self._credit(old, s)):
            self.add(old, old + 1, credit)
        if new_is_read and (credit := self._credit(new, s)):
            self.add(new, new + 1, -credit)

    def add_read(self, s: int, slot: int) -> None:
        """A storage is read in one slot more, behind its first birth."""
        births, reads = self.births[s], self.reads[s]
        i, j = bisect_left(births, slot), bisect_left(reads, slot)
        reads.insert(j, slot)
        if i == len(births):
            if j + 1 < len(reads) or self._forever[s]:
                return
        elif j + 1 < len(reads) and reads[j + 1] < births[i]:
            return
        end = births[i - 1]
        is_read = j > 0 and reads[j - 1] > end
        if is_read:
            end = reads[j - 1]
        # As ``_move_end``, which a walk would call here more often than anything else.
        self._noted.append((end + 1, slot + 1, self._size[s]))
        lent = self._lent[self.op_at[end]]
        if lent and is_read and (credit := lent.get(s, 0)):
            self._noted.append((end, end + 1, credit))
        lent = self._lent[self.op_at[slot]]
        if lent and (credit := lent.get(s, 0)):
            self._noted.append((slot, slot + 1, -credit))

    def take_read(self, s: int, slot: int) -> None:
        """A storage is no longer read in a slot."""
        births, reads = self.births[s], self.reads[s]
        i, j = bisect_left(births, slot), bisect_left(reads, slot)
        stop = births[i] if i < len(births) else _END
        del reads[j]
        if (j < len(reads) and reads[j] < stop) or (stop == _END and self._forever[s]):
            return
        birth = births[i - 1]
        is_read = j > 0 and reads[j - 1] > birth
        self._move_end(s, slot, True, reads[j - 1] if is_read else birth, is_read)

    def add_birth(self, s: int, slot: int) -> None:
        """A storage is made anew in a slot; the reads behind it are of this life."""
        births = self.births[s]
        i = bisect_left(births, slot)
        stop = births[i] if i < len(births) else _END
        size = self._size[s]
        if i == 0:
            births.insert(0, slot)
            last, is_read = self._last(s, slot, stop)
            self.add(slot, last + 1, size)
            if is_read and (credit := self._credit(last, s)):
                self.add(last, last + 1, -credit)
            return
        before = births[i - 1]
        last, _ = self._last(s, before, stop)
        births.insert(i, slot)
        if last < slot:
            self.add(slot, slot + 1, size)
            return
        cut, is_read = self._last(s, before, slot)
        self.add(cut + 1, slot, -size)
        if is_read and (credit := self._credit(cut, s)):
            self.add(cut, cut + 1, -credit)

    def take_birth(self, s: int, slot: int) -> None:
        """A storage is no longer made in a slot; the reads behind it are of the life before."""
        births = self.births[s]
        i = bisect_left(births, slot)
        stop = births[i + 1] if i + 1 < len(births) else _END
        size = self._size[s]
        last, last_is_read = self._last(s, slot, stop)
        if i == 0:
            del births[0]
            self.add(slot, last + 1, -size)
            if last_is_read and (credit := self._credit(last, s)):
                self.add(last, last + 1, credit)
            return
        before = births[i - 1]
        cut, is_read = self._last(s, before, slot)
        del births[i]
        if last == slot:
            self.add(slot, slot + 1, -size)
            return
        self.add(cut + 1, slot, size)
        if is_read and (credit := self._credit(cut, s)):
            self.add(cut, cut + 1, credit)

    def is_read(self, slot: int) -> bool:
        """Whether anything that the run in a slot makes is read, or wanted at the end."""
        for s in self.board.makes[self.op_at[slot]]:
            births, reads = self.births[s], self.reads[s]
            i = bisect_right(births, slot)
            stop = births[i] if i < len(births) else _END
            if stop == _END and self._forever[s]:
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
