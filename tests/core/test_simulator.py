"""The simulator against hand-computed cases and against the validator."""

from __future__ import annotations

import time
from functools import reduce
from operator import add

import numpy as np
import pytest
from hypothesis import given, settings
from memory_cases import CASES, Case

from remat import Graph, InvalidSchedule, Op, Tensor, simulate, validate
from remat.core.schedule import Schedule
from remat.core.simulator import storage_lifetimes
from remat.testing import chain, graphs, graphs_with_schedules, random_graph, random_schedule


@pytest.mark.parametrize("name", CASES)
def test_bytes_of_every_step(name: str) -> None:
    case: Case = CASES[name]
    timeline = simulate(case.graph, case.schedule)
    assert timeline.bytes == case.bytes
    assert timeline.peak_bytes == max(case.bytes, default=case.graph.pinned_bytes)


def test_timeline_of_a_small_step() -> None:
    graph = Graph(
        ops=(
            Op("a", outputs=(1,), time_s=0.5),
            Op("b", inputs=(1,), outputs=(2, 3), time_s=0.25, workspace_bytes=10),
            Op("c", inputs=(1, 3), outputs=(4,), time_s=2.0),
        ),
        tensors=(Tensor(100, "x"), Tensor(5, "h"), Tensor(7, "unused"), Tensor(7, "g"), Tensor(1, "y")),
        inputs=(0,),
        outputs=(4,),
    )
    timeline = simulate(graph, (0, 1, 0, 2))
    assert timeline.bytes == (105, 129, 112, 113)
    assert timeline.peak_bytes == 129
    assert timeline.peak_step == 1
    assert timeline.live_at_peak == (2, 3, 1)
    assert timeline.time_s == 3.25
    assert all(type(count) is int for count in (*timeline.bytes, timeline.peak_bytes, timeline.peak_step))


def test_first_of_several_peaks_is_named() -> None:
    graph = Graph((Op(outputs=(0,)), Op(outputs=(1,))), (Tensor(4), Tensor(4)))
    assert simulate(graph, (0, 1)).peak_step == 0


def test_two_instances_of_one_root_stand_twice_at_the_peak() -> None:
    case = CASES["an old view keeps the old storage alive beside the recomputed root"]
    assert simulate(case.graph, case.schedule).live_at_peak == (0, 0)


def test_empty_schedule_holds_the_pinned_inputs() -> None:
    timeline = simulate(Graph((), (Tensor(9),), inputs=(0,)), ())
    assert (timeline.bytes, timeline.peak_bytes, timeline.peak_step) == ((), 9, None)
    assert (timeline.live_at_peak, timeline.time_s) == ((), 0.0)


def test_same_runs_in_another_order_take_exactly_as_long() -> None:
    times = [1e16, 1.0, 1.0, 0.5, 0.25]
    graph = Graph(tuple(Op(time_s=t) for t in times), ())
    # From Python 3.12 on ``sum`` makes up for rounding.
    assert reduce(add, times) != reduce(add, reversed(times))
    assert simulate(graph, (4, 3, 2, 1, 0)).time_s == simulate(graph, graph.plain_schedule).time_s == graph.time_s


def test_chain_by_hand() -> None:
    # Plain: the batch is pinned (1); activations 1..3 and the gradient in the making are the peak, at the first
    # backward op: 1 + 3 + 1.
    graph = chain(3)
    assert simulate(graph, graph.plain_schedule).bytes == (2, 3, 4, 5, 4, 3)
    # Recomputing activation 1 before the backward op of layer 2 drops it while layer 3 runs forward and backward.
    assert simulate(graph, (0, 1, 2, 3, 0, 4, 5)).bytes == (2, 3, 3, 4, 3, 4, 3)


@pytest.mark.parametrize(
    ("schedule", "rule"),
    [
        ((0, 3), "index out of range"),
        ((0, -1), "index out of range"),
        ((0, 0.5), "index out of range"),
        (("a",), "index out of range"),
        (((0, 1),), "index out of range"),
        ((1, 0), "unmade input"),
        ((0, 2), "unmade input"),
        ((0, 0, 2, 1, 1), "unmade input"),
    ],
)
def test_what_cannot_be_replayed_raises(schedule: Schedule, rule: str) -> None:
    graph = Graph(
        (Op("a", outputs=(0,)), Op("b", inputs=(0,), outputs=(1,)), Op("c", inputs=(1,))), (Tensor(1), Tensor(1))
    )
    with pytest.raises(InvalidSchedule) as caught:
        simulate(graph, schedule)
    assert caught.value.rule == rule


def test_part_of_a_step_can_be_simulated() -> None:
    assert simulate(chain(3), (0, 1)).bytes == (2, 3)


def test_numpy_schedule_is_taken() -> None:
    graph = chain(4)
    assert simulate(graph, np.arange(8)) == simulate(graph, graph.plain_schedule)  # type: ignore[arg-type]


@settings(max_examples=300, deadline=None)
@given(graphs_with_schedules(max_ops=10))
def test_simulator_and_validator_agree(pair: tuple[Graph, Schedule]) -> None:
    graph, schedule = pair
    timeline = simulate(graph, schedule)
    assert timeline.peak_bytes == validate(graph, schedule)
    assert len(timeline.bytes) == len(schedule)


@settings(max_examples=100, deadline=None)
@given(graphs_with_schedules(max_ops=10))
def test_lifetimes_add_up_to_the_timeline(pair: tuple[Graph, Schedule]) -> None:
    graph, schedule = pair
    lives = storage_lifetimes(graph, schedule)
    total = [graph.pinned_bytes + graph.ops[op].workspace_bytes for op in schedule]
    for size, birth, last, taken_over in zip(
        lives.size_bytes.tolist(), lives.birth.tolist(), lives.last.tolist(), lives.taken_over.tolist(), strict=True
    ):
        for step in range(birth, last + 1):
            total[step] += size
        if taken_over >= 0:
            assert lives.last[taken_over] == birth
            assert not lives.kept[taken_over]
            total[birth] -= min(size, int(lives.size_bytes[taken_over]))
    assert tuple(total) == simulate(graph, schedule).bytes


@settings(max_examples=100, deadline=None)
@given(graphs())
def test_what_lives_at_the_peak_explains_it(graph: Graph) -> None:
    timeline = simulate(graph, graph.plain_schedule)
    if timeline.peak_step is None:
        return
    op = graph.ops[graph.plain_schedule[timeline.peak_step]]
    sizes = [graph.tensors[tensor].size_bytes for tensor in timeline.live_at_peak]
    assert sizes == sorted(sizes, reverse=True)
    explained = graph.pinned_bytes + sum(sizes) + op.workspace_bytes
    assert explained >= timeline.peak_bytes
    if not op.in_place:
        assert explained == timeline.peak_bytes


def test_agree_on_larger_graphs() -> None:
    for seed in range(10):
        graph = random_graph(seed, 120)
        schedule = random_schedule(graph, seed, recompute=0.5)
        assert len(schedule) > len(graph.ops)
        assert simulate(graph, schedule).peak_bytes == validate(graph, schedule)


def test_long_chains_of_views() -> None:
    depth = 3_000
    views = (Tensor(4, alias_of=tensor) for tensor in range(depth))
    ops = (Op(outputs=(0,)), *(Op(inputs=(tensor,), outputs=(tensor + 1,)) for tensor in range(depth)))
    graph = Graph(ops, (Tensor(4), *views), outputs=(depth,))
    assert simulate(graph, graph.plain_schedule).bytes == (4,) * (depth + 1)
    assert validate(graph, graph.plain_schedule) == 4


def test_random_graphs_hold_every_feature() -> None:
    """The generators are only worth something if the tests above meet all of the memory model."""
    found: set[str] = set()
    for seed in range(200):
        graph = random_graph(seed, 8)
        read = {tensor for op in graph.ops for tensor in op.inputs}
        features = {
            "view": any(tensor.alias_of is not None for tensor in graph.tensors),
            "view of view": any(
                tensor.alias_of is not None and graph.tensors[tensor.alias_of].alias_of is not None
                for tensor in graph.tensors
            ),
            "view of input": any(
                tensor.alias_of is not None and graph.roots[number] in graph.inputs
                for number, tensor in enumerate(graph.tensors)
            ),
            "once": any(not op.recomputable for op in graph.ops),
            "workspace": any(op.workspace_bytes for op in graph.ops),
            "outputs": any(len(op.outputs) > 1 for op in graph.ops),
            "no output": any(not op.outputs for op in graph.ops),
            "unused": any(tensor not in read for op in graph.ops for tensor in op.outputs),
            "pinned": bool(graph.inputs),
            "after": any(op.after for op in graph.ops),
            "in_place": any(op.in_place for op in graph.ops),
            "fixed": not graph.free_order,
            "free": graph.free_order,
            "recomputes": len(random_schedule(graph, seed)) > len(graph.ops),
        }
        found |= {name for name, is_there in features.items() if is_there}
    assert found == set(features)


def test_twenty_thousand_steps_take_milliseconds() -> None:
    graph = random_graph(0, 12_000, free_order=False)
    repeatable = [op for op in range(12_000) if graph.ops[op].recomputable]
    schedule = (*graph.plain_schedule, *repeatable[:8_000])
    simulate(graph, schedule)
    seconds = []
    for _ in range(5):
        started = time.process_time()
        simulate(graph, schedule)
        seconds.append(time.process_time() - started)
    # Processor time, measured at 4 to 15 ms; the rest is room for a busy machine.
    assert min(seconds) < 0.05
