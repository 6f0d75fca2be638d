"""Between two barriers everything may run at once: what that holds at most, counted naively."""

from __future__ import annotations

import itertools
import random

import pytest

from remat import Graph, Op, Tensor, simulate
from remat.core.simulator import storage_lifetimes
from remat.tensorflow.peak.spans import share_alone, span_starts
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
    """Two branches of 1 and 3 s, then 2 s that read both: a second core has work in 1 s of 5."""
    tensors = (Tensor(4),) * 4
    ops = (
        Op("start", outputs=(0,)),
        Op("short", inputs=(0,), outputs=(1,), time_s=1.0),
        Op("long", inputs=(0,), outputs=(2,), time_s=3.0),
        Op("both", inputs=(1, 2), outputs=(3,), time_s=2.0),
    )
    graph = Graph(ops, tensors, outputs=(3,))
    schedule = graph.plain_schedule

    assert share_alone(graph, schedule, (0,)) == pytest.approx((2 * 5 - 6) / 6)
    assert share_alone(graph, schedule, (0, 2)) == 1.0
    assert share_alone(graph, schedule, (0, 1, 2, 3)) == 1.0
    assert share_alone(graph, (), ()) == 0.0
