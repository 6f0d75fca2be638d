"""Plans that were found with little work, made cheaper near the schedule that they have."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from remat import Graph, load_graph, validate
from remat.core.plan import plan_for_schedule
from remat.planning.find import find
from remat.planning.improve import improved
from remat.testing import chain, residual_blocks

U_NET = Path(__file__).parents[2] / "benchmarks" / "graphs" / "u_net.json.gz"


def test_a_plan_of_a_quick_search_gets_cheaper_in_the_same_budget() -> None:
    graph = load_graph(U_NET)
    quick = find(graph, "30%", thorough=False)
    better = improved(graph, quick, quick.budget_bytes)
    assert better is not None
    assert better.overhead < quick.overhead - 0.005
    assert validate(graph, better.schedule) == better.peak_bytes <= quick.budget_bytes
    assert (better.planner, better.fingerprint) == (quick.planner, quick.fingerprint)
    assert better.plan_seconds > quick.plan_seconds


def test_no_clock_decides_what_is_found() -> None:
    graph = residual_blocks(6)
    quick = find(graph, "45%", "sqrt_n")
    first, second = (improved(graph, quick, quick.budget_bytes) for _ in range(2))
    assert first is not None
    assert second is not None
    assert first.schedule == second.schedule
    assert first.overhead < quick.overhead


@pytest.mark.parametrize("graph", [chain(30, free_order=False), residual_blocks(4)], ids=["chain", "residual"])
def test_a_plan_that_nothing_undercuts_is_left_alone(graph: Graph) -> None:
    best = find(graph, "60%")
    assert improved(graph, best, best.budget_bytes) is None


def test_a_plan_above_the_budget_is_improved_within_its_own_peak() -> None:
    graph = residual_blocks(6)
    quick = find(graph, "45%", "sqrt_n")
    better = improved(graph, quick, quick.peak_bytes - 1)
    assert better is not None
    assert better.overhead < quick.overhead
    assert better.budget_bytes == quick.peak_bytes >= better.peak_bytes


def test_runs_that_nobody_needs_are_left_out() -> None:
    graph = chain(20, free_order=False)
    plain = graph.plain_schedule
    wasteful = plan_for_schedule(graph, (*plain[:5], *plain[:5], *plain[5:]), planner="by hand")
    better = improved(graph, dataclasses.replace(wasteful, plan_seconds=3.0), wasteful.peak_bytes)
    assert better is not None
    assert better.schedule == plain
    assert better.plan_seconds > 3.0
