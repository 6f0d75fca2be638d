"""How a budget is answered: where the planner counts what runs, by one search, whether it fits or not."""

from __future__ import annotations

import dataclasses

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


class Rounded(Counted):
    """An allocator adds a fifth to the plans of more work; what is seen around adds as much to all others, too."""

    is_exact = False
    polishes = 2

    def __init__(self, grows: float = 1.0) -> None:
        super().__init__()
        self.polished_for: list[int] = []
        self.seen: list[int | None] = []
        self._grows, self._grown = grows, 1.0

    def real_peak(self, plan: Plan) -> PeakRange:
        share = 1.2 if plan.planner == "more work" else self._grown
        return PeakRange.exactly(int(share * plan.peak_bytes))

    def polished(self, plan: Plan, budget_bytes: int, request: Request) -> Plan | None:
        self.polished_for.append(budget_bytes)
        smaller = super().find(budget_bytes, request)
        return dataclasses.replace(smaller, planner="more work", time_s=0.99 * plan.baseline_time_s)

    def looks_around(self, budget_bytes: int | None) -> bool:
        before, self._grown = self._grown, 1.0 if budget_bytes is None else self._grows
        self.seen.append(budget_bytes)
        return before != self._grown


def test_more_work_is_done_again_where_its_plan_is_over_the_budget() -> None:
    step = Rounded()
    plan = fit(step, Request(budget="60%"))

    first, second = step.polished_for
    assert second < first
    assert plan.planner == "more work"
    assert plan.peak_bytes <= PLAIN_BYTES * 60 // 100


class Squeezable(Rounded):
    """More work makes plans that fail, from which small changes make one that fits."""

    def squeezed(self, plan: Plan, target_bytes: int, request: Request) -> Plan | None:
        if plan.planner != "more work":
            return None
        return dataclasses.replace(self.find(target_bytes, request), planner="squeezed", time_s=plan.time_s)


def test_what_more_work_has_found_is_squeezed_where_it_is_over_the_budget() -> None:
    step = Squeezable()
    plan = fit(step, Request(budget="60%"))

    assert len(step.polished_for) == 1
    assert plan.planner == "squeezed"
    assert plan.peak_bytes <= PLAIN_BYTES * 60 // 100


def smallest_budget() -> int:
    with pytest.raises(InfeasibleBudget) as caught:
        fit(Counted(), Request(budget="1%"))
    return caught.value.minimum_bytes


class Unsteady(Rounded):
    """What is seen around adds to the highest peaks, and not to those that are expected."""

    def real_peak(self, plan: Plan) -> PeakRange:
        return PeakRange(plan.peak_bytes, int(self._grown * plan.peak_bytes))


def test_before_a_budget_is_refused_what_was_seen_around_is_forgotten() -> None:
    smallest = smallest_budget()
    step = Unsteady(grows=1.5)
    plan = fit(step, Request(budget=smallest), proves=False)

    assert step.seen == [smallest, None, smallest, None]
    assert plan.peak_bytes <= smallest


def test_a_budget_that_is_expected_to_be_broken_here_is_refused() -> None:
    smallest = smallest_budget()
    step = Rounded(grows=1.5)
    with pytest.raises(InfeasibleBudget, match=rf"lies in pieces .* where {smallest} \([^)]*\) may do") as caught:
        fit(step, Request(budget=smallest), proves=False)

    named = caught.value.minimum_bytes
    assert named == pytest.approx(1.5 * smallest, rel=0.01)
    assert step.seen[-1] is None, "as it was before"
    assert fit(step, Request(budget=named), proves=False).peak_bytes <= named


class Betrayed(Unsteady):
    """What more work finds fits elsewhere, and is expected to be over the budget here."""

    def real_peak(self, plan: Plan) -> PeakRange:
        if plan.planner != "more work":
            return super().real_peak(plan)
        return PeakRange.exactly(int((1.0 if self._grown == 1.0 else 2.0) * plan.peak_bytes))


def test_more_work_is_not_taken_where_its_plan_is_expected_to_break_the_budget_here() -> None:
    smallest = smallest_budget()
    elsewhere = fit(Betrayed(), Request(budget=smallest))
    plan = fit(Betrayed(grows=1.5), Request(budget=smallest))

    assert elsewhere.planner == "more work"
    assert plan.planner != "more work"
    assert plan.peak_bytes <= smallest


@pytest.mark.parametrize("grows", [1.5, 1.0])
def test_what_is_named_holds_here_whatever_was_asked_for(grows: float) -> None:
    class Unseeing(Rounded):
        """Nothing is seen within a budget that is smaller than what lies around."""

        def looks_around(self, budget_bytes: int | None) -> bool:
            return super().looks_around(budget_bytes if budget_bytes and budget_bytes > smallest // 2 else None)

    smallest = smallest_budget()
    for step in (Unseeing(grows), Rounded(grows)):
        with pytest.raises(InfeasibleBudget) as caught:
            fit(step, Request(budget="1%"), proves=False)
        named = caught.value.minimum_bytes
        assert named == pytest.approx(grows * smallest, rel=0.01)
        assert fit(step, Request(budget=named), proves=False).peak_bytes <= named


def test_a_refusal_names_what_can_be_kept_here_where_that_is_less() -> None:
    with pytest.raises(InfeasibleBudget, match=r"can be kept is \d+ bytes \([^)]*\)\. What binds") as caught:
        fit(Counted(), Request(budget="1%"))
    named = caught.value.minimum_bytes
    with pytest.raises(InfeasibleBudget, match=rf"can be kept is {named} bytes \([^)]*\), or \d+ \(") as caught:
        fit(Rounded(grows=0.8), Request(budget="1%"))
    assert caught.value.minimum_bytes == named
    here = int(str(caught.value).partition(", or ")[2].partition(" ")[0])
    assert here < 0.82 * named
    assert fit(Rounded(grows=0.8), Request(budget=here), proves=False).peak_bytes <= here


def test_a_cautious_request_is_planned_without_a_look_around() -> None:
    step = Rounded(grows=1.5)
    plan = fit(step, Request(budget="60%", is_cautious=True), proves=False)

    assert step.seen == []
    assert plan.peak_bytes <= PLAIN_BYTES * 60 // 100
