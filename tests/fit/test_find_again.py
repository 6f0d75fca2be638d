"""A search for an equal step and budget is made once in a process, and never one that a clock ends."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import Any

import pytest

from remat import Graph, InfeasibleBudget
from remat.planners import registry
from remat.planning import find as searches
from remat.planning.find import find_again
from remat.testing import chain

STEP = chain(20, size_bytes=100, free_order=False)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The budgets that a planner is asked for, which looks for no peak below 700 bytes."""
    budgets: list[int] = []

    def planner(graph: Graph, budget_bytes: int, **options: Any) -> tuple[int, ...]:
        budgets.append(budget_bytes)
        return registry.get_planner("peak_greedy")(graph, max(budget_bytes, 700))

    monkeypatch.setitem(registry._PLANNERS, "given", planner)
    monkeypatch.setattr(searches, "_schedules", OrderedDict())
    return budgets


def test_an_equal_step_is_searched_once(asked: list[int]) -> None:
    plan = find_again(STEP, 1200, "given")
    again = find_again(dataclasses.replace(STEP), 1200, "given")

    assert again.schedule == plan.schedule != STEP.plain_schedule
    assert all(type(op) is int for op in again.schedule)
    assert asked == [1200]


def test_a_refusal_is_remembered_with_what_it_names(asked: list[int]) -> None:
    for _ in range(2):
        with pytest.raises(InfeasibleBudget) as refused:
            find_again(STEP, 10, "given")
        assert refused.value.minimum_bytes <= 700
    assert asked == [10]


def test_another_budget_option_or_time_is_searched(asked: list[int]) -> None:
    slower = dataclasses.replace(STEP, ops=tuple(dataclasses.replace(op, time_s=2 * op.time_s) for op in STEP.ops))
    find_again(STEP, 1200, "given")
    find_again(STEP, 1201, "given")
    find_again(STEP, 1200, "given", thorough=False)
    find_again(slower, 1200, "given")
    assert asked == [1200, 1201, 1200, 1200]


def test_what_a_clock_ends_is_not_remembered(asked: list[int]) -> None:
    for _ in range(2):
        find_again(STEP, 1200, "given", 5.0)
    assert asked == [1200, 1200]


def test_the_oldest_searches_are_forgotten(asked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searches, "_MOST_SCHEDULES", 2)
    for budget_bytes in (1200, 1201, 1200, 1202, 1200, 1201):
        find_again(STEP, budget_bytes, "given")
    assert asked == [1200, 1201, 1202, 1201]
