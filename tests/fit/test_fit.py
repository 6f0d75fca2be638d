"""How a budget is answered: where the planner counts what runs, by one search, whether it fits or not."""

from __future__ import annotations

from typing import Any

import pytest

from remat import Graph, InfeasibleBudget, simulate
from remat.core.plan import Plan
from remat.fit.candidate import Candidate
from remat.fit.fit import fit
from remat.fit.peaks import PeakRange
from remat.fit.request import Request
from remat.testing import chain

STEP = chain(12, size_bytes=1000, free_order=False)
PLAIN_BYTES = simulate(STEP, STEP.plain_schedule).peak_bytes


class Counted(Candidate):
    """Counts the searches; its real peak is the simulator's."""

    is_exact = True

    def __init__(self) -> None:
        self.budgets: list[int] = []

    @property
    def graph(self) -> Graph:
        return STEP

    @property
    def plain_peak(self) -> PeakRange:
        return PeakRange.exactly(PLAIN_BYTES)

    def real_peak(self, plan: Plan) -> PeakRange:
        return PeakRange.exactly(plan.peak_bytes)

    def find(self, budget_bytes: int, request: Request) -> Plan:
        self.budgets.append(budget_bytes)
        return super().find(budget_bytes, request)


def test_what_nothing_keeps_is_refused_by_one_search_and_what_is_named_is_kept() -> None:
    step = Counted()
    with pytest.raises(InfeasibleBudget) as caught:
        fit(step, Request(budget="1%"))
    assert step.budgets == [PLAIN_BYTES // 100]

    named = caught.value.minimum_bytes
    assert named < PLAIN_BYTES
    plan = fit(step, Request(budget=named))
    assert plan.peak_bytes <= named


def test_a_budget_that_fits_is_searched_for_once() -> None:
    step = Counted()
    plan = fit(step, Request(budget="60%"))
    assert step.budgets == [PLAIN_BYTES * 60 // 100]
    assert plan.peak_bytes <= 0.6 * PLAIN_BYTES


def test_what_is_resident_leaves_less_than_nothing() -> None:
    step = Counted()
    step.resident_bytes = 2 * PLAIN_BYTES
    with pytest.raises(InfeasibleBudget) as caught:
        fit(step, Request(budget=PLAIN_BYTES))
    assert 2 * PLAIN_BYTES < caught.value.minimum_bytes < 3 * PLAIN_BYTES


class Quick(Counted):
    """One whose real peak is above the planner's, and which is planned quickly near the smallest budget."""

    is_exact = False

    def __init__(self) -> None:
        super().__init__()
        self.searches: list[bool] = []

    def real_peak(self, plan: Plan) -> PeakRange:
        return PeakRange.exactly(plan.peak_bytes + 500)

    def quick_options(self, request: Request) -> dict[str, Any]:
        return {"thorough": False}

    def find(self, budget_bytes: int, request: Request) -> Plan:
        found = super().find(budget_bytes, request)
        self.searches.append(request.options.get("thorough", True))
        return found


def test_near_the_smallest_budget_quick_plans_are_enough_for_a_refusal_and_not_for_a_plan() -> None:
    step = Quick()
    with pytest.raises(InfeasibleBudget) as caught:
        fit(step, Request(budget="1%"))
    assert step.searches
    assert not any(step.searches)

    named = caught.value.minimum_bytes
    step = Quick()
    plan = fit(step, Request(budget=named))
    assert plan.peak_bytes <= named
    assert any(step.searches)
