"""Orders that need less memory than the program's, with nothing recomputed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from remat import Graph, simulate, validate
from remat.planners.orders import in_order, low_peak_order
from remat.planners.problem import Problem
from remat.testing import fan, graphs, layered


@settings(max_examples=60, deadline=None)
@given(graph=graphs(max_ops=14, free_order=True))
def test_it_is_legal_and_never_above_program_order(graph: Graph) -> None:
    order = low_peak_order(Problem.of(graph))
    assert sorted(order) == list(range(len(graph.ops)))
    assert validate(graph, order) <= simulate(graph, graph.plain_schedule).peak_bytes


def test_a_fan_is_run_chain_by_chain() -> None:
    """Three tensors suffice: the source, and two of one chain."""
    graph = fan(8, 8)
    assert simulate(graph, low_peak_order(Problem.of(graph))).peak_bytes == 3


@pytest.mark.parametrize("seed", range(3))
def test_layered_graphs_need_less_than_in_program_order(seed: int) -> None:
    problem = Problem.of(layered(200, seed))
    assert simulate(problem.graph, low_peak_order(problem)).peak_bytes < 0.97 * problem.plain.peak_bytes


def test_a_fixed_order_stays() -> None:
    graph = fan(3, 3, free_order=False)
    assert low_peak_order(Problem.of(graph)) == graph.plain_schedule


@settings(max_examples=60, deadline=None)
@given(graph=graphs(max_ops=10, free_order=True))
def test_the_reordered_step_has_the_same_memory(graph: Graph) -> None:
    order = low_peak_order(Problem.of(graph))
    reordered = in_order(Problem.of(graph), order)
    assert reordered.plain.bytes == simulate(graph, order).bytes
    assert reordered.graph.time_s == pytest.approx(graph.time_s)
