"""Orders that need less memory than the program's, with nothing recomputed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat import Graph, simulate, validate
from remat.planners.view.problem import Problem
from remat.planners.walk.orders import low_memory_order
from remat.testing import fan, graphs, layered


@settings(max_examples=60, deadline=None)
@given(graph=graphs(max_ops=14, free_order=True), share=st.floats(0.0, 1.0))
def test_it_is_legal_and_never_further_over_the_budget_than_program_order(graph: Graph, share: float) -> None:
    plain = simulate(graph, graph.plain_schedule)
    budget_bytes = int(share * plain.peak_bytes)
    order = low_memory_order(Problem.of(graph), budget_bytes)
    assert sorted(order) == list(range(len(graph.ops)))
    validate(graph, order)

    def over(bytes_: Sequence[int]) -> int:
        return sum(max(0, b - budget_bytes) ** 2 for b in bytes_)

    assert over(simulate(graph, order).bytes) <= over(plain.bytes)


def test_a_fan_is_run_chain_by_chain() -> None:
    """Three tensors suffice: the source, and two of one chain."""
    graph = fan(8, 8)
    assert simulate(graph, low_memory_order(Problem.of(graph), 3)).peak_bytes == 3


@pytest.mark.parametrize("seed", range(3))
def test_layered_graphs_need_less_than_in_program_order(seed: int) -> None:
    problem = Problem.of(layered(200, seed))
    budget_bytes = int(0.9 * problem.plain.peak_bytes)
    order = low_memory_order(problem, budget_bytes)
    assert simulate(problem.graph, order).peak_bytes < 0.97 * problem.plain.peak_bytes


def test_a_fixed_order_stays() -> None:
    graph = fan(3, 3, free_order=False)
    assert low_memory_order(Problem.of(graph), 0) == graph.plain_schedule


@settings(max_examples=60, deadline=None)
@given(graph=graphs(max_ops=10, free_order=True))
def test_the_reordered_step_has_the_same_memory(graph: Graph) -> None:
    order = low_memory_order(Problem.of(graph), 0)
    reordered = Problem.of(graph).in_order(order)
    assert reordered.plain.bytes == simulate(graph, order).bytes
    assert reordered.graph.time_s == pytest.approx(graph.time_s)
