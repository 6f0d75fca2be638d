"""Between two barriers everything may run at once: what that holds at most, counted naively."""

from __future__ import annotations

import itertools
import random

import pytest

from remat import Graph, Op, Tensor, simulate
from remat.core.simulator import storage_lifetimes
from remat.tensorflow.peak.spans import alone_time_s, order_time_s, span_starts
from remat.testing import chain, random_graph, random_schedule

RESERVE = 0.05


def most_held(graph, schedule, start, stop):
    """Bytes where nothing that lives in the span is freed before its end, and all of it runs at once."""
    lives = storage_lifetimes(graph, schedule)
    held = sum(
        int(size)
        for size, birth, last, kept in zip(lives.size_bytes, lives.birth, lives.last, lives.kept, strict=True)
        if birth < stop and (kept or last >= start)
    )
    return graph.pinned_bytes + held + sum(graph.ops[index].workspace_bytes for index in schedule[start:stop])


@pytest.mark.parametrize("seed", range(60))
def test_a_span_holds_less_than_the_peak_in_any_order(seed):
    rng = random.Random(seed)
    graph = random_graph(rng, rng.randint(3, 30))
    schedule = random_schedule(graph, rng)
    limit = (1 - RESERVE) * simulate(graph, schedule).peak_bytes
    starts = span_starts(graph, schedule)

    assert starts[0] == 0
    for start, stop in itertools.pairwise([*starts, len(schedule)]):
        assert start < stop
        assert stop == start + 1 or most_held(graph, schedule, start, stop) <= limit
        # It is as long as it can be.
        assert stop == len(schedule) or most_held(graph, schedule, start, stop + 1) > limit


def test_where_memory_is_short_each_operation_waits_for_the_one_before():
    """A chain's forward pass and the end of its backward pass need no order; around the peak there is no choice."""
    graph = chain(10, size_bytes=100)

    assert simulate(graph, graph.plain_schedule).peak_step == 10
    assert span_starts(graph, graph.plain_schedule) == [0, 10, 11, 12, 14, 18]


def test_an_empty_schedule_has_no_span():
    assert span_starts(chain(1), ()) == []


def test_what_runs_alone_on_two_cores():
    """Two branches of 100 and 300 us, then 200 us that read both: a second core has work in 100 us of 500."""
    tensors = (Tensor(4),) * 4
    ops = (
        Op("start", outputs=(0,)),
        Op("short", inputs=(0,), outputs=(1,), time_s=100e-6),
        Op("long", inputs=(0,), outputs=(2,), time_s=300e-6),
        Op("both", inputs=(1, 2), outputs=(3,), time_s=200e-6),
    )
    graph = Graph(ops, tensors, outputs=(3,))
    schedule = graph.plain_schedule

    assert alone_time_s(graph, schedule, (0,)) == pytest.approx((2 * 5 - 6) / 6 * 0.18 * 600e-6)
    assert alone_time_s(graph, schedule, (0, 2)) == pytest.approx(0.18 * 600e-6)
    assert alone_time_s(graph, schedule, (0, 1, 2, 3)) == pytest.approx(0.18 * 600e-6)
    assert alone_time_s(graph, (), ()) == 0.0


def test_what_takes_long_alone_loses_little():
    """Cut into pieces for two cores, a product of ten milliseconds takes no tenth longer."""
    graph = Graph((Op("product", outputs=(0,), time_s=10e-3),), (Tensor(4),), outputs=(0,))

    assert alone_time_s(graph, graph.plain_schedule, (0,)) == pytest.approx(100e-6)


def side_by_side(*seconds):
    """Operations that read nothing, and one that reads them all, far below the step's peak."""
    count = len(seconds)
    ops = (
        *(Op(outputs=(number,), time_s=time_s) for number, time_s in enumerate(seconds)),
        Op(inputs=tuple(range(count)), outputs=(count,)),
        Op(inputs=(count,), outputs=(count + 1,)),
    )
    return Graph(ops, (*[Tensor(1)] * (count + 1), Tensor(1000)), (), (count + 1,), free_order=False)


def test_what_order_takes_is_what_operations_lose_that_have_another_one_beside_them():
    graph = side_by_side(1.0, 1.0)
    schedule = graph.plain_schedule

    assert order_time_s(graph, schedule, threads=2) == pytest.approx(2 * 20e-6)
    assert order_time_s(graph, schedule, threads=5) == pytest.approx(4 * 2 * 20e-6)
    assert order_time_s(graph, schedule, threads=1) == 0
    short = side_by_side(10e-6, 10e-6)
    assert order_time_s(short, short.plain_schedule, threads=2) == pytest.approx(2 * 0.3 * 10e-6)


def test_order_takes_nothing_where_each_operation_waits_for_another_one_already():
    graph = side_by_side(1.0)
    assert order_time_s(graph, graph.plain_schedule, threads=2) == 0
    uneven = side_by_side(1.0, 3.0)  # In 2 s of 4 the longer one is alone as it is.
    assert order_time_s(uneven, uneven.plain_schedule, threads=2) == pytest.approx(2 * 20e-6 / 2)
