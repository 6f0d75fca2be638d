"""How a candidate changes a plan whose runs on the heap are over a target."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import tensorflow as tf

from remat import load_graph, simulate
from remat.fit.peaks import PeakRange
from remat.fit.request import Request
from remat.fit.variants import Variants
from remat.planning.find import find
from remat.tensorflow.loops.variants import Variant
from remat.tensorflow.peak import candidates
from remat.tensorflow.peak.allocator import AllocatorModel
from remat.tensorflow.peak.candidates import ExecutedFunction
from remat.tensorflow.peak.carried_out import carried_out

GRAPH = load_graph(Path(__file__).parents[2] / "benchmarks" / "graphs" / "u_net.json.gz")
MIB = 1 << 20
HEAP = AllocatorModel(min_counted_bytes=0, holes=(3 * MIB, 50 * MIB), threads=2)
QUICKLY = Request(budget="45%")
OPERATION = SimpleNamespace(name="", outputs=(), _control_outputs=())
STEP = SimpleNamespace(
    graph=GRAPH,
    operations=(OPERATION,) * len(GRAPH.ops),
    tensors=(SimpleNamespace(dtype=tf.resource),) * len(GRAPH.tensors),
)


def candidate_on(model: AllocatorModel) -> ExecutedFunction:
    """The U-Net's step on a device that allocates in some way."""
    return ExecutedFunction(Variants([lambda: Variant(STEP)]), model, 0)


def test_room_is_left_where_runs_are_over_the_target() -> None:
    candidate = candidate_on(HEAP)
    plan = candidate.find(simulate(GRAPH, GRAPH.plain_schedule).peak_bytes * 45 // 100, QUICKLY)
    target_bytes = candidate.real_peak(plan).highest_bytes * 98 // 100
    over_at = HEAP.over_at(GRAPH, carried_out(STEP, plan.schedule), target_bytes)
    squeezed = candidate.squeezed(plan, target_bytes, QUICKLY)

    assert over_at
    assert squeezed is not None
    assert squeezed.fingerprint == GRAPH.fingerprint
    assert squeezed.peak_bytes <= plan.peak_bytes
    assert plan.time_s < squeezed.time_s < 1.1 * plan.time_s
    bytes_ = simulate(GRAPH, squeezed.schedule).bytes
    for place, op in enumerate(squeezed.schedule):
        if op in over_at:
            assert bytes_[place] + over_at[op] <= target_bytes


def test_a_plan_is_squeezed_only_where_the_heap_is_known_and_rounds_are_quick() -> None:
    plan = find(GRAPH, "45%", thorough=False)
    with_any_past = candidate_on(dataclasses.replace(HEAP, holes=None))
    assert with_any_past.squeezed(plan, plan.peak_bytes * 98 // 100, QUICKLY) is None
    limited = dataclasses.replace(QUICKLY, time_limit_s=1.0)
    assert candidate_on(HEAP).squeezed(plan, plan.peak_bytes * 98 // 100, limited) is None
    assert candidate_on(HEAP).polished(plan, plan.peak_bytes, limited) is None


def with_threads(monkeypatch: pytest.MonkeyPatch, kernel: int, executor: int) -> None:
    monkeypatch.setattr(candidates, "kernel_threads", lambda: kernel)
    monkeypatch.setattr(candidates, "executor_threads", lambda: executor)


def test_what_order_takes_is_known_where_it_makes_steps_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = find(GRAPH, "45%", thorough=False)
    with_threads(monkeypatch, 2, 2)
    order_time_s = candidate_on(HEAP).order_time_s(plan)
    assert order_time_s is not None
    assert 0 < order_time_s < 0.1 * plan.time_s
    assert candidate_on(dataclasses.replace(HEAP, holes=None)).order_time_s(plan) is None
    with_threads(monkeypatch, 1, 2)
    assert candidate_on(HEAP).order_time_s(plan) is None, "a core idles while an operation of one thread runs alone"
    with_threads(monkeypatch, 1, 1)
    assert candidate_on(HEAP).order_time_s(plan) == 0


def test_less_is_reserved_where_the_order_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    candidate = candidate_on(HEAP)
    plan = find(GRAPH, "45%", thorough=False)
    in_spans = candidate.real_peak(plan)
    one_by_one = candidate.real_peak(dataclasses.replace(plan, one_by_one=True))
    of_heap = HEAP.peak_range(GRAPH, carried_out(STEP, plan.schedule), in_one_order=True)

    assert one_by_one.highest_bytes < in_spans.highest_bytes
    # What fits a target fits the budget with 1 % to spare; the target itself leaves 4.
    assert one_by_one.highest_bytes == int(of_heap.highest_bytes * 1.01 / 1.04)
    assert one_by_one.expected_bytes == of_heap.expected_bytes

    monkeypatch.setattr(AllocatorModel, "peak_range", lambda *_: PeakRange.exactly(104 * MIB))
    assert candidate.real_peak(plan).highest_bytes == pytest.approx(102.5 * MIB, abs=1), "no order changes it"


def test_what_is_made_of_a_plan_is_run_as_it_is() -> None:
    candidate = candidate_on(HEAP)
    plan = dataclasses.replace(find(GRAPH, "45%", thorough=False), one_by_one=True)
    target_bytes = candidate.real_peak(plan).highest_bytes * 99 // 100
    squeezed = candidate.squeezed(plan, target_bytes, QUICKLY)
    better = candidate.polished(plan, plan.peak_bytes * 11 // 10, QUICKLY)

    assert squeezed is not None
    assert better is not None
    assert squeezed.one_by_one
    assert better.one_by_one
