"""The oracles agree with each other, and the other planners with them."""

from __future__ import annotations

import random
import time

import pytest

from remat import Graph, Op, Tensor, simulate, validate
from remat.core.schedule import keeps_program_order
from remat.planners import get_planner, overhead_lower_bound
from remat.planners.methods.milp import solve_stages
from remat.planners.view.problem import Problem
from remat.testing import chain, exhaustive, layered, random_graph, revolve, revolve_runs

# They take ten seconds each: up to 60 ops, their windows are solved as an oracle would.
LONG_CHAINS = ((20, 3), (40, 5), (60, 8))


def small_graph(rng: random.Random, *, free_order: bool) -> tuple[Graph, int]:
    """A graph without views and in-place pairs, and a budget between its largest op and its plain peak."""
    drawn = random_graph(rng, rng.randint(4, 9), free_order=free_order)
    ops = tuple(Op(**{**vars(op), "in_place": ()}) for op in drawn.ops)
    tensors = tuple(Tensor(t.size_bytes) for t in drawn.tensors)
    graph = Graph(ops, tensors, drawn.inputs, drawn.outputs, free_order)
    problem = Problem.of(graph)
    return graph, rng.randint(problem.largest_step_bytes, problem.plain.peak_bytes)


@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(60, 250), marks=pytest.mark.slow)], ids=str)
def test_milp_meets_exhaustive_search_in_program_order(seeds: range) -> None:
    met = recomputing = outside = 0
    for seed in seeds:
        graph, budget_bytes = small_graph(random.Random(seed), free_order=False)
        best = exhaustive(graph, budget_bytes)
        found = solve_stages(Problem.of(graph), budget_bytes, time.monotonic() + 60)
        if best is None:
            assert found is None
            continue
        assert validate(graph, best) <= budget_bytes
        bound = overhead_lower_bound(graph, budget_bytes)
        assert bound.time_s <= simulate(graph, best).time_s - graph.time_s + 1e-6
        if found is None:
            # Recomputations of one stage that must stand out of program order are outside of its model.
            outside += 1
            continue
        assert validate(graph, found) <= budget_bytes
        assert simulate(graph, found).time_s == pytest.approx(simulate(graph, best).time_s)
        met += 1
        recomputing += len(found) > len(graph.ops)
    assert met >= 0.6 * len(seeds)
    assert recomputing >= 0.02 * len(seeds)
    assert outside <= 0.035 * len(seeds)


@pytest.mark.parametrize("seeds", [range(40), pytest.param(range(40, 120), marks=pytest.mark.slow)], ids=str)
def test_auto_meets_exhaustive_search_in_any_order(seeds: range) -> None:
    worse, met, moved = [], 0, 0
    for seed in seeds:
        graph, budget_bytes = small_graph(random.Random(seed), free_order=True)
        best = exhaustive(graph, budget_bytes)
        if best is None:
            continue
        moved += not keeps_program_order(best)
        found = simulate(graph, get_planner("auto")(graph, budget_bytes))
        if found.peak_bytes <= budget_bytes:
            assert found.time_s >= simulate(graph, best).time_s - 1e-9
            met += 1
            worse.append(found.time_s / max(simulate(graph, best).time_s, 1e-9) - 1)
    assert met >= 0.58 * len(seeds)
    assert moved >= 0.04 * len(seeds)
    assert sum(worse) / len(worse) <= 0.005
    assert sum(share > 1e-9 for share in worse) <= 0.03 * len(worse)


@pytest.mark.parametrize("budget_bytes", [8, 10, 13])
def test_milp_on_a_chain_is_never_dearer_than_any_other_planner(budget_bytes: int) -> None:
    graph = chain(12)
    optimum = solve_stages(Problem.of(graph), budget_bytes, time.monotonic() + 60)
    assert optimum is not None
    assert validate(graph, optimum) <= budget_bytes
    optimum_s = simulate(graph, optimum).time_s
    for name in ("auto", "sqrt_n", "dtr", "peak_greedy", "gap_lp", "keep_milp", "lower_set"):
        other = simulate(graph, get_planner(name)(graph, budget_bytes))
        assert other.peak_bytes > budget_bytes or other.time_s >= optimum_s - 1e-9
    assert simulate(graph, get_planner("auto")(graph, budget_bytes)).time_s <= 1.02 * optimum_s


def test_the_chain_below_the_milps_smallest_budget_has_no_solution() -> None:
    graph = chain(4)
    assert exhaustive(graph, 3) is None
    best = exhaustive(graph, 4)
    assert best is not None
    assert validate(graph, best) == 4


@pytest.mark.parametrize("n", [1, 2, 5, 10, 37])
@pytest.mark.parametrize("slots", [0, 1, 2, 4])
def test_revolve_meets_its_closed_form(n: int, slots: int) -> None:
    graph = chain(n)
    schedule = revolve(n, slots)
    # The batch, the kept activations, two activations or gradients, and one that is being made.
    assert validate(graph, schedule) <= slots + 4
    assert sum(op < n for op in schedule) == revolve_runs(n, slots)


@pytest.mark.parametrize("n", [3, 4])
def test_no_schedule_of_a_small_chain_is_cheaper_than_revolve(n: int) -> None:
    for slots in range(n):
        schedule = revolve(n, slots)
        graph = chain(n)
        best = exhaustive(graph, validate(graph, schedule))
        assert best is not None
        assert simulate(graph, best).time_s <= simulate(graph, schedule).time_s


@pytest.mark.parametrize(
    ("n", "slots"), [(8, 2), (16, 4), (101, 10), *(pytest.param(*case, marks=pytest.mark.slow) for case in LONG_CHAINS)]
)
def test_auto_meets_revolve_on_chains(n: int, slots: int) -> None:
    graph = chain(n)
    reference = simulate(graph, revolve(n, slots))
    found = simulate(graph, get_planner("auto")(graph, reference.peak_bytes))
    assert found.peak_bytes <= reference.peak_bytes
    assert found.time_s <= 1.05 * reference.time_s


def test_exhaustive_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match=r"nine|9"):
        exhaustive(layered(10, 0), 10**6)
    view = Graph((Op(outputs=(0, 1)),), (Tensor(4), Tensor(4, alias_of=0)))
    with pytest.raises(ValueError, match="views"):
        exhaustive(view, 100)
