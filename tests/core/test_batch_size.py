"""The largest batch: exact for a fixed schedule, and one sample more does not fit."""

from __future__ import annotations

import pytest

import remat
from remat import Graph, Op, UnsupportedStep
from remat.planning.batch_size import largest_batches
from remat.testing import chain

WEIGHTS = 1000


def step(samples: int) -> Graph:
    """A chain whose activations take 10 bytes a sample, beside weights."""
    plain = chain(12, size_bytes=10 * samples, free_order=False)
    tensors = (*plain.tensors, remat.Tensor(WEIGHTS, role="parameter"))
    return Graph(plain.ops, tensors, (*plain.inputs, len(plain.tensors)), plain.outputs, plain.free_order)


def plain_peak(samples: int) -> int:
    return remat.simulate(step(samples), step(samples).plain_schedule).peak_bytes


def test_plain_batch_is_the_largest_that_fits_and_the_planned_one_is_larger() -> None:
    budget = plain_peak(50) + 7

    found = largest_batches(step, budget, batch_size=4, planner="sqrt_n")

    assert found.plain.batch_size == 50
    assert found.plain.peak_bytes == plain_peak(50) <= budget < plain_peak(51)
    assert found.plain.overhead == 0
    assert found.planned.batch_size > 60
    assert found.planned.peak_bytes <= budget
    assert found.planned.overhead > 0
    # It really is a batch that can be planned.
    remat.plan(step(found.planned.batch_size), budget, planner="sqrt_n")


def test_nothing_fits() -> None:
    found = largest_batches(step, WEIGHTS + 5, batch_size=4)

    assert (found.plain.batch_size, found.planned.batch_size) == (0, 0)
    assert found.plain.peak_bytes == plain_peak(1)


def test_sizes_that_are_rounded_are_corrected_by_replaying() -> None:
    def rounded(samples: int) -> Graph:
        # Steps of 7 samples: no straight line through two points.
        return step(7 * -(-samples // 7))

    budget = plain_peak(70)
    found = largest_batches(rounded, budget, batch_size=8, planner="sqrt_n")

    assert remat.simulate(rounded(found.plain.batch_size), rounded(1).plain_schedule).peak_bytes <= budget
    assert 60 <= found.plain.batch_size <= 70


def test_a_step_that_ignores_the_batch_size_is_refused() -> None:
    with pytest.raises(UnsupportedStep, match="does the callable use its batch_size"):
        largest_batches(lambda _: step(4), 10**6, batch_size=4)


def test_a_step_with_other_operations_is_refused() -> None:
    def grows(samples: int) -> Graph:
        plain = step(samples)
        return Graph((*plain.ops, *(Op("more") for _ in range(samples))), plain.tensors, plain.inputs, plain.outputs)

    with pytest.raises(UnsupportedStep, match="other operations at batch size 4"):
        largest_batches(grows, 10**6, batch_size=4)
