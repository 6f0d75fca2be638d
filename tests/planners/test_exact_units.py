"""The repeated runs of a few units, planned again exactly while the rest of a schedule stays."""

from __future__ import annotations

import random

import pytest

from remat import Graph, Op, Tensor, simulate, validate
from remat.core.schedule import keeps_program_order
from remat.planners.methods.exact_units import exact_units
from remat.planners.methods.peak_greedy import peak_greedy
from remat.planners.replay.replan import confined, replanned
from remat.planners.replay.units import Occupancy, units_of
from remat.planners.search import Search
from remat.planners.view.board import Condensed
from remat.planners.view.problem import Problem
from remat.testing import chain, layered, random_graph, random_schedule, residual_blocks


def reduced(graph: Graph) -> Problem:
    return Condensed.of(Problem.of(graph)).problem


def wasteful(problem: Problem, seed: int) -> Search:
    """A search that knows one schedule, with runs that nobody needs, and whose budget is that schedule's peak."""
    schedule = random_schedule(problem.graph, seed, recompute=0.3)
    search = Search(problem, simulate(problem.graph, schedule).peak_bytes)
    search.offer(schedule)
    return search


@pytest.mark.parametrize("seed", range(40))
def test_bytes_are_counted_as_the_simulator_counts_them(seed: int) -> None:
    rng = random.Random(seed)
    problem = reduced(random_graph(rng, 14, free_order=False))
    units = units_of(problem)
    search = wasteful(problem, seed)
    assert search.best is not None
    now = Occupancy(problem, search.best)
    before_s = search.best_time_s
    for _ in range(10):
        chosen = [units[n] for n in sorted(rng.sample(range(len(units)), min(5, len(units))))]
        runs = replanned(now, chosen, search.budget_bytes)
        if runs is not None:
            assert validate(problem.graph, runs) <= search.budget_bytes
            assert simulate(problem.graph, runs).time_s <= before_s * (1 + 1e-9)
            now, before_s = Occupancy(problem, runs), simulate(problem.graph, runs).time_s


@pytest.mark.parametrize("seed", range(20))
def test_a_stretch_is_brought_within_a_budget_and_nothing_else_takes_more(seed: int) -> None:
    """Of schedules that are near their peak at many runs; ops are compared at their first runs, which stay."""
    rng = random.Random(seed)
    problem = reduced(residual_blocks(5 + seed))
    search = Search(problem, problem.plain.peak_bytes * 6 // 10)
    peak_greedy(search)
    assert search.best is not None
    now = Occupancy(problem, search.best)
    budget_bytes = int(0.9 * now.bytes.max())
    heavy = [op for op, places in now.places.items() if now.bytes[places[0]] > budget_bytes]
    units = units_of(problem)
    for op in heavy:
        place = now.places[op][0]
        chosen = [units[n] for n in sorted(rng.sample(range(len(units)), min(8, len(units))))]
        runs = confined(now, chosen, budget_bytes, slice(place, place + 1))
        if runs is not None:
            validate(problem.graph, runs)
            taken = simulate(problem.graph, runs).bytes
            assert taken[runs.index(op)] <= budget_bytes
            for other in range(problem.count):
                assert taken[runs.index(other)] <= max(budget_bytes, now.bytes[now.places[other][0]])


def two_storages() -> Graph:
    """A storage of 8 bytes that takes 1 s to make, one that takes 5, and room for one of them at the step between."""
    sizes = (8, 8, 8, 1, 1)
    ops = (
        Op("cheap", "", (), (0,), 1.0),
        Op("dear", "", (), (1,), 5.0),
        Op("heavy", "", (), (2,), 1.0, recomputable=False),
        Op("read heavy", "", (2,), (3,), 1.0, recomputable=False),
        Op("read both", "", (0, 1, 3), (4,), 1.0, recomputable=False),
    )
    return Graph(ops, tuple(Tensor(size) for size in sizes), (), (4,), free_order=False)


def test_one_storage_gives_way_to_another_in_one_step() -> None:
    """Neither can the dear one be kept while the cheap one is, nor is it better to make the cheap one again alone."""
    problem = Problem.of(two_storages())
    dear_again = (0, 1, 2, 3, 1, 4)
    assert simulate(problem.graph, dear_again).peak_bytes == 18
    runs = replanned(Occupancy(problem, dear_again), units_of(problem), 18)
    assert runs == [0, 1, 2, 3, 0, 4]
    assert replanned(Occupancy(problem, dear_again), units_of(problem)[1:], 18) == list(dear_again)


def test_ops_in_a_row_of_equal_size_are_one_unit() -> None:
    """What only the next op reads is not worth keeping, unless that op makes more bytes of it."""
    sizes = (8, 8, 8, 9, 1)
    ops = (
        Op("a", "", (), (0,), 1.0),
        Op("b", "", (0,), (1,), 1.0, in_place=((0, 1),)),
        Op("c", "", (1,), (2,), 1.0),
        Op("larger", "", (2,), (3,), 1.0),
        Op("end", "", (3, 2), (4,), 1.0),
    )
    problem = Problem.of(Graph(ops, tuple(Tensor(size) for size in sizes), (), (4,), free_order=False))
    units = units_of(problem)
    assert [unit.ops for unit in units] == [(0, 1, 2), (3,)]
    assert units[0].extra_bytes == 16  # While c runs; b takes over what a made.
    assert units[0].time_s == 3.0


def test_wasteful_schedules_get_cheaper_and_stay_legal() -> None:
    for seed in range(3):
        problem = reduced(layered(50, seed, free_order=False))
        search = wasteful(problem, seed)
        before_s = search.best_time_s
        exact_units(search)
        assert validate(problem.graph, search.best or ()) <= search.budget_bytes
        assert keeps_program_order(search.best or ())
        assert search.best_time_s - problem.graph.time_s < 0.5 * (before_s - problem.graph.time_s)


def test_nothing_known_is_nothing_to_improve() -> None:
    search = Search(Problem.of(chain(5)), 1)
    exact_units(search)
    assert search.best is None
