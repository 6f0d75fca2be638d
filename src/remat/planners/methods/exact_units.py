"""Exact units: the repeated runs of a few ops at a time planned again by an exact programme, all others staying."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

from remat.core.simulator import simulate
from remat.planners.replay.improve import without_idle_runs
from remat.planners.replay.replan import replanned
from remat.planners.replay.units import Occupancy, Unit, units_of
from remat.planners.search import Search
from remat.planners.view.problem import Problem

MOST_OPS: Final = 5000
"""A judgement: a reduced BERT-large has 4,366 ops, and a round takes 15 ms there, 4 on steps of 500 to 1,000."""
_ROUNDS: Final = 900
_ROUNDS_IN_VAIN: Final = 450
_FEW_ROUNDS: Final = 100
_FEW_IN_VAIN: Final = 40
_MORE_ROUNDS: Final = 300
_MORE_IN_VAIN: Final = 100
_UNITS: Final = 9
"""Rounds at most, how many in a row may bring nothing, the same of the first few and of some more, and units of each
round. On 26 steps
at tight budgets 900 rounds brought something: on 16 of them the first 100 brought more than half of it, and on 22 no
pause between two gains was longer than 450. With 30 in place of 40 of the few in vain a Whisper ended at 39.3 % in
place of 34.5. With 8, 9 and 11 units a U-Net at 25 % of its peak came to the same figure in the same time; with 14 a
round takes ten times as long, and found nothing more in 40 s."""
_NEAR_A_PLACE: Final = 0.4
"""The share of rounds that look at what is in memory at one place. With all of them a DenseNet121 in 11.1 % of its
peak came from 24.7 to 23.9 % in 300 rounds, with none to 22.9; the U-Net ended lower with half of them."""
_HEAVY: Final = 8
"""The power of its bytes with which a place is drawn; a judgement. Lower, and places with room to spare are drawn."""
_PARTS: Final = (0.3, 0.5, 0.7)
"""Of the units: how many are in memory at that place. The others read these, or are read by them. A judgement."""
_FROM_REPEATED: Final = 0.8
_FROM_DEAR: Final = 0.4
_NOT_REPEATED: Final = 0.5
"""How often connected units begin with one that runs again, half of the time the dearer the likelier, and how often a
unit that does not run again is left out. Judgements."""
_LEAST_S: Final = 1e-12
"""So that units can be drawn where no op takes time."""
_SAME: Final = 1e-12
"""Of the plain step: rounding of sums of seconds."""


def few_exact_units(search: Search) -> Rounds | None:
    """The first rounds of ``exact_units``, which bring most for their seconds; None where there are none.

    Returns:
        What ``exact_units`` may go on with.
    """
    if search.best is None or search.problem.count > MOST_OPS:
        return None
    rounds = Rounds(search)
    rounds.run(_FEW_ROUNDS, _FEW_IN_VAIN)
    return rounds


def more_exact_units(search: Search) -> None:
    """More rounds than the first few, and fewer than ``exact_units``: what a user waits for.

    On plans of searches that are not thorough, for 83 budgets of twenty steps, they won .42 points in the mean in .8 s,
    the first few .20 in .3, all rounds .59 in 3, and a thorough search of its own that a clock ended after 4 s .44.
    """
    if search.best is not None and search.problem.count <= MOST_OPS:
        Rounds(search).run(_MORE_ROUNDS, _MORE_IN_VAIN)


def exact_units(search: Search, begun: Rounds | None = None) -> None:
    """Offer the best schedule with all repeated runs of a few units planned again exactly, round after round.

    Where exact windows plan a stretch of the schedule again, this plans a few storages again over the whole step: when
    each is there, and where it is made again (:mod:`remat.planners.replay.replan`). Units are drawn that are in memory
    at one heavy place, or that read one another. A schedule of the same cost is gone on from, too. Large neighbourhood
    search (Shaw 1998, doi:10.1007/3-540-49481-2_30); nothing is done where no schedule is known that fits. Complexity:
    at most 900 rounds of O(places k^2 2^k) for k = 9 units.

    Args:
        search: what is offered to.
        begun: the first rounds, which this goes on with where nothing cheaper was found since.
    """
    if search.best is None or search.problem.count > MOST_OPS:
        return
    rounds = begun if begun is not None and begun.left_s == search.best_time_s else Rounds(search)
    rounds.run(_ROUNDS, _ROUNDS_IN_VAIN)


class Rounds:
    """Rounds of exact units, from the best schedule of a search on.

    Attributes:
        left_s: seconds of the best schedule after the last round.
    """

    def __init__(self, search: Search) -> None:
        assert search.best is not None, "nothing is known that fits"
        self._search = search
        self._choice = UnitChoice(search.problem)
        self._now = Occupancy(search.problem, search.best)
        self._budget_bytes, self._time_s = search.budget_bytes, search.best_time_s
        self._number = 0
        self._gained = 0  # The last round that brought something.
        self.left_s = search.best_time_s

    def run(self, rounds: int, rounds_in_vain: int) -> None:
        """Go on to so many rounds in all, unless so many in a row bring nothing or the time is used up."""
        while self._choice.units and self._number < rounds and self._number - self._gained < rounds_in_vain:
            if self._search.expired:
                break
            self._run_once()
            self._number += 1
        self.left_s = self._search.best_time_s

    def _run_once(self) -> None:
        search, problem, now = self._search, self._search.problem, self._now
        runs = replanned(now, self._choice.draw(now), self._budget_bytes)
        if runs is None or runs == now.runs:
            return
        bare = without_idle_runs(problem, runs)
        timeline = simulate(problem.graph, bare)
        is_dearer = timeline.time_s > self._time_s + _SAME * problem.graph.time_s
        if timeline.peak_bytes > self._budget_bytes or is_dearer or list(bare) == now.runs:
            return
        if timeline.time_s < search.best_time_s:
            before_s = search.best_time_s
            search.offer(bare)
            if search.best_time_s < before_s:
                self._gained = self._number
            if search.best is not None and search.best_time_s > timeline.time_s:
                # It misses the whole step's budget: go back to what does not, and leave so many bytes free.
                self._now, self._time_s = Occupancy(problem, search.best), search.best_time_s
                self._budget_bytes = max(search.budget_bytes, int(self._now.bytes.max()))
                return
        self._now, self._time_s = Occupancy(problem, bare, timeline), timeline.time_s


class UnitChoice:
    """Draws the units of a round.

    Attributes:
        units: of the step.
    """

    def __init__(self, problem: Problem) -> None:
        self.units = units_of(problem)
        self._rng = random.Random(0)
        self._number = {unit.storage: number for number, unit in enumerate(self.units)}
        self._neighbours: list[list[int]] = [[] for _ in self.units]
        for number, unit in enumerate(self.units):
            for s in unit.reads:
                other = self._number.get(s)
                if other is not None:
                    self._neighbours[number].append(other)
                    self._neighbours[other].append(number)

    def draw(self, now: Occupancy) -> list[Unit]:
        """Some units, in program order."""
        is_near_a_place = self._rng.random() < _NEAR_A_PLACE
        chosen = self._near_a_place(now) if is_near_a_place else self._connected(now)
        return [self.units[number] for number in sorted(chosen)]

    def _near_a_place(self, now: Occupancy) -> list[int]:
        weights = (now.bytes / max(1, int(now.bytes.max()))) ** _HEAVY
        return self._near(now, self._rng.choices(range(len(now.runs)), weights.tolist())[0])

    def one_of(self, places: Sequence[int]) -> int:
        """One of some places."""
        return self._rng.choice(places)

    def near(self, now: Occupancy, place: int) -> list[Unit]:
        """Some units that are in memory at a place, and others that read them or that they read, in program order."""
        return [self.units[number] for number in sorted(self._near(now, place))]

    def _near(self, now: Occupancy, place: int) -> list[int]:
        rng = self._rng
        alive = list(dict.fromkeys(self._number[s] for s in now.alive_at(place) if s in self._number))
        rng.shuffle(alive)
        return self._grown(now, alive[: int(_UNITS * rng.choice(_PARTS))], _UNITS)

    def _connected(self, now: Occupancy) -> list[int]:
        rng = self._rng
        again = [number for number, unit in enumerate(self.units) if len(now.places[unit.ops[-1]]) > 1]
        weights = [_LEAST_S + self.units[number].time_s for number in again]
        parts = rng.choice((1, 2, 3))
        chosen: dict[int, None] = {}
        for _ in range(parts):
            draw = rng.random()
            if again and draw < _FROM_REPEATED:
                start = rng.choices(again, weights if draw < _FROM_DEAR else None)[0]
            else:
                start = rng.randrange(len(self.units))
            chosen |= dict.fromkeys(self._grown(now, [start], _UNITS // parts))
        return list(chosen)

    def _grown(self, now: Occupancy, chosen: list[int], most: int) -> list[int]:
        """The units, and others that they read or that read them, mostly such as run again."""
        rng = self._rng
        front = [other for number in chosen for other in self._neighbours[number]]
        seen = set(chosen)
        while front and len(seen) < most:
            number = front.pop(rng.randrange(len(front)))
            runs_once = len(now.places[self.units[number].ops[-1]]) == 1
            if number in seen or (runs_once and rng.random() < _NOT_REPEATED):
                continue
            seen.add(number)
            front += self._neighbours[number]
        return list(seen)
