"""What a search that is one of many leaves out, and where the search for the smallest peak ends early."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from remat import load_graph, simulate
from remat.planners import auto, get_planner, smallest_peak
from remat.planners.methods.dtr import dtr
from remat.planners.methods.gap_lp import gap_lp
from remat.planners.methods.peak_greedy import peak_greedy
from remat.planners.registry import Strategy
from remat.planners.search import Search
from remat.planners.smallest_peak import smallest_peak_schedules
from remat.planners.view.board import Board, Condensed
from remat.planners.view.problem import Problem
from remat.planners.walk.annealing import Walk
from remat.testing import chain, layered, residual_blocks

STEP = chain(40, size_bytes=1000, free_order=False)


def decisions(method: Strategy, count: int, share: float, monkeypatch: pytest.MonkeyPatch, *, thorough: bool) -> int:
    """How many decisions a method offers for a chain of so many blocks at a share of its peak."""
    problem = Problem.of(chain(count, size_bytes=1000, free_order=False))
    offered = []
    offer = Search.offer_decision

    def noted(search: Search, *args: Any, **options: Any) -> int | None:
        offered.append(args)
        return offer(search, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Search, "offer_decision", noted)
        method(Search(problem, int(share * problem.plain.peak_bytes), thorough=thorough))
    return len(offered)


@pytest.mark.parametrize(
    ("method", "count", "share", "quick", "thorough"),
    [
        (dtr, 40, 0.05, 3, 11),  # Nothing fits: the first three replays say so.
        (dtr, 40, 0.6, 11, 11),
        (gap_lp, 40, 0.2, 2, 8),  # Likewise, its first budget.
        (gap_lp, 20, 0.2, 8, 8),  # Of few ops.
        (gap_lp, 40, 0.3, 8, 8),
        (peak_greedy, 40, 0.6, 2, 4),
        (peak_greedy, 20, 0.6, 4, 4),  # Of few ops.
    ],
)
def test_a_quick_search_offers_fewer_decisions(
    method: Strategy, count: int, share: float, quick: int, thorough: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert decisions(method, count, share, monkeypatch, thorough=False) == quick
    assert decisions(method, count, share, monkeypatch, thorough=True) == thorough


@pytest.mark.parametrize(("looks", "tried"), [(((24, 1e-6), (3, 0.1)), 250), (((3, 0.1),), 2000)])
def test_a_walk_gives_up_at_the_first_of_its_looks(looks: tuple[tuple[int, float], ...], tried: int) -> None:
    graph = layered(40, 3, free_order=False)
    walk = Walk(Board(Problem.of(graph), whole=False), graph.plain_schedule, 0, 0, patience=6000, looks=looks)

    assert walk.run(6000, 1e-2, 1e-4, None) == tried
    assert walk.is_hopeless


def test_nothing_is_looked_for_right_above_the_largest_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the peak that eviction reached is close enough to it, which a wide limit stands for here."""
    asked: list[int] = []

    def method(search: Search) -> None:
        asked.append(search.budget_bytes)

    small = Problem.of(STEP)
    smallest_peak_schedules(small, [method], 1)
    assert asked
    monkeypatch.setattr(smallest_peak, "_NO_ROOM", 100.0)
    asked.clear()
    other = Problem.of(chain(41, size_bytes=1000, free_order=False))
    (schedule, *_) = smallest_peak_schedules(other, [method], 1)
    assert not asked
    assert simulate(other.graph, schedule).peak_bytes < other.plain.peak_bytes


@pytest.mark.parametrize("name", ["peak_greedy", "dtr"])
def test_a_quick_search_finds_schedules_that_fit(name: str) -> None:
    planner: Any = get_planner(name)
    budget_bytes = Problem.of(STEP).plain.peak_bytes // 2
    assert simulate(STEP, planner(STEP, budget_bytes, thorough=False)).peak_bytes <= budget_bytes


@pytest.mark.parametrize(
    ("points_above", "asked"),
    [
        (0.4, []),
        (1.55, ["window_milp_of_other_budgets"]),
        (1.8, ["window_milp_of_other_budgets", "few_exact_units"]),
        (2.5, ["window_milp_of_other_budgets", "dtr", "few_exact_units"]),
        (
            6.0,
            ["window_milp_of_other_budgets", "dtr", "simulated_annealing", "block_chain", "few_exact_units"],
        ),
    ],
)
def test_a_quick_search_asks_for_more_the_further_it_is_from_the_bound(
    points_above: float, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = Problem.of(chain(40, free_order=False))
    search = Search(problem, problem.plain.peak_bytes // 2, thorough=False)
    peak_greedy(search)
    calls: list[str] = []
    for name in (
        "window_milp_of_other_budgets",
        "dtr",
        "simulated_annealing",
        "block_chain",
        "few_exact_units",
        "anneal_anew",
        "exact_units",
    ):
        monkeypatch.setattr(auto, name, lambda _search, name=name: calls.append(name))
    plain_s = problem.graph.time_s
    auto._search_further(search, search.reduced(), search.best_time_s - points_above / 100 * plain_s)
    assert calls == asked


def test_a_quick_search_of_a_u_net_in_little_memory_costs_less() -> None:
    """It cost 32.5 % at 30 % of its peak, where a thorough search comes to 19.1."""
    graph = load_graph(Path(__file__).parents[2] / "benchmarks" / "graphs" / "u_net.json.gz")
    budget_bytes = Problem.of(graph).plain.peak_bytes * 3 // 10
    planner: Any = get_planner("auto")
    found = simulate(graph, planner(graph, budget_bytes, thorough=False))
    assert found.peak_bytes <= budget_bytes
    assert found.time_s <= 1.24 * graph.time_s


def test_a_search_afresh_offers_to_the_whole_step() -> None:
    problem = Problem.of(STEP)
    search = Search(problem, problem.plain.peak_bytes // 2)
    inner = search.reduced()
    peak_greedy(inner)
    afresh = inner.afresh()
    assert afresh.best is None
    peak_greedy(afresh)
    assert afresh.best == inner.best
    assert afresh.whole is search


@pytest.mark.parametrize("count", [2, 5])
def test_a_schedule_of_the_whole_step_is_known_to_the_search_over_the_reduced_one(count: int) -> None:
    problem = Problem.of(residual_blocks(count))
    search = Search(problem, problem.plain.peak_bytes * 7 // 10)
    inner = search.reduced()
    peak_greedy(inner)
    assert inner.best is not None
    known = inner.best
    assert Condensed.of(problem).contract(inner.translate(known)) == known
    inner.best, inner.best_time_s = None, math.inf
    auto._adopt(inner, search)
    assert inner.best == known
