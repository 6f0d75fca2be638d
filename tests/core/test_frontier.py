"""The frontier: from the smallest feasible peak to the plain one, overhead never rising."""

from __future__ import annotations

import random

import pytest

import remat
from remat import Graph, simulate, validate
from remat.planners import get_planner, registry
from remat.planners.linear import bounds as lower_bound
from remat.testing import chain, random_graph


def check(graph: Graph, plans: tuple[remat.Plan, ...]) -> None:
    plain = simulate(graph, graph.plain_schedule)
    assert plans[-1].schedule == graph.plain_schedule
    assert plans[-1].budget_bytes == max(1, plain.peak_bytes)
    budgets = [plan.budget_bytes for plan in plans]
    assert budgets == sorted(set(budgets))
    for plan in plans:
        assert validate(graph, plan.schedule) == plan.peak_bytes <= max(plan.budget_bytes, plain.peak_bytes)
        assert simulate(graph, plan.schedule).time_s == plan.time_s
        assert 0 <= plan.overhead_lower_bound <= plan.overhead
    overheads = [plan.overhead for plan in plans]
    assert overheads == sorted(overheads, reverse=True)
    bounds = [plan.overhead_lower_bound for plan in plans]
    assert bounds == sorted(bounds, reverse=True)


@pytest.mark.parametrize(("planner", "layers", "points"), [("auto", 10, 4), ("peak_greedy", 20, 6), ("sqrt_n", 31, 6)])
def test_of_a_chain(planner: str, layers: int, points: int) -> None:
    graph = chain(layers, free_order=False)
    plans = remat.frontier(graph, points=points, planner=planner)
    check(graph, plans)
    assert len(plans) == points
    assert plans[0].budget_bytes < plans[-1].budget_bytes / 2
    with pytest.raises(remat.InfeasibleBudget):
        remat.plan(graph, 1, planner)
    assert plans[0].peak_bytes == plans[0].budget_bytes


@pytest.mark.parametrize("seed", range(15))
def test_of_random_graphs(seed: int) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng, rng.randint(0, 12))
    check(graph, remat.frontier(graph, points=rng.randint(2, 5), planner="peak_greedy"))


def test_a_plan_that_got_worse_with_more_memory_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def worse(graph: Graph, budget_bytes: int, *, time_limit_s: float | None = None) -> tuple[int, ...]:
        small = get_planner("peak_greedy")(graph, 14)
        # Wasteful where there is room: the last recomputation runs twice.
        return small if budget_bytes < 18 else (*small[:12], small[2], *small[12:])

    monkeypatch.setitem(registry._PLANNERS, "worse with more", worse)
    graph = chain(20)
    plans = remat.frontier(graph, points=5, planner="worse with more")
    check(graph, plans)
    assert [plan.schedule for plan in plans[:-1]] == [plans[0].schedule] * 4
    assert plans[1].budget_bytes > plans[0].budget_bytes


def test_a_bound_that_was_not_proved_in_time_is_that_of_the_next_larger_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(graph: Graph, budget_bytes: int, *rest: float, **more: float) -> lower_bound.LowerBound:
        if budget_bytes < 14:
            return lower_bound.LowerBound(0.0, "trivial")
        return proved(graph, budget_bytes, *rest, **more)

    proved = lower_bound.overhead_lower_bound
    monkeypatch.setattr("remat.planning.prove.overhead_lower_bound", late)
    graph = chain(31)
    plans = remat.frontier(graph, points=4, planner="sqrt_n")
    check(graph, plans)
    first = next(plan for plan in plans if plan.budget_bytes >= 14)
    assert plans[0].budget_bytes < 14
    assert plans[0].overhead_lower_bound == first.overhead_lower_bound > 0
    assert plans[0].lower_bound_meaning == first.lower_bound_meaning


def test_progress_is_told() -> None:
    told: list[tuple[int, int]] = []
    remat.frontier(chain(20), points=3, planner="sqrt_n", on_plan=lambda done, total: told.append((done, total)))
    assert told == [(0, 3), (1, 3), (2, 3), (3, 3)]


def test_one_point_is_no_frontier() -> None:
    with pytest.raises(ValueError, match="2 or more"):
        remat.frontier(chain(3), points=1)
