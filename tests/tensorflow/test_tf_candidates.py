"""How a candidate changes a plan whose runs on the heap are over a target."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

from remat import load_graph, simulate
from remat.fit.request import Request
from remat.fit.variants import Variants
from remat.planning.find import find
from remat.tensorflow.loops.variants import Variant
from remat.tensorflow.peak.allocator import AllocatorModel
from remat.tensorflow.peak.candidates import ExecutedFunction

GRAPH = load_graph(Path(__file__).parents[2] / "benchmarks" / "graphs" / "u_net.json.gz")
MIB = 1 << 20
HEAP = AllocatorModel(min_counted_bytes=0, holes=(3 * MIB, 50 * MIB), threads=2)
QUICKLY = Request(budget="45%")


def candidate_on(model: AllocatorModel) -> ExecutedFunction:
    """The U-Net's step on a device that allocates in some way."""
    step = SimpleNamespace(graph=GRAPH)
    return ExecutedFunction(Variants([lambda: Variant(step)]), model, 0)


def test_room_is_left_where_runs_are_over_the_target() -> None:
    candidate = candidate_on(HEAP)
    plan = candidate.find(simulate(GRAPH, GRAPH.plain_schedule).peak_bytes * 45 // 100, QUICKLY)
    target_bytes = candidate.real_peak(plan).highest_bytes * 98 // 100
    over_at = HEAP.over_at(GRAPH, plan.schedule, target_bytes)
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
