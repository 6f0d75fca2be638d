"""Runs of a schedule on several threads: each operation finds what it found, and blocks stay within the peak."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections import Counter

import pytest
from hypothesis import given, settings

from remat import Graph, Op, Tensor, simulate
from remat.core.validator import validate
from remat.tensorflow.peak.blocks import BlockEvent, StepBlocks
from remat.tensorflow.peak.executor import one_by_one, side_by_side
from remat.tensorflow.peak.spans import span_starts
from remat.testing import chain, graphs_with_schedules, random_graph, random_schedule


def running(run):
    """The positions that run after each event."""
    now: set[int] = set()
    for event in run:
        now ^= {max(event, ~event)}
        yield frozenset(now)


def begun(schedule, run):
    """The operations of a run, as they begin."""
    return [schedule[position] for position in run if position >= 0]


def held_bytes(graph, schedule, run):
    """Bytes of blocks after each event, and at last what is still there."""
    held: dict[int, int] = {}
    for event in StepBlocks.of(graph, schedule).events(run):
        if event.size_bytes:
            assert event.block not in held
            held[event.block] = event.size_bytes * event.pieces
        else:
            del held[event.block]
        yield sum(held.values())


def many_runs(seed):
    rng = random.Random(seed)
    graph = dataclasses.replace(random_graph(rng, rng.randint(3, 30)), free_order=True)
    schedule = random_schedule(graph, rng)
    return graph, schedule, span_starts(graph, schedule), rng.randint(1, 4)


@pytest.mark.parametrize("seed", range(60))
def test_each_operation_finds_what_it_found(seed):
    graph, schedule, starts, threads = many_runs(seed)
    (run,) = side_by_side(graph, schedule, starts, threads, [seed])

    order = begun(schedule, run)
    assert validate(graph, order) <= validate(graph, schedule)
    for start, stop in itertools.pairwise([*starts, len(schedule)]):
        assert sorted(order[start:stop]) == sorted(schedule[start:stop])
    assert Counter(run) == Counter(one_by_one(schedule)), "each begins and ends once"
    assert max(map(len, running(run))) <= threads
    span_of = [
        number for number, (a, b) in enumerate(itertools.pairwise([*starts, len(schedule)])) for _ in range(a, b)
    ]
    assert all(len({span_of[position] for position in now}) <= 1 for now in running(run)), "a barrier was passed"


@pytest.mark.parametrize("seed", range(60))
def test_blocks_of_any_run_stay_within_the_peak_of_the_schedule(seed):
    """What a span is for: whatever runs at once, and whatever cannot be written in place then."""
    graph, schedule, starts, threads = many_runs(seed)
    (run,) = side_by_side(graph, schedule, starts, threads, [seed])

    held = [0, *held_bytes(graph, schedule, run)]

    assert graph.pinned_bytes + max(held) <= simulate(graph, schedule).peak_bytes
    assert held[-1] == 0


@given(graphs_with_schedules())
@settings(max_examples=200, deadline=None)
def test_blocks_one_by_one_are_what_the_simulator_counts(case):
    graph, schedule = case
    held = [0, *held_bytes(graph, schedule, one_by_one(schedule))]
    peak_bytes = graph.pinned_bytes + max(held)
    # A list that grows while another shrinks is given back first; the simulator holds what is left of it.
    sizes = [graph.tensors[tensor].size_bytes for tensor in range(len(graph.tensors))]
    shrinks = any(sizes[source] != sizes[target] for op in graph.ops for source, target in op.in_place)

    assert peak_bytes <= simulate(graph, schedule).peak_bytes
    assert shrinks or peak_bytes == simulate(graph, schedule).peak_bytes
    assert held[-1] == 0


def test_runs_differ_where_the_schedule_leaves_them_open():
    line = chain(10, size_bytes=100)
    wide = Graph(tuple(Op(outputs=(n,)) for n in range(8)), tuple(Tensor(1) for _ in range(8)), free_order=False)

    first, second = side_by_side(wide, range(8), [0], 2, (1, 2))
    assert begun(range(8), first) != begun(range(8), second)
    assert list(side_by_side(wide, range(8), range(8), 2, [1])) == [one_by_one(range(8))]
    assert list(side_by_side(line, line.plain_schedule, [0], 4, [1])) == [one_by_one(line.plain_schedule)]


def test_what_another_operation_reads_is_not_written_over():
    """One operation may write its result into tensor 0, which a second one reads."""
    ops = (
        Op(outputs=(0,)),
        Op(inputs=(0,), outputs=(1,)),
        Op(inputs=(0,), outputs=(2,), in_place=((0, 2),)),
        Op(inputs=(1, 2), outputs=(3,)),
    )
    graph = Graph(ops, tuple(Tensor(8) for _ in range(4)), outputs=(3,), free_order=False)
    both = [0, ~0, 1, 2, ~1, ~2, 3, ~3]

    assert list(held_bytes(graph, graph.plain_schedule, one_by_one(graph.plain_schedule))) == [8, 16, 24, 16, 8, 0]
    assert list(held_bytes(graph, graph.plain_schedule, both)) == [8, 16, 24, 16, 24, 16, 8, 0]


def test_what_nobody_else_is_to_read_is_written_over_though_the_schedule_says_otherwise():
    """Operations 1 and 2 both read tensor 0; in the schedule the one that may write into it comes first."""
    ops = (
        Op(outputs=(0,)),
        Op(inputs=(0,), outputs=(1,), in_place=((0, 1),)),
        Op(inputs=(0,), outputs=(2,)),
        Op(inputs=(1, 2), outputs=(3,)),
    )
    graph = Graph(ops, tuple(Tensor(8) for _ in range(4)), outputs=(3,), free_order=False)
    other_first = [0, ~0, 2, ~2, 1, ~1, 3, ~3]

    assert list(held_bytes(graph, graph.plain_schedule, one_by_one(range(4)))) == [8, 16, 24, 16, 24, 16, 8, 0]
    assert list(held_bytes(graph, graph.plain_schedule, other_first)) == [8, 16, 24, 16, 8, 0]


def test_a_variable_takes_over_the_block_that_it_is_assigned():
    tensors = (Tensor(16), Tensor(16), Tensor(4))
    ops = (Op(outputs=(1, 2)), Op(inputs=(0, 1), kind="AssignVariableOp"), Op(inputs=(2,)))
    graph = Graph(ops, tensors, inputs=(0,), free_order=False)

    events = list(StepBlocks.of(graph, (0, 1, 2)).events(one_by_one((0, 1, 2))))

    assert BlockEvent(0, moves_to=0) in events
