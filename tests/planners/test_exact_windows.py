"""Windows of a schedule that are planned again exactly."""

from __future__ import annotations

import random
import time

import pytest

from remat import Graph, simulate, validate
from remat.core.schedule import keeps_program_order
from remat.planners.methods.exact_windows import exact_windows
from remat.planners.methods.milp import solve_stages
from remat.planners.search import Search
from remat.planners.view.problem import Problem
from remat.testing import chain, layered, random_graph, random_schedule


def wasteful(graph: Graph, seed: int) -> Search:
    """A search that knows one schedule, with runs that nobody needs, and whose budget is that schedule's peak."""
    schedule = random_schedule(graph, seed, recompute=0.2)
    search = Search(Problem.of(graph), simulate(graph, schedule).peak_bytes)
    search.offer(schedule)
    return search


@pytest.mark.parametrize(
    ("n", "seed", "share"), [(26, 1, 0.8), (26, 3, 0.85), (40, 1, 0.8), (40, 3, 0.85), (60, 2, 0.8), (60, 2, 0.9)]
)
def test_a_small_graph_is_one_window_and_comes_out_optimal(n: int, seed: int, share: float) -> None:
    graph = layered(n, seed, free_order=False)
    problem = Problem.of(graph)
    search = Search(problem, int(share * problem.plain.peak_bytes))
    exact_windows(search)
    optimum = solve_stages(problem, search.budget_bytes, time.monotonic() + 60)
    assert optimum is not None
    assert validate(graph, search.best or ()) <= search.budget_bytes
    assert search.best_time_s == pytest.approx(simulate(graph, optimum).time_s)


def test_short_windows_join_into_a_legal_schedule_that_costs_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remat.planners.methods.exact_windows._MOST_COLUMNS", 150)
    for seed in range(3):
        graph = layered(50, seed, free_order=False)
        search = wasteful(graph, seed)
        before_s = search.best_time_s
        exact_windows(search)
        assert validate(graph, search.best or ()) <= search.budget_bytes
        assert search.best_time_s - graph.time_s < 0.7 * (before_s - graph.time_s)


def test_the_order_of_the_best_schedule_stays() -> None:
    for seed in range(30):
        graph = random_graph(random.Random(seed), 10, free_order=False)
        search = wasteful(graph, seed)
        before_s = search.best_time_s
        exact_windows(search)
        assert validate(graph, search.best or ()) <= search.budget_bytes
        assert keeps_program_order(search.best or ())
        assert search.best_time_s <= before_s


def test_nothing_known_is_nothing_to_improve() -> None:
    search = Search(Problem.of(chain(5)), 1)
    exact_windows(search)
    assert search.best is None
