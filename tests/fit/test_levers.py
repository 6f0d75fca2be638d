"""The choice between a step as it is and the step in slices, on steps whose figures are given."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import remat
from remat.core.graph import Graph, Op, Tensor
from remat.core.plan import Plan, Split, plan_from_json
from remat.core.simulator import simulate
from remat.fit.candidate import Candidate
from remat.fit.levers import Variant, fit_with_splits
from remat.fit.peaks import PeakRange
from remat.fit.request import Request

BOTH = ("recompute", "split")


def step(wide_bytes: int, extra_s: float = 0.0) -> Graph:
    """A tensor that is kept over a wide op; making it again takes 2 s of 10, and spares 10 bytes."""
    sizes = (10, wide_bytes, 1, 1)
    ops = (
        Op("kept", "op", (), (0,), 2.0),
        Op("wide", "op", (), (1,), 4.0 + extra_s),
        Op("loss", "op", (1,), (2,), 2.0),
        Op("last", "op", (0, 2), (3,), 2.0),
    )
    return Graph(ops, tuple(map(Tensor, sizes)), outputs=(3,), free_order=False)


class Given(Candidate):
    """A step whose real peak is the simulator's."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    @property
    def graph(self) -> Graph:
        return self._graph

    @property
    def plain_peak(self) -> PeakRange:
        return PeakRange.exactly(simulate(self._graph, self._graph.plain_schedule).peak_bytes)

    def real_peak(self, plan: Plan) -> PeakRange:
        return PeakRange.exactly(plan.peak_bytes)


PLAIN = Given(step(100))  # 111 bytes; 101 with a recomputation.


def variants(extra_s: float, most: int = 8) -> Callable[[int], Variant | None]:
    """The wide op in slices, each doubling of which takes some time more."""

    def variant(slices: int) -> Variant | None:
        if slices > most:
            return None
        added_s = extra_s * (slices.bit_length() - 1)
        split = Split(slices, 100, added_s, PLAIN.graph.fingerprint, ((1, 1),))
        return Variant(Given(step(100 // slices, added_s)), split)

    return variant


@pytest.mark.parametrize(
    ("budget", "extra_s", "slices", "recomputed"),
    [
        pytest.param(111, 0.1, None, 0, id="plain"),
        pytest.param(101, 0.1, 2, 0, id="a split is cheaper"),
        pytest.param(101, 9.0, None, 1, id="a recomputation is cheaper"),
        pytest.param(60, 0.1, 4, 0, id="more slices are cheaper than a recomputation"),
        pytest.param(52, 9.0, 2, 1, id="a recomputation beside slices"),
    ],
)
def test_the_cheapest_way_is_chosen(budget: int, extra_s: float, slices: int | None, recomputed: int) -> None:
    plan = fit_with_splits(PLAIN, Request(budget, levers=BOTH), variants(extra_s))

    assert plan.peak_bytes <= budget
    assert (None if plan.split is None else plan.split.slices) == slices
    assert plan.recomputed == recomputed
    assert (plan.baseline_peak_bytes, plan.baseline_time_s) == (111, 10.0)
    added_s = 0.0 if slices is None else extra_s * (slices.bit_length() - 1)
    assert plan.overhead == pytest.approx((added_s + 2.0 * recomputed) / 10)
    assert plan.overhead_lower_bound <= plan.overhead


def test_a_share_is_one_of_the_step_without_a_split() -> None:
    assert fit_with_splits(PLAIN, Request("50%", levers=BOTH), variants(0.1)).budget_bytes == 55


def test_the_error_names_the_smallest_peak_of_all_ways() -> None:
    with pytest.raises(remat.InfeasibleBudget) as caught:
        fit_with_splits(PLAIN, Request(5, levers=BOTH), variants(0.1))

    minimum_bytes = caught.value.minimum_bytes
    assert minimum_bytes < 30
    assert fit_with_splits(PLAIN, Request(minimum_bytes, levers=BOTH), variants(0.1)).peak_bytes <= minimum_bytes


def test_without_the_lever_nothing_is_recomputed() -> None:
    plan = fit_with_splits(PLAIN, Request(52, levers=("split",)), variants(9.0))
    assert plan.split is not None
    assert (plan.split.slices, plan.recomputed) == (4, 0)
    with pytest.raises(remat.InfeasibleBudget, match="nothing recomputed") as caught:
        fit_with_splits(PLAIN, Request(5, levers=("split",)), variants(9.0))
    assert caught.value.minimum_bytes == 23


def test_a_split_is_printed_and_kept_in_a_file() -> None:
    plan = fit_with_splits(PLAIN, Request(60, levers=BOTH), variants(0.1))

    assert "1 ops in 4 slices: 100 B between them become 25 B, for 2.00% more time" in str(plan)
    assert plan_from_json(plan.to_json() | {"schedule": list(plan.schedule)}) == plan
    assert plan.unsplit_fingerprint == PLAIN.graph.fingerprint != plan.fingerprint


@pytest.mark.parametrize("levers", [(), ("offload",), "split"])
def test_unknown_levers_are_refused(levers: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="levers="):
        Request(5, levers=levers).check("a test")
