"""The walk of simulated annealing: which edits of a schedule are made, and which of them stay."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from remat.planners.view.board import Board
from remat.planners.walk.edits import Edits
from remat.planners.walk.slots import Slots

# Judgements, not measured, unless it says otherwise.
_ADAPT_EVERY: Final = 100
"""Edits after which the price of a byte over the budget is adapted. Fewer, and it follows chance."""
_CHECK_TIME_EVERY: Final = 64
"""Edits, of about 0.1 ms each, between two looks at the clock; the temperature changes as often."""
_CHEAPEST: Final = 1e-4
_DEAREST: Final = 1e4
"""Limits of that price, so that it comes back soon from a stretch in which every edit fits, or none."""
_HOPELESS: Final = 12.0
"""Temperatures by which an edit may be worse and still be finished; it would be accepted once in exp(12) = 160,000."""
_MOST_LOST: Final = 40
"""Edits that found no empty slot, after which the runs are spread anew. More: edits are lost; fewer: time is."""
_LOOKS: Final = ((3, 0.1),)
"""A walk that may give up does so where, after one part in so many of its edits, the bytes over the budget were never
less than this; as a share of the budget, summed over positions, and per op that may move. On six steps of JAX's zoo,
walks that found a schedule had come below .01 by then, or found it; most of those in vain were above .15."""
_REPAIRS: Final = 2
_MOST_REPAIRS: Final = 16
"""Slots over the budget that are relieved after a repeated run was dropped, and how many in a bold walk. What is kept
again then crosses many tight steps, each of which must give up something else. On a U-Net at 25 % of its peak four
walks of 60,000 edits came to +34.7 to 35.7 % with 2, and to 30.0 to 32.5 with 16 and ``_BOLD``, in 9 and 11 s."""
_CALM: Final = (0.6, 0.75, 0.75, 0.9)
_BOLD: Final = (0.3, 0.45, 0.6, 0.75)
"""Which edits are drawn. Within the budget: drop a run up to the first number, move one up to the second, else drop one
and repair the bytes. Over it: relieve a slot up to the third, move a run up to the last, else drop one and repair."""
_LEAST_LOWERED: Final = 0.99
"""The share of the smallest excess so far below which a new one counts as progress."""
_LATE_FROM: Final = 0.05
"""By how much of the whole the clock may be ahead of the edits before cooling follows the clock. Smaller, and a walk
that would end in time cools faster than it has to, and differently from run to run."""


class Walk(Edits):
    """One walk through schedules. Every state is legal; bytes above the budget are priced, not forbidden.

    The price of a byte over the budget rises while the walk is over it and falls while it is within, so that
    the walk stays near the edge. With ``first_fit`` it ends at the first schedule that fits. Source of the idea:
    simulated annealing (Kirkpatrick et al. 1983, doi:10.1126/science.220.4598.671) with strategic oscillation
    (Glover 1989, doi:10.1287/ijoc.1.3.190). A heuristic without guarantee; one step is O(1) range additions in numpy.

    With ``patience`` it gives up where nothing fits yet: where the bytes over the budget have not sunk for so many
    edits, or are far too many at one of its ``looks``, after a third of the edits say. A ``bold`` walk more often takes
    out repeated runs and makes up for the bytes at many places at once, as tight budgets need it.

    Attributes:
        best: the cheapest order of runs seen that fits, None for none; see ``Slots.order``.
        best_s: its extra seconds.
        is_hopeless: did it give up far above the budget?
    """

    def __init__(
        self,
        board: Board,
        schedule: Sequence[int],
        budget_bytes: int,
        seed: int,
        *,
        first_fit: bool = False,
        patience: int | None = None,
        looks: Sequence[tuple[int, float]] = _LOOKS,
        bold: bool = False,
    ) -> None:
        super().__init__(board, budget_bytes, seed, most_repairs=_MOST_REPAIRS if bold else _REPAIRS)
        self._mix = _BOLD if bold else _CALM
        self.first_fit = first_fit
        self.patience = patience
        self._looks = tuple(looks)
        self.is_hopeless = False
        self._least = math.inf  # The smallest excess so far.
        self._lowered_at = 0  # The edit that brought it.
        self.best: list[int] | None = None
        self.best_s = math.inf
        self.plain_s = max(board.problem.graph.time_s, 1e-300)
        self.price = 1.0
        self._start(schedule)

    def _start(self, schedule: Sequence[int]) -> None:
        self.slots = Slots(self.board, schedule)
        self.over = np.maximum(self.slots.bytes - self.budget, 0)
        self.over_sum = int(self.over.sum())
        self.edited()
        self._scale = 1.0 / (max(self.budget, 1) * (self.slots.size / max(1, len(self.movable))))
        self._note_best()

    def _note_best(self) -> None:
        if not self.over_sum and self.slots.extra_s < self.best_s - 1e-12 * self.plain_s:
            self.best_s = self.slots.extra_s
            self.best = self.slots.order()

    def run(self, steps: int, hot: float, cold: float, deadline_s: float | None) -> int:
        """Walk while cooling; where the time will not suffice for all steps, cool faster.

        Args:
            steps: edits to try.
            hot: first temperature, as a share of the plain step's time.
            cold: last temperature.
            deadline_s: ``time.monotonic()`` at which to stop; None for no end.

        Returns:
            The edits tried.
        """
        cooling = math.log(cold / hot)
        far_at = {steps // part: far for part, far in self._looks}
        begun_s = time.monotonic()
        over = 0
        for step in range(steps):
            if step % _CHECK_TIME_EVERY == 0:
                progress = step / steps
                if deadline_s is not None:
                    now_s = time.monotonic()
                    if now_s >= deadline_s:
                        return step
                    # The last temperature is reached when the edits or the time run out, whichever is first.
                    spent = (now_s - begun_s) / (deadline_s - begun_s)
                    progress = max(progress, spent) if spent > progress + _LATE_FROM else progress
                temperature = hot * math.exp(cooling * progress)
            over += self.over_sum > 0
            if step % _ADAPT_EVERY == _ADAPT_EVERY - 1:
                factor = 1.15 if over > 0.6 * _ADAPT_EVERY else 0.87 if over < 0.3 * _ADAPT_EVERY else 1.0
                self.price = min(_DEAREST, max(_CHEAPEST, self.price * factor))
                over = 0
            if self.lost > _MOST_LOST:
                self._respread()
            if not self.over_sum and (self.first_fit or not self.slots.repeats):
                return step
            if self.patience is not None and self.best is None and self._gives_up(step, far_at, self.patience):
                return step
            self._step(temperature)
        return steps

    def _gives_up(self, step: int, far_at: Mapping[int, float], patience: int) -> bool:
        excess = self.over_sum * self._scale
        if excess < _LEAST_LOWERED * self._least:
            self._least, self._lowered_at = excess, step
        if self._least > far_at.get(step, math.inf):
            self.is_hopeless = True
        return self.is_hopeless or step - self._lowered_at > patience

    def _respread(self) -> None:
        self.lost = 0
        self._start(self.slots.order())

    def _step(self, temperature: float) -> None:
        slots, rng = self.slots, self.rng
        slots.mark()
        before_s = slots.extra_s
        # An edit that costs more than this is nearly certain to be refused, so it need not be finished.
        worst = _HOPELESS * temperature + self.price * self._scale * self.over_sum
        self.limit_s = before_s + worst * self.plain_s
        draw = rng.random()
        drop, move, relieve, move_over = self._mix
        if self.board.whole and draw < 0.3:
            made = self.move_first()
        elif self.board.whole and draw < 0.4:
            made = self.move_group(self.hot_slot() if self.over_sum else rng.randrange(slots.size))
        elif self.over_sum:
            if draw < relieve or not slots.repeats:
                made = self.relieve(self.hot_slot())
            elif draw < move_over:
                made = self.move_repeat()
            else:
                made = self.drop_repeat() and self.repair()
        elif draw < drop:
            made = self.drop_repeat()
        elif draw < move:
            made = self.move_repeat()
        else:
            made = self.drop_repeat() and self.repair()
        if not made:
            slots.undo()
            return
        counted = slots.bytes
        low, high = slots.low, slots.high
        if low < high:
            now = np.maximum(counted[low:high] - self.budget, 0)
            change = int(now.sum()) - int(self.over[low:high].sum())
        else:
            change = 0
        worse = (slots.extra_s - before_s) / self.plain_s + self.price * self._scale * change
        if worse > 0 and rng.random() >= math.exp(-worse / temperature):
            slots.undo()
            return
        self.edited()
        if low < high:
            self.over[low:high] = now
            self.over_sum += change
        if not self.over_sum:
            self._note_best()
