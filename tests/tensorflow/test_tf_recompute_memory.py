"""``recompute``: peaks measured in processes of their own."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from worker_process import worker

WORKER = Path(__file__).parent / "recompute_worker.py"


@functools.cache
def measured(network: str, mode: str, kind: str) -> dict[str, Any]:
    # With two threads for operations their order is another one each time, and a peak with it, by up to 15 %.
    found: dict[str, Any] = worker(WORKER, TF_NUM_INTEROP_THREADS="1").ask("measured", network, mode, kind)
    return found


@pytest.mark.thorough
@pytest.mark.parametrize(
    "mode", ["graph", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("eager", "split", "session"))]
)
def test_ten_segments_of_ten(mode: str) -> None:
    plain, found = measured("chain", mode, "plain"), measured("chain", mode, "recompute")
    assert found["sums"] == pytest.approx(plain["sums"], rel=1e-6)
    assert plain["peak_bytes"] >= 100 * plain["tensor_bytes"]
    # Nine outputs of segments, the ten results of one, and the gradient that comes in.
    assert found["peak_bytes"] <= 20 * found["tensor_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_a_hundred_in_one_call_in_segments(mode: str) -> None:
    """As little as ten calls of ten take: the segments are found, not named."""
    plain, found = measured("chain", mode, "plain"), measured("one_call", mode, "recompute")
    assert found["sums"] == pytest.approx(plain["sums"], rel=1e-6)
    assert found["peak_bytes"] <= 21 * found["tensor_bytes"]


@pytest.mark.slow
def test_nested_calls_take_less_than_any_one_level() -> None:
    """What the third run of an operation buys: five calls of four calls of five hold 3 + 4 + 5 tensors, not 19."""
    flat, nested = measured("chain", "graph", "recompute"), measured("nested_chain", "graph", "recompute")
    assert nested["sums"] == pytest.approx(flat["sums"], rel=1e-6)
    assert nested["peak_bytes"] <= 13 * nested["tensor_bytes"] < flat["peak_bytes"]


@pytest.mark.slow
def test_one_call_over_a_whole_network() -> None:
    """TensorFlow's own recomputation then has everything again at once, and saves nothing."""
    found = {kind: measured("model", "graph", kind) for kind in ("plain", "recompute", "recompute_grad")}
    assert found["recompute"]["sums"] == pytest.approx(found["plain"]["sums"], rel=1e-3)
    assert found["recompute"]["peak_bytes"] <= 0.2 * found["plain"]["peak_bytes"]
    assert found["recompute_grad"]["peak_bytes"] >= 0.98 * found["plain"]["peak_bytes"]


@pytest.mark.slow
def test_forty_thousand_operations_in_two_hundred_segments() -> None:
    found = measured("segments", "eager", "recompute")
    assert found["peak_bytes"] <= 410 * found["tensor_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
def test_twelve_residual_blocks(mode: str) -> None:
    """No more than TensorFlow's own recomputation, which gets the arguments of a block in the only way it can take."""
    found = {kind: measured("blocks", mode, kind) for kind in ("plain", "recompute", "recompute_grad")}
    assert found["recompute"]["sums"] == pytest.approx(found["plain"]["sums"], rel=1e-3)
    assert found["recompute"]["peak_bytes"] <= 0.2 * found["plain"]["peak_bytes"]
    assert found["recompute"]["peak_bytes"] <= 1.01 * found["recompute_grad"]["peak_bytes"]
