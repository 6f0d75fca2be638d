"""How a small step is searched for its smallest peak: who is asked for less and less, and when walks end."""

from __future__ import annotations

import itertools
from collections import OrderedDict

import pytest

from remat import Graph, simulate
from remat.planners import get_planner, smallest_peak
from remat.planners.chain.programme import BlockChain
from remat.planners.search import Search
from remat.planners.smallest_peak import (
    _FEWEST_OPS_ASKED_IN_PART,
    _MOST_IN_VAIN,
    _ask_for_less,
    _walk_in_fixed_order,
    smallest_peak_schedules,
)
from remat.planners.view.board import Condensed
from remat.planners.view.problem import Problem
from remat.planners.walk.annealing import Walk
from remat.testing import chain, layered

STEP = chain(40, size_bytes=1000, free_order=False)
PLAIN_BYTES = simulate(STEP, STEP.plain_schedule).peak_bytes


def falling() -> list[tuple[int, ...]]:
    """Schedules of ever smaller peaks; each is within the nine tenths of the last that are asked for first."""
    shares = (0.8, 0.65, 0.5, 0.4, 0.3)
    found = [get_planner("peak_greedy")(STEP, int(share * PLAIN_BYTES)) for share in shares]
    peaks = [PLAIN_BYTES, *(simulate(STEP, schedule).peak_bytes for schedule in found)]
    assert all(after <= 0.9 * before for before, after in itertools.pairwise(peaks))
    return found


class Method:
    """Offers one schedule each time it is asked; nothing where it has None, or none left."""

    def __init__(self, *found: tuple[int, ...] | None) -> None:
        self.asked = 0
        self._found = list(found)

    def __call__(self, search: Search) -> None:
        self.asked += 1
        schedule = self._found.pop(0) if self._found else None
        if schedule is not None:
            search.offer(schedule)


def test_a_method_that_finds_nothing_is_not_asked_for_ever_less() -> None:
    schedules = falling()
    blind, good = Method(), Method(*schedules)

    found = list(_ask_for_less(Problem.of(STEP), STEP.plain_schedule, (0.9,), (blind, good)))

    assert found == schedules
    assert good.asked > len(schedules)
    assert blind.asked == _MOST_IN_VAIN < len(schedules)


def test_a_method_that_finds_something_now_and_then_is_asked_on() -> None:
    """What it found before counts: only so many times in a row are in vain."""
    schedules = falling()
    now_and_then = Method(None, schedules[1], None, schedules[3], None)
    good = Method(schedules[0], schedules[2], schedules[4])

    *_, found = _ask_for_less(Problem.of(STEP), STEP.plain_schedule, (0.9,), (now_and_then, good))

    assert found == schedules[-1]
    assert now_and_then.asked > len(schedules)


@pytest.fixture
def without_rules_of_thumb(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first level is the plain step, and what methods find comes next; no walk follows them."""
    monkeypatch.setattr(smallest_peak, "_evict_to_the_smallest", lambda *args: None)
    monkeypatch.setattr(BlockChain, "smallest", lambda chain: None)
    monkeypatch.setattr(smallest_peak, "_MOST_FIXED_OPS", 0)
    monkeypatch.setattr(smallest_peak, "_known", OrderedDict())


@pytest.mark.usefixtures("without_rules_of_thumb")
def test_no_smaller_peak_is_looked_for_than_will_do() -> None:
    schedules = falling()
    method, problem = Method(*schedules), Problem.of(STEP)
    assert problem.count >= _FEWEST_OPS_ASKED_IN_PART
    peaks = [simulate(STEP, schedule).peak_bytes for schedule in schedules]

    def reached(enough_bytes: int) -> int:
        found = smallest_peak_schedules(problem, (method,), enough_bytes)
        return max(simulate(STEP, schedule).peak_bytes for schedule in found)

    assert reached(peaks[1]) == peaks[1]
    assert method.asked == 2
    assert reached(1) == peaks[-1]
    # What is found for a budget does not depend on what was asked for before.
    asked = method.asked
    assert [reached(peak_bytes) for peak_bytes in (peaks[3], peaks[0], PLAIN_BYTES)] == [
        peaks[3],
        peaks[0],
        PLAIN_BYTES,
    ]
    assert method.asked == asked


@pytest.mark.usefixtures("without_rules_of_thumb")
def test_the_quickest_methods_are_asked_for_slightly_less_in_the_end() -> None:
    """What was in vain in large steps is asked again in small ones."""
    first, *_, last = falling()
    large, quick = Method(first), Method(last)
    problem = Problem.of(STEP)

    found = smallest_peak_schedules(problem, (large,), 1, (quick,))

    assert simulate(STEP, found[0]).peak_bytes == simulate(STEP, last).peak_bytes
    assert large.asked == 2
    assert quick.asked == 2


class Walks:
    """Counts the walks that begin."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, blind: bool) -> None:
        self.seeds: list[int] = []
        self.budgets: list[int] = []
        walks = self

        class Watched(Walk):
            def __init__(self, *args: object, **options: object) -> None:
                walks.budgets.append(args[2])  # type: ignore[arg-type]
                walks.seeds.append(args[3])  # type: ignore[arg-type]
                super().__init__(*args, **options)  # type: ignore[arg-type]

            def run(self, *args: object) -> int:
                return 0 if blind else super().run(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(smallest_peak, "Walk", Watched)


@pytest.fixture
def fixed() -> Graph:
    return layered(60, 1, free_order=False)


def test_behind_a_walk_in_vain_comes_one_for_a_little_less(fixed: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    walks = Walks(monkeypatch, blind=True)

    assert _walk_in_fixed_order(Condensed.of(Problem.of(fixed)), fixed.plain_schedule) == fixed.plain_schedule
    assert walks.seeds == [0, 0, 0]
    assert walks.budgets == sorted(set(walks.budgets))
    assert walks.budgets[-1] < simulate(fixed, fixed.plain_schedule).peak_bytes


def test_walks_that_find_less_go_on(fixed: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    walks = Walks(monkeypatch, blind=False)

    found = _walk_in_fixed_order(Condensed.of(Problem.of(fixed)), fixed.plain_schedule)
    assert simulate(fixed, found).peak_bytes < 0.95 * simulate(fixed, fixed.plain_schedule).peak_bytes
    assert len(walks.seeds) > 3
    assert 1 in walks.seeds
