"""The edits of a walk: over the order of first runs, and over what is computed again where."""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

import numpy as np

from remat.planners.view.board import Board
from remat.planners.view.problem import IntArray
from remat.planners.walk.slots import Slots

# Judgements, not measured, all three. Smaller: more edits fail, quickly. Larger: each edit takes longer, and one that
# changes so much is nearly always refused.
_TRIES: Final = 24
"""Storages drawn in search of one that lies idle across a slot, before the edit is given up."""
_DEEPEST: Final = 12
"""How many levels of ancestors one edit computes again at most."""
_LARGEST_GROUP: Final = 8
"""Ops that move together at most."""
_MOST_REMEMBERED: Final = 256
"""Slots for which the readers behind them are remembered; more would take memory on large steps, and save no time."""
_UNKNOWN: Final = -2


class Edits:
    """Random edits of one schedule. Each returns whether it could be made; where not, the caller undoes what was begun.

    Attributes:
        slots: the schedule.
        over: for each slot, the bytes over the budget before the edit.
        limit_s: extra seconds beyond which an edit need not be finished.
        lost: counts edits that found no empty slot where they needed one.
        most_repairs: how many slots ``repair`` relieves at most.
    """

    slots: Slots
    over: IntArray

    def __init__(self, board: Board, budget_bytes: int, seed: int, most_repairs: int = 2) -> None:
        self.board = board
        self.budget = budget_bytes
        self.rng = random.Random(seed)
        problem = board.problem
        self.movable = [op for op in range(problem.count) if board.counts[op]]
        self.candidates = [
            s
            for s in problem.storages
            if board.takes_part[s] and board.repeatable[problem.made_by[s]] and problem.size[s]
        ]
        self.limit_s = math.inf
        self.lost = 0
        self.most_repairs = most_repairs
        self._hot: list[int] | None = None
        self._readers: dict[int, list[int]] = {}

    def edited(self) -> None:
        """The schedule is another one: what was found out about the one before is forgotten."""
        self._hot = None
        self._readers.clear()

    def hot_slot(self) -> int:
        """Any slot over the budget."""
        if self._hot is None:
            self._hot = np.flatnonzero(self.over).tolist()
        return self._hot[self.rng.randrange(len(self._hot))]

    def move_first(self) -> bool:
        """Move the first run of an op within its window."""
        slots, rng = self.slots, self.rng
        op = self.movable[rng.randrange(len(self.movable))]
        low, high = slots.window(op)
        old = slots.runs[op][0]
        draw = rng.random()
        if draw < 0.35:
            wanted = rng.randrange(low + 1, high)
        elif draw < 0.6:
            wanted = high - 1
        elif draw < 0.85:
            wanted = low + 1
        else:
            wanted = min(high - 1, max(low + 1, old + rng.randint(-24, 24)))
        new = self._empty_near(wanted, low, high)
        if new < 0 or new == old:
            return False
        slots.remove(old)
        slots.insert(new, op)
        return True

    def move_group(self, hot: int) -> bool:
        """Move the reader of a storage that lies idle across a slot to before it, or its maker to after it.

        The first runs between move along: those that the reader needs, or those that need the maker.
        """
        slots, rng, board = self.slots, self.rng, self.board
        s = self._idle_storage(hot)
        if s < 0:
            return False
        made_by = board.problem.made_by
        pull = rng.random() < 0.5
        if pull:
            _, reader = slots.idle_across(s, hot)
            start = slots.op_at[reader]
            if slots.runs[start][0] != reader:
                return False
        else:
            start = made_by[s]
            if slots.runs[start][0] > hot:
                return False
        group, pending = {start}, [start]
        while pending:
            op = pending.pop()
            if len(slots.runs[op]) > 1 and slots.runs[op][1] < hot:
                return False
            if pull:
                near = [*(made_by[u] for u in board.reads[op]), *board.before[op]]
            else:
                near = [*(r for u in board.makes[op] for r in board.problem.consumers[u]), *board.behind[op]]
            for other in near:
                if other not in group and (slots.runs[other][0] > hot) == pull:
                    group.add(other)
                    pending.append(other)
                    if len(group) > _LARGEST_GROUP:
                        return False
        olds = sorted(slots.runs[op][0] for op in group)
        ops = [slots.op_at[slot] for slot in olds]
        news = slots.empty_slots(hot, len(ops), pull)
        if len(news) < len(ops):
            self.lost += 1
            return False
        if not self._reads_stay_bound(ops, news, pull):
            return False
        for old, new, op in (
            zip(olds, news, ops, strict=True)
            if pull
            else zip(reversed(olds), reversed(news), reversed(ops), strict=True)
        ):
            slots.remove(old)
            slots.insert(new, op)
        return True

    def _reads_stay_bound(self, ops: Sequence[int], news: Sequence[int], pull: bool) -> bool:
        """Whether every run still has what it reads, repeated runs included, once the ops stand in their new slots."""
        slots, board = self.slots, self.board
        place, made_by = dict(zip(ops, news, strict=True)), board.problem.made_by
        for op, new in place.items():
            if len(slots.runs[op]) > 1 and slots.runs[op][1] <= new:
                return False
            if pull:
                if any(place.get(made_by[u], slots.births[u][0]) >= new for u in board.reads[op]):
                    return False
                if any(place.get(o, slots.runs[o][0]) >= new for o in board.before[op]):
                    return False
                continue
            olds = slots.runs[op][0]
            for u in board.makes[op]:
                for read in slots.reads[u]:
                    if read > new:
                        break
                    reader = slots.op_at[read]
                    if reader not in place or slots.runs[reader][0] != read or read < olds:
                        return False
            if any(place.get(o, slots.runs[o][0]) <= new for o in board.behind[op]):
                return False
        return True

    def _idle_storage(self, hot: int) -> int:
        """Any storage that lies idle across a slot, -1 if none was met."""
        storages = self.board.problem.storages
        for _ in range(_TRIES):
            s = storages[self.rng.randrange(len(storages))]
            if self.board.takes_part[s] and self.slots.idle_across(s, hot)[0] >= 0:
                return s
        return -1

    def _empty_near(self, wanted: int, low: int, high: int) -> int:
        op_at = self.slots.op_at
        for distance in range(12):
            if low < wanted - distance < high and op_at[wanted - distance] < 0:
                return wanted - distance
            if low < wanted + distance < high and op_at[wanted + distance] < 0:
                return wanted + distance
        self.lost += 1
        return -1

    def move_repeat(self) -> bool:
        """Move a repeated run to just before one of the reads around it."""
        slots, rng = self.slots, self.rng
        old = slots.repeats[rng.randrange(len(slots.repeats))]
        op = slots.op_at[old]
        made = self.board.makes[op]
        s = made[rng.randrange(len(made))]
        reads = slots.reads[s]
        if not reads:
            return False
        nearby = rng.random() < 0.3
        wanted = old + rng.randint(-24, 24) if nearby else reads[rng.randrange(len(reads))] - 1
        first = slots.runs[op][0]
        if wanted <= first or wanted >= slots.size:
            return False
        new = self._empty_near(wanted, first, slots.size)
        if new < 0:
            return False
        slots.remove(old)
        slots.insert(new, op)
        self._drop_unread()
        return True

    def drop_repeat(self) -> bool:
        """Take out a repeated run and those that only it read."""
        slots = self.slots
        slot = slots.repeats[self.rng.randrange(len(slots.repeats))]
        op = slots.op_at[slot]
        if self.board.whole and self._first_is_idle(op) and self.rng.random() < 0.5:
            slot = slots.runs[op][0]
        slots.remove(slot)
        self._drop_unread_makers(op, slot)
        return True

    def _first_is_idle(self, op: int) -> bool:
        """Whether the second run of an op could be its first one."""
        slots, board = self.slots, self.board
        second = slots.runs[op][1]
        return all(not slots.reads[s] or slots.reads[s][0] > second for s in board.makes[op]) and all(
            slots.runs[other][0] > second for other in board.behind[op]
        )

    def _drop_unread_makers(self, op: int, slot: int) -> None:
        """Take out the repeated runs that nothing reads once a run of ``op`` in a slot is gone."""
        slots, board = self.slots, self.board
        pending = [(op, slot)]
        while pending:
            op, slot = pending.pop()
            for s in board.reads[op]:
                births = slots.births[s]
                index = bisect_left(births, slot) - 1 if len(births) > 1 else 0
                if index > 0:
                    birth = births[index]
                    maker = slots.op_at[birth]
                    if not slots.is_read(birth):
                        slots.remove(birth)
                        pending.append((maker, birth))

    def _drop_unread(self) -> None:
        """After a move: repeated runs of the last edits that nothing reads any more go."""
        slots = self.slots
        for slot, _, _ in list(slots.journal):
            op = slots.op_at[slot]
            if op >= 0 and slots.runs[op][0] != slot and not slots.is_read(slot):
                slots.remove(slot)
                self._drop_unread_makers(op, slot)

    def repair(self) -> bool:
        """Relieve the highest slot of the edit so far where it is over the budget, then the next one."""
        slots = self.slots
        for _ in range(self.most_repairs):
            counted = slots.bytes
            low, high = slots.low, min(slots.high, slots.size)
            if low >= high:
                return True
            top = low + int(np.argmax(counted[low:high]))
            if counted[top] <= self.budget:
                return True
            if not self.relieve(top):
                return False
        return True

    def relieve(self, hot: int) -> bool:
        """Recompute a storage after a slot across which it lies idle, instead of keeping it."""
        slots, rng, candidates = self.slots, self.rng, self.candidates
        if not candidates:
            return False
        best, best_score, reader, found = -1, math.inf, -1, 0
        size, made_by = self.board.problem.size, self.board.problem.made_by
        draw, count = rng.random, len(candidates)
        births, reads = slots.births, slots.reads
        readers = self._readers_behind(hot)
        for _ in range(_TRIES):
            number = int(draw() * count)
            behind = readers[number]
            if behind == _UNKNOWN:
                s = candidates[number]
                # Most are soon seen not to live here.
                is_away = not reads[s] or reads[s][-1] <= hot or births[s][0] >= hot
                behind = readers[number] = -1 if is_away else slots.idle_across(s, hot)[1]
            if behind < 0:
                continue
            s = candidates[number]
            score = self.board.repeat_time_s[made_by[s]] / size[s] * (0.2 + draw())
            if score < best_score:
                best, best_score, reader = s, score, behind
            found += 1
            if found >= 3:
                break
        if best < 0:
            return False
        depth = _DEEPEST if rng.random() < (0.1 if self.board.whole else 0.4) else rng.randint(0, 3)
        return self._make_again(best, reader, hot, depth)

    def _readers_behind(self, hot: int) -> list[int]:
        """For each candidate the slot of its next reader where it lies idle across a slot, -1 where not, or unknown.

        Most edits are taken back, so that many begin at the same schedule: there it is remembered.
        """
        if self.slots.journal:
            return [_UNKNOWN] * len(self.candidates)
        readers = self._readers.get(hot)
        if readers is None:
            if len(self._readers) >= _MOST_REMEMBERED:
                self._readers.clear()
            readers = self._readers[hot] = [_UNKNOWN] * len(self.candidates)
        return readers

    def _make_again(self, s: int, reader: int, hot: int, depth: int) -> bool:
        slots, board = self.slots, self.board
        op = board.problem.made_by[s]
        place = slots.free_before(reader)
        if place < 0:
            self.lost += 4
            return False
        if place <= hot:
            return False
        if slots.extra_s + board.repeat_time_s[op] > self.limit_s:
            return False
        slots.insert(place, op)
        if depth == 0:
            return True
        for u in board.reads[op]:
            # Kept across the hot slot for this run alone, or for others too.
            if not board.repeatable[board.problem.made_by[u]] or slots.idle_across(u, hot)[1] != place:
                continue
            if not self._make_again(u, place, hot, depth - 1):
                return False
        return True
