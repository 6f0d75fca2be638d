"""Plans that were found with little work, changed near the schedule that they have: cheaper, or in fewer bytes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from remat import Graph, load_graph, simulate, validate
from remat.core.plan import plan_for_schedule
from remat.planning.find import find
from remat.planning.improve import improved, squeezed
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


@pytest.mark.parametrize("share", [0.97, 0.94])
def test_a_plan_is_squeezed_into_a_smaller_budget(share: float) -> None:
    graph = load_graph(U_NET)
    plan = find(graph, "45%", thorough=False)
    budget_bytes = int(share * plan.peak_bytes)
    small = squeezed(graph, plan, budget_bytes, {})
    assert small is not None
    assert validate(graph, small.schedule) == small.peak_bytes <= budget_bytes
    anew = find(graph, budget_bytes, "peak_greedy")
    assert plan.overhead < small.overhead < anew.overhead
    assert (small.budget_bytes, small.fingerprint) == (budget_bytes, graph.fingerprint)


def test_room_is_left_beside_ops_that_need_it() -> None:
    graph = load_graph(U_NET)
    plan = find(graph, "45%", thorough=False)
    before = simulate(graph, plan.schedule)
    heaviest = sorted(range(len(graph.ops)), key=lambda op: -_most(graph, plan.schedule, op))[:3]
    room = dict.fromkeys(heaviest, plan.peak_bytes // 50)
    small = squeezed(graph, plan, plan.peak_bytes, room)
    assert small is not None
    large = improved(graph, small, plan.peak_bytes * 11 // 10, room)
    assert large is not None
    assert large.overhead < small.overhead
    for changed in (small, large):
        for op, free_bytes in room.items():
            assert _most(graph, changed.schedule, op) + free_bytes <= changed.budget_bytes
    assert simulate(graph, plan.schedule) == before


def test_room_that_a_plan_does_not_leave_is_not_asked_of_a_cheaper_one() -> None:
    graph = residual_blocks(6)
    quick = find(graph, "45%", "sqrt_n")
    everywhere = dict.fromkeys(range(len(graph.ops)), quick.budget_bytes)
    with_room, without = (improved(graph, quick, quick.budget_bytes, room) for room in (everywhere, {}))
    assert with_room is not None
    assert without is not None
    assert with_room.schedule == without.schedule


def test_what_cannot_be_reached_by_small_changes_is_not_found() -> None:
    graph = load_graph(U_NET)
    plan = find(graph, "45%", thorough=False)
    assert squeezed(graph, plan, plan.peak_bytes // 3, {}) is None


def _most(graph: Graph, schedule: tuple[int, ...], op: int) -> int:
    """The most bytes at a run of an op."""
    bytes_ = simulate(graph, schedule).bytes
    return max(bytes_[place] for place, one in enumerate(schedule) if one == op)
