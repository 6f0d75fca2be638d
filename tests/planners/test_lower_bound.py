"""The lower bound against brute force, and where it is exact."""

from __future__ import annotations

import math

import pytest
from brute_force import least_time_s
from hypothesis import given, settings
from hypothesis import strategies as st

from remat import Graph, Op, Tensor, simulate, validate
from remat.planners import overhead_lower_bound
from remat.testing import graphs


@settings(max_examples=150, deadline=None)
@given(graph=graphs(min_ops=2, max_ops=5, max_size_bytes=6), share=st.floats(0.4, 1.0))
def test_never_above_brute_force(graph: Graph, share: float) -> None:
    budget_bytes = int(share * simulate(graph, graph.plain_schedule).peak_bytes)
    bound = overhead_lower_bound(graph, budget_bytes)
    least = least_time_s(graph, budget_bytes, extra_runs=3)
    if least is not None:
        # Four extra runs or more could be cheaper only through ops that take no time.
        assert bound.time_s <= least - graph.time_s + 1e-6
    if math.isinf(bound.time_s):
        assert least is None


def stash(count: int) -> Graph:
    """``count`` tensors from pinned data, then one wide op, then a reader of each."""
    ops = [Op(f"make{i}", inputs=(0,), outputs=(1 + i,), time_s=float(1 + i)) for i in range(count)]
    wide = 1 + count
    ops.append(Op("wide", inputs=(0,), outputs=(wide,)))
    for i in range(count):
        ops.append(Op(f"use{i}", inputs=(1 + i,), outputs=(wide + 1 + i,)))
    sizes = [0, *[10] * count, 30, *[0] * count]
    return Graph(tuple(ops), tuple(Tensor(size) for size in sizes), (0,), (), free_order=False)


def test_exact_where_recomputation_reads_pinned_tensors_only() -> None:
    graph = stash(4)
    assert simulate(graph, graph.plain_schedule).peak_bytes == 70
    # Two of the four must go, the cheapest being 1 s and 2 s.
    assert overhead_lower_bound(graph, 50).time_s == pytest.approx(3.0)
    assert overhead_lower_bound(graph, 70).time_s == 0.0


def test_infinite_below_the_largest_op() -> None:
    assert overhead_lower_bound(stash(2), 29).time_s == math.inf


def test_the_meaning_says_when_it_rests_on_program_order() -> None:
    fixed = stash(3)
    free = Graph(fixed.ops, fixed.tensors, fixed.inputs, fixed.outputs, free_order=True)
    assert "program order" in overhead_lower_bound(free, 50).meaning
    assert "every legal schedule" in overhead_lower_bound(fixed, 50).meaning


def test_outputs_of_one_op_share_its_cost() -> None:
    """Both outputs come back with one run of 4 s: counting the op for each of them would claim 8 s."""
    tensors = tuple(Tensor(size) for size in (0, 10, 10, 30, 0))
    ops = (
        Op("pair", inputs=(0,), outputs=(1, 2), time_s=4.0),
        Op("wide", inputs=(0,), outputs=(3,)),
        Op("use", inputs=(1, 2), outputs=(4,)),
    )
    graph = Graph(ops, tensors, (0,), (), free_order=False)
    assert validate(graph, (0, 1, 0, 2)) == 30
    assert overhead_lower_bound(graph, 30).time_s == pytest.approx(4.0)


def test_in_place_bytes_are_not_counted_twice() -> None:
    """The wide op overwrites its input, so the stored tensor fits beside it and nothing must be recomputed."""
    tensors = tuple(Tensor(size) for size in (0, 10, 30, 30, 0))
    ops = (
        Op("make", inputs=(0,), outputs=(1,), time_s=1.0),
        Op("source", inputs=(0,), outputs=(2,), time_s=1.0),
        Op("wide", inputs=(2,), outputs=(3,), in_place=((2, 3),)),
        Op("use", inputs=(1,), outputs=(4,)),
    )
    graph = Graph(ops, tensors, (0,), (), free_order=False)
    assert simulate(graph, graph.plain_schedule).peak_bytes == 40
    assert overhead_lower_bound(graph, 30).time_s == pytest.approx(1.0)
