"""All repeated runs of a few units planned again, exactly, while every other run of a schedule stays where it is.

What else is in memory where, and what reads the units' storages, is then known. Which of these storages are there is
the only state: of k units a programme over 2^k states finds the cheapest runs, with the bytes that each run needs
counted as the simulator counts them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from remat.planners.replay.units import Occupancy, Unit
from remat.planners.view.problem import BoolArray, FloatArray, IntArray

_SAME: Final = 1e-12
"""Of the plain step: rounding of sums of seconds."""


def replanned(now: Occupancy, units: Sequence[Unit], budget_bytes: int) -> list[int] | None:
    """The schedule with the cheapest repeated runs of some units; None where they cost more than those that it has.

    First runs and the repeated runs of other ops stay, with all that these keep in memory. A unit may run again before
    each run that reads the storage of one, where one ran again before, and once between two such places, where least
    is in memory. So what the schedule has is mostly among what is looked at, except where it runs a unit's ops apart.

    Args:
        now: the schedule.
        units: at most some twelve of ``units_of`` its problem.
        budget_bytes: peak bytes of the step.

    Complexity: O(places k^2 2^k) for k units, in numpy.
    """
    programme = _Programme(now, units, budget_bytes)
    values = programme.values()
    if values[0][0] > programme.removed_s + _SAME * now.problem.graph.time_s:
        return None
    return programme.runs(values)


def confined(now: Occupancy, units: Sequence[Unit], budget_bytes: int, stretch: slice) -> list[int] | None:
    """The same for a schedule that is over the budget: the cheapest runs that bring a stretch of it within.

    Elsewhere it may stay as far over the budget as it is, and it may cost more.

    Args:
        now: the schedule.
        units: as above.
        budget_bytes: of the stretch.
        stretch: of places.

    Returns:
        None where these units cannot.
    """
    programme = _Programme(now, units, budget_bytes, stretch)
    values = programme.values()
    return programme.runs(values) if math.isfinite(values[0][0]) else None


@dataclass(frozen=True)
class _Point:
    """A part of a schedule, before which units may run again: one run that matters, or some that do not.

    Attributes:
        place: its first run.
        stop: one beyond its last run.
        required: the states' bits of what its run reads.
        made: the unit that first runs in it; -1 for none.
        lends: the units whose storage its run may take over, with the bytes saved.
        is_removed: whether its run is one that is taken out.
    """

    place: int
    stop: int
    required: int = 0
    made: int = -1
    lends: tuple[tuple[int, int], ...] = ()
    is_removed: bool = False


def _halves(count: int) -> tuple[FloatArray, list[tuple[FloatArray, FloatArray]]]:
    """Room for a value of each state of so many units; for each unit, the states with its storage and without."""
    room: FloatArray = np.zeros(1 << count)
    pairs = [room.reshape(-1, 2, 1 << number) for number in range(count)]
    return room, [(halves[:, 1], halves[:, 0]) for halves in pairs]


def _closed(values: FloatArray, room: FloatArray, views: Sequence[tuple[FloatArray, FloatArray]]) -> FloatArray:
    """Values where storages may be dropped first, worked out in the room and its views that ``_halves`` gives."""
    room[:] = values
    for with_it, without_it in views:
        np.minimum(with_it, without_it, out=with_it)
    return room.copy()


class _Programme:
    """The programme. A state is a number with a bit for each unit: whether its storage is there."""

    def __init__(self, now: Occupancy, units: Sequence[Unit], budget_bytes: int, stretch: slice | None = None) -> None:
        self._now = now
        self._units = units
        self._budget = budget_bytes
        self._bit = {unit.storage: number for number, unit in enumerate(units)}
        self._removed = {place for unit in units for op in unit.ops for place in now.places[op][1:]}
        op_time_s = now.problem.op_time_s
        self.removed_s = math.fsum(op_time_s[now.runs[place]] for place in self._removed)
        self._count_others()
        if stretch is not None:
            self._forgive_all_but(stretch)
        count = len(units)
        self._states = np.arange(1 << count)
        self._bytes: IntArray = np.zeros(1 << count, dtype=np.int64)
        for number, unit in enumerate(units):
            self._bytes += np.where(self._states >> number & 1, now.problem.size[unit.storage], 0)
        self._needs = [sum(1 << self._bit[s] for s in unit.reads if s in self._bit) for unit in units]
        # For each unit, the states without its storage, and their bytes.
        self._without = [self._states[self._states >> number & 1 == 0] for number in range(count)]
        self._bytes_without = [self._bytes[states] for states in self._without]
        # The seconds of running a unit in each of these states, without end where it lacks what it reads.
        self._run_s = [
            np.where((states & need) == need, unit.time_s, np.inf)
            for states, need, unit in zip(self._without, self._needs, units, strict=True)
        ]
        self._least_extra = [min([unit.extra_bytes, *unit.extra_bytes_taking_over.values()]) for unit in units]
        self._closing, self._views = _halves(count)
        self._closing_without, self._views_without = _halves(max(0, count - 1))
        self._points = self._all_points()
        self._units_before = self._all_units_before()
        self._bare: list[FloatArray] = []  # Values right before each point's runs, the last point first.

    def _count_others(self) -> None:
        """The bytes of everything but the units' storages, at each run and before it."""
        now, size = self._now, self._now.problem.size
        self._held, self._idle = now.bytes.copy(), now.idle_bytes.copy()
        gone: set[int] = set()
        for unit in self._units:
            gone.update(now.instances[unit.storage])
            gone.update(i for s in unit.inner for i in now.instances[s] if now.birth[i] in self._removed)
        for i in gone:
            bytes_ = size[now.storage[i]]
            self._held[now.birth[i] : now.last[i] + 1] -= bytes_
            self._idle[now.birth[i] + 1 : now.last[i] + 1] -= bytes_
        for target in {*gone, *(now.taker[i] for i in gone if i in now.taker)}:
            source = now.source[target]
            # What a first run of a unit takes over from a storage that stays is saved as before.
            if source >= 0 and (source in gone or now.birth[target] in self._removed):
                self._held[now.birth[target]] += min(size[now.storage[target]], size[now.storage[source]])
        self._gone = gone

    def _forgive_all_but(self, stretch: slice) -> None:
        """What the schedule takes beyond the budget elsewhere does not count."""
        for others, own in ((self._held, self._now.bytes), (self._idle, self._now.idle_bytes)):
            over = np.maximum(0, own - self._budget)
            over[stretch] = 0
            others -= over

    def _all_points(self) -> list[_Point]:
        now, problem = self._now, self._now.problem
        readers = {op for unit in self._units for op in problem.consumers[unit.storage]}
        places = {place for op in readers for place in now.places[op]} | self._removed
        places |= {now.places[unit.ops[-1]][0] for unit in self._units}
        points, begin = [], 0
        for place in [*sorted(places), len(now.runs)]:
            if place > begin:
                emptiest = begin + int(np.argmin(self._idle[begin:place]))
                points += [_Point(begin, emptiest)] if emptiest > begin else []
                points.append(_Point(emptiest, place))
            if place < len(now.runs):
                points.append(self._point(place))
            begin = place + 1
        return points

    def _point(self, place: int) -> _Point:
        now, problem, bit = self._now, self._now.problem, self._bit
        if place in self._removed:
            return _Point(place, place + 1, is_removed=True)
        op = now.runs[place]
        lends = []
        for pair in problem.takeovers[op]:
            source = now.source[now.born[pair.target, place]]
            if pair.source in bit and (source < 0 or source in self._gone):
                lends.append((bit[pair.source], pair.saved_bytes))
        made = next((bit[s] for s in problem.storages_made[op] if s in bit), -1)
        required = sum(1 << bit[s] for s in problem.storages_read[op] if s in bit)
        return _Point(place, place + 1, required, made, tuple(lends))

    def _all_units_before(self) -> list[list[int]]:
        """For each point the units that may run again right before it, the last in program order first."""
        now = self._now
        places = np.array([point.place for point in self._points])
        alive: dict[int, BoolArray] = {}
        may = np.zeros((len(self._units), len(places)), dtype=bool)
        for number, unit in enumerate(self._units):
            may[number] = places > now.places[unit.ops[-1]][0]
            for s in unit.reads:
                if s not in self._bit:
                    if s not in alive:
                        alive[s] = now.alive_before(s, places)
                    may[number] &= alive[s]
        return [np.flatnonzero(column)[::-1].tolist() for column in may.T]

    def values(self) -> list[FloatArray]:
        """For each point, and the end, the least seconds of all units that run again from there on, by state."""
        result = [np.zeros(len(self._states))]
        for number in reversed(range(len(self._points))):
            point = self._points[number]
            bare = self._before_point(point, result[-1])
            self._bare.append(bare)
            result.append(self._before_units(number, self._closed_before_point(point, bare), None))
        return result[::-1]

    def _closed_before_point(self, point: _Point, values: FloatArray) -> FloatArray:
        """Values before a point's runs where storages may be dropped first."""
        if point.is_removed:
            return values
        room = self._budget - int(self._held[point.place : point.stop].max())
        if point.made < 0 and not point.lends and room >= self._bytes[-1]:
            return values  # They were so behind the runs, and where something is read it still is.
        return _closed(values, self._closing, self._views)

    def _before_point(self, point: _Point, later: FloatArray) -> FloatArray:
        """Values right before a point's runs, from those behind them."""
        if point.is_removed:
            return later
        if point.required == 0 and point.made < 0:
            room = self._budget - int(self._held[point.place : point.stop].max())
            return np.where(self._bytes <= room, later, np.inf)
        room = self._budget - int(self._held[point.place])
        states, bytes_ = self._states, self._bytes
        if point.made >= 0:
            states = states | 1 << point.made
            bytes_ = bytes_[states]
        values = np.where(bytes_ <= room, later[states], np.inf)
        for number, saved in point.lends:
            # What is taken over is gone behind the run.
            lent = np.where(bytes_ <= room + saved, later[states & ~(1 << number)], np.inf)
            np.minimum(values, lent, out=values)
        blocked = (self._states & point.required) != point.required
        if point.made >= 0:
            blocked |= self._states >> point.made & 1 == 1
        values[blocked] = np.inf
        return values

    def _extra_bytes(self, number: int, point: _Point) -> int:
        """What a unit needs before a point; less where it takes over a storage that is used there for the last time."""
        unit, now = self._units[number], self._now
        if point.is_removed and now.runs[point.place] == unit.ops[0]:
            ends = (s for s in unit.extra_bytes_taking_over if s not in self._bit and (s, point.place) in now.dying)
            return min([unit.extra_bytes, *(unit.extra_bytes_taking_over[s] for s in ends)])
        return unit.extra_bytes

    def _before_units(
        self, at: int, values: FloatArray, trace: list[tuple[int, FloatArray, FloatArray]] | None
    ) -> FloatArray:
        """Values before the units that run again right before a point, in program order, each once at most.

        The trace notes each unit that may, with the values if nothing is dropped before it and those behind it.
        """
        point = self._points[at]
        room = self._budget - int(self._idle[point.place])
        for number in self._units_before[at]:
            unit, without, bytes_ = self._units[number], self._without[number], self._bytes_without[number]
            halves = values.reshape(-1, 2, 1 << number)
            unchanged = halves[:, 0].ravel()
            run = halves[:, 1].ravel() + self._run_s[number]
            # What it takes over is gone behind it, which costs no less.
            if not ((run < unchanged) & (bytes_ <= room - self._least_extra[number])).any():
                continue
            run[bytes_ > room - self._extra_bytes(number, point)] = np.inf
            for s, lent_extra in unit.extra_bytes_taking_over.items():
                if s in self._bit:
                    bit = 1 << self._bit[s]
                    lent = values[(without | 1 << number) & ~bit] + self._run_s[number]
                    lent[bytes_ > room - lent_extra] = np.inf
                    np.minimum(run, lent, out=run)
            if not (run < unchanged).any():
                continue
            np.minimum(run, unchanged, out=run)
            if trace is not None:
                before = values.copy()
                before[without] = run
                trace.append((number, before, values))
            # Where the unit's storage is there, nothing has changed.
            values = values.copy()
            closed = _closed(run, self._closing_without, self._views_without)
            values.reshape(-1, 2, 1 << number)[:, 0] = closed.reshape(-1, 1 << number)
        return values

    def runs(self, values: list[FloatArray]) -> list[int] | None:
        """The runs of least cost; None where rounding hides them."""
        now, state = self._now, 0
        found: list[int] = []
        for at, point in enumerate(self._points):
            trace: list[tuple[int, FloatArray, FloatArray]] = []
            bare, target = self._bare[-1 - at], values[at][state]
            if bare[state] > target:
                self._before_units(at, self._closed_before_point(point, bare), trace)
            for number, before, behind in reversed(trace):
                state = self._dropped(state, before, target)
                if behind[state] > target:
                    state = self._behind_unit(number, point, state, behind, target)
                    if state < 0:
                        return None
                    found += self._units[number].ops
                target = behind[state]
            state = self._dropped(state, bare, target)
            if not point.is_removed:
                found += now.runs[point.place : point.stop]
                state = self._behind_point(point, state, values[at + 1])
        return found

    def _dropped(self, state: int, values: FloatArray, target: float) -> int:
        """The state, with what must be dropped to come to a value."""
        if values[state] <= target:
            return state
        within = self._states[(self._states & ~state) == 0]
        return int(within[np.argmin(values[within])])

    def _behind_unit(self, number: int, point: _Point, state: int, behind: FloatArray, target: float) -> int:
        unit, after = self._units[number], state | 1 << number
        room = self._budget - int(self._idle[point.place]) - int(self._bytes[state])
        choices = [(self._extra_bytes(number, point), after)]
        for s, extra in unit.extra_bytes_taking_over.items():
            if s in self._bit:
                choices.append((extra, after & ~(1 << self._bit[s])))
        fitting = [(float(behind[after]), after) for extra, after in choices if extra <= room]
        value, after = min(fitting, default=(math.inf, -1))
        return after if value + unit.time_s <= target + _SAME * self._now.problem.graph.time_s else -1

    def _behind_point(self, point: _Point, state: int, later: FloatArray) -> int:
        after = state if point.made < 0 else state | 1 << point.made
        room = self._budget - int(self._held[point.place : point.stop].max())
        choices = [(0, after), *((saved, after & ~(1 << number)) for number, saved in point.lends)]
        fitting = [(float(later[behind]), behind) for saved, behind in choices if self._bytes[after] <= room + saved]
        return min(fitting)[1]
