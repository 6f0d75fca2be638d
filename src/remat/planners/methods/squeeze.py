"""Squeezes a schedule into a slightly smaller budget, by exact programmes over a few units where it is over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from remat.planners.methods.exact_units import MOST_OPS, UnitChoice
from remat.planners.replay.improve import without_idle_runs
from remat.planners.replay.replan import confined
from remat.planners.replay.units import Occupancy
from remat.planners.search import Search

_TRIES: Final = 200
_TRIES_IN_VAIN: Final = 40
"""Draws at most, and how many in a row may bring nothing. Of 72 budgets of six steps, each 3 % below the one before,
from 1.5 times the smallest on, 54 were reached, with 12 draws in the mean and 46 at most."""
_APART: Final = 4
"""Places within the budget that end a stretch. A judgement: what is over it with fewer between is one heap of bytes."""


def squeeze(search: Search, runs: Sequence[int]) -> None:
    """Offer what becomes of a schedule that takes somewhat more than the budget, if it comes within.

    Of the stretches that are over the budget one is drawn, half of the time the heaviest, and of what is in memory
    there some units: all of their repeated runs are planned again so that the stretch comes within, at the least extra
    time (:func:`remat.planners.replay.replan.confined`). What brings the bytes over the budget down, summed over all
    runs, is gone on from. Complexity: at most 200 draws of O(places k^2 2^k) for k = 9 units.

    Args:
        search: what is offered to.
        runs: the schedule.
    """
    problem, budget_bytes = search.problem, search.budget_bytes
    if problem.count > MOST_OPS:
        return
    choice = UnitChoice(problem)
    now = Occupancy(problem, runs)
    tries = in_vain = 0
    while choice.units and (over := np.maximum(0, now.bytes - budget_bytes)).any():
        if tries == _TRIES or in_vain == _TRIES_IN_VAIN or search.expired:
            return
        tries += 1
        in_vain += 1
        place = choice.one_of(np.flatnonzero(over).tolist()) if tries % 2 else int(over.argmax())
        units = choice.near(now, place)
        squeezed = confined(now, units, budget_bytes, _stretch(over > 0, place)) if units else None
        if squeezed is not None:
            found = Occupancy(problem, without_idle_runs(problem, squeezed))
            if np.maximum(0, found.bytes - budget_bytes).sum() < over.sum():
                now, in_vain = found, 0
    search.offer(now.runs)


def _stretch(is_over: np.ndarray[tuple[int], np.dtype[np.bool_]], place: int) -> slice:
    """The places around one that are over the budget, with few between them that are not."""
    start = end = place
    while start > 0 and is_over[max(0, start - _APART) : start].any():
        start -= 1
    while end < len(is_over) - 1 and is_over[end + 1 : end + 1 + _APART].any():
        end += 1
    return slice(start, end + 1)
