"""What caches do to the seconds of a step, and memory that is fetched anew at each run."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

import remat.testing
from remat.core.graph import Graph, Op, Tensor
from remat.running import fresh_memory, step_time
from remat.running.calibration import cached_bytes_per_s
from remat.running.cost_model import DeviceProfile, OpSample, op_time_s
from remat.running.step_time import missed_bytes, step_time_s

MIB = 1 << 20
# Main memory takes a second for 1 GB, caches a tenth of it.
PROFILE = DeviceProfile("test", {"float32": 1e9}, 1e9, cached_bytes_per_s=1e10)


def graph_of(*ops: tuple[list[int], list[int]], sizes: list[int], time_s: float = 1.0, outputs: list[int]) -> Graph:
    """Ops by the tensors that they read and make; tensor 0 is pinned."""
    made = tuple(Op(f"op{n}", "op", tuple(reads), tuple(makes), time_s) for n, (reads, makes) in enumerate(ops))
    tensors = tuple(Tensor(size, f"t{n}") for n, size in enumerate(sizes))
    return Graph(made, tensors, (0,), tuple(outputs), False)


def test_what_was_made_a_moment_ago_is_in_the_cache() -> None:
    """A chain of four tensors uses two addresses in turn, so that after the first step nothing is missed."""
    chain = graph_of(([0], [1]), ([1], [2]), ([2], [3]), ([3], [4]), sizes=[0, *[MIB] * 3, 0], outputs=[4])

    assert missed_bytes(chain, chain.plain_schedule, 4 * MIB) == 0


def test_what_was_made_long_ago_is_missed() -> None:
    """The first tensor is read again when 4 MiB have passed through a cache of 2: it, and all that is made anew."""
    sizes = [0, *[MIB] * 5, 0]
    kept = graph_of(
        ([0], [1]), ([0], [2]), ([0], [3]), ([0], [4]), ([0], [5]), ([1, 2, 3, 4, 5], [6]), sizes=sizes, outputs=[6]
    )

    # Five made and five read again, each in the order in which the cache has dropped them.
    assert missed_bytes(kept, kept.plain_schedule, 2 * MIB) == pytest.approx(10 * MIB, rel=0.05)
    assert missed_bytes(kept, kept.plain_schedule, 8 * MIB) == 0


def test_a_tensor_larger_than_the_cache_is_missed_whole() -> None:
    graph = graph_of(([0], [1]), ([1], [2]), sizes=[0, 8 * MIB, 0], outputs=[2])

    assert missed_bytes(graph, graph.plain_schedule, MIB) == pytest.approx(16 * MIB, rel=0.05)


def test_views_touch_nothing() -> None:
    graph = graph_of(([0], [1]), ([1], [2]), sizes=[0, MIB, MIB], time_s=0.0, outputs=[2])

    assert missed_bytes(graph, graph.plain_schedule, MIB) == 0


def test_pinned_inputs_that_stay_in_the_cache_are_read_there() -> None:
    graph = graph_of(([0], [1]), sizes=[MIB, 0], outputs=[1])

    assert missed_bytes(graph, graph.plain_schedule, 2 * MIB) == 0
    assert missed_bytes(graph, graph.plain_schedule, MIB // 2) == MIB


def test_what_was_used_least_recently_leaves_the_cache() -> None:
    """A weight that every op reads stays, however much passes by."""
    ops = tuple(([0], [number]) for number in range(1, 9))
    sizes = [MIB, *[MIB] * 8]
    graph = graph_of(*ops, sizes=sizes, outputs=list(range(1, 9)))

    # Eight results are written to addresses of their own, in a cache of three tensors; the weight is read there.
    assert missed_bytes(graph, graph.plain_schedule, 3 * MIB) == pytest.approx(8 * MIB, rel=0.1)


def test_traffic_is_faster_in_caches_and_arithmetic_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_time, "cache_bytes", lambda: 4 * MIB)
    profile = replace(PROFILE, overhead_s=0.5)
    traffic_s = op_time_s(profile, 0.0, 2 * MIB)
    light = graph_of(([0], [1]), ([1], [2]), sizes=[MIB, MIB, MIB], time_s=traffic_s, outputs=[2])
    assert step_time_s(light, light.plain_schedule, profile) == pytest.approx(2 * (0.5 + 2 * MIB / 1e10))

    heavy = graph_of(([0], [1]), ([1], [2]), sizes=[MIB, MIB, MIB], time_s=7.0, outputs=[2])
    assert step_time_s(heavy, heavy.plain_schedule, profile) == pytest.approx(14.0)


def test_an_op_that_was_timed_alone_found_its_bytes_in_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_time, "cache_bytes", lambda: 64 * MIB)
    graph = graph_of(([0], [1]), ([1], [2]), sizes=[0, MIB, 0], time_s=MIB / 1e9, outputs=[2])

    assert step_time_s(graph, graph.plain_schedule, PROFILE, timed_alone=True) == pytest.approx(graph.time_s)
    assert step_time_s(graph, graph.plain_schedule, PROFILE) < graph.time_s


def test_bytes_in_no_cache_take_the_time_of_main_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of(([0], [1]), ([1], [2]), sizes=[0, 8 * MIB, 0], time_s=1.0, outputs=[2])
    monkeypatch.setattr(step_time, "cache_bytes", lambda: MIB)

    assert step_time_s(graph, graph.plain_schedule, PROFILE) == pytest.approx(2.0 + 16 * MIB / 1e9, rel=0.01)
    # Of all of the cache a process may have a part.
    monkeypatch.setattr(step_time, "cache_bytes", lambda: 64 * MIB)
    assert step_time_s(graph, graph.plain_schedule, PROFILE) < 2.0 + 9 * MIB / 1e9
    has_s = step_time_s(graph, graph.plain_schedule, PROFILE, cached_bytes=MIB)
    assert has_s == pytest.approx(2.0 + 16 * MIB / 1e9, rel=0.01)


def test_a_plan_that_holds_less_misses_less() -> None:
    """Half of a chain's peak, in a cache that holds this half: what recomputation touches is there."""
    graph = remat.testing.chain(32, size_bytes=MIB)
    plan = remat.plan(graph, "50%", planner="sqrt_n")
    assert plan.recomputed

    plain = missed_bytes(graph, graph.plain_schedule, 16 * MIB)
    assert missed_bytes(graph, plan.schedule, 16 * MIB) < 0.7 * plain


def test_large_steps_are_replayed_in_larger_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of(([0], [1]), ([1], [2]), sizes=[0, 64 * MIB, 0], outputs=[2])
    monkeypatch.setattr(step_time, "_MOST_LINES", 16)

    assert missed_bytes(graph, graph.plain_schedule, 32 * MIB) == pytest.approx(128 * MIB, rel=0.05)


def test_the_last_level_cache_is_the_machines() -> None:
    assert step_time.cache_bytes() >= MIB


FETCHES = """
from remat.running import fresh_memory
print(fresh_memory.gives_back(), fresh_memory.fetched_bytes([fresh_memory.KEPT_BYTES, 1, 40 << 20]))
"""


def fetches(**environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", FETCHES], capture_output=True, text=True, check=True, env={**os.environ, **environment}
    )
    return done.stdout.split()


def test_only_large_blocks_are_fetched_anew_and_only_where_the_library_gives_them_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fresh_memory, "gives_back", lambda: True)
    assert fresh_memory.fetched_bytes([fresh_memory.KEPT_BYTES, 1, 40 << 20, 50 << 20]) == 90 << 20
    assert fresh_memory.fetched_bytes([fresh_memory.KEPT_BYTES]) == 0

    monkeypatch.setattr(fresh_memory, "gives_back", lambda: False)
    assert fresh_memory.fetched_bytes([40 << 20]) == 0


@pytest.mark.skipif(os.confstr("CS_GNU_LIBC_VERSION") is None, reason="the settings are those of glibc")
def test_whether_blocks_are_given_back_is_tried_in_the_process_itself() -> None:
    assert fetches() == ["True", str(40 << 20)]
    assert fetches(MALLOC_MMAP_MAX_="0", MALLOC_TRIM_THRESHOLD_="8000000000") == ["False", "0"]


def test_fresh_pages_come_at_some_rate() -> None:
    rate = fresh_memory.measured_bytes_per_s()
    assert rate is not None
    assert 1e6 < rate < 1e13


def test_the_rate_in_caches_is_that_of_the_vectors_that_fit() -> None:
    def addition(elements: int, time_s: float) -> OpSample:
        return OpSample(float(elements), 12.0 * elements, "float32", time_s)

    samples = [addition(2**20, 1e-4), addition(2**22, 4e-4), OpSample(2e9, 12e6, "float32", 1e-6)]
    assert cached_bytes_per_s(samples, 32 * MIB) == pytest.approx(12 * 2**20 / 1e-4)
    assert cached_bytes_per_s(samples, 8 * MIB) is None
