"""Plans whose ops are held one by one: when the search for a planner's budget takes one, on plans made up by hand."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from dataclasses import dataclass

import pytest

from remat import InfeasibleBudget
from remat.core.plan import Plan, plan_for_schedule
from remat.fit import loop
from remat.fit.loop import Rounds, plan_within
from remat.fit.peaks import PeakRange
from remat.testing import chain

STEP = chain(3)


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch):
    monkeypatch.setattr(loop, "_behind_minima", OrderedDict())


@dataclass
class OrderedPlanner:
    """A plan for 100 - x bytes takes x more seconds; one by one it needs 10 bytes less and some seconds more.

    Attributes:
        order_s: those seconds, or None where plans cannot be run so.
        adds: what the device adds to a plan's tensors otherwise.
    """

    order_s: float | None
    adds: int = 12

    def find(self, budget_bytes: int) -> Plan:
        if budget_bytes < 40:
            raise InfeasibleBudget("too small", minimum_bytes=40, budget_bytes=budget_bytes, binding_op="op")
        size = min(budget_bytes, 100)
        plan = plan_for_schedule(STEP, STEP.plain_schedule, planner="by hand")
        more_s = 100.0 - size
        figures = {"time_s": 100.0 + more_s, "baseline_time_s": 100.0, "overhead": more_s / 100.0}
        return dataclasses.replace(plan, fingerprint=str(size), peak_bytes=size, budget_bytes=size, **figures)

    def real_peak(self, plan: Plan) -> PeakRange:
        return PeakRange.exactly(int(plan.fingerprint) + (2 if plan.one_by_one else self.adds))

    def within(self, target_bytes: int, one_by_one: int = 2) -> Plan:
        rounds = Rounds(6, 4, close_enough=0.02, one_by_one=one_by_one)
        return plan_within(target_bytes, 90, self.find, self.real_peak, rounds, order_time_s=lambda plan: self.order_s)


def test_a_plan_is_held_one_by_one_where_the_bytes_are_worth_the_time():
    taken = OrderedPlanner(order_s=1.0).within(80)

    assert taken.one_by_one
    assert taken.peak_bytes <= 80
    assert taken.time_s < OrderedPlanner(order_s=None).within(80).time_s - 1.0


@pytest.mark.parametrize("order_s", [11.0, None], ids=["dear", "not possible"])
def test_a_plan_is_left_in_spans_where_order_costs_more_than_its_bytes(order_s):
    taken = OrderedPlanner(order_s=order_s).within(80)

    assert not taken.one_by_one
    assert taken == OrderedPlanner(order_s=None).within(80)


def test_what_fits_only_one_by_one_is_not_refused():
    with pytest.raises(InfeasibleBudget):
        OrderedPlanner(order_s=None).within(45)
    taken = OrderedPlanner(order_s=50.0).within(45)

    assert taken.one_by_one
    assert taken.peak_bytes <= 45


def test_where_nothing_failed_what_fits_is_held_one_by_one_for_a_larger_budget():
    """The first plan is as close to the target as it has to be, and no dearer one was tried that failed."""
    planner = OrderedPlanner(order_s=1.0)
    rounds = Rounds(1, 1, close_enough=0.02, one_by_one=2)
    taken = plan_within(80, 68, planner.find, planner.real_peak, rounds, order_time_s=lambda plan: planner.order_s)

    assert taken.one_by_one
    assert 68 < int(taken.fingerprint) <= 78
    planner.order_s = 9.0  # More than a part in four of what the plan costs: the bytes are not even looked for.
    taken = plan_within(80, 68, planner.find, planner.real_peak, rounds, order_time_s=lambda plan: planner.order_s)
    assert not taken.one_by_one


def test_a_plan_that_fails_by_little_one_by_one_is_squeezed():
    planner = OrderedPlanner(order_s=1.0)
    made = []

    def squeezed(near: Plan) -> Plan:
        made.append(near)
        less = dataclasses.replace(near, fingerprint=str(int(near.fingerprint) - 2))
        return dataclasses.replace(less, time_s=near.time_s + 0.5)

    def find(budget_bytes: int) -> Plan:
        return planner.find(80 if budget_bytes >= 60 else min(50, budget_bytes))

    rounds = Rounds(6, 4, one_by_one=0, squeezes=1)
    taken = plan_within(81, 90, find, planner.real_peak, rounds, squeezed=squeezed, order_time_s=lambda plan: 1.0)

    assert [(near.fingerprint, near.one_by_one) for near in made] == [("80", True)]
    assert (taken.fingerprint, taken.one_by_one) == ("78", True)


@pytest.mark.parametrize("order_s", [1.0, None], ids=["held", "in spans"])
def test_a_budget_that_no_plan_keeps_is_refused_alike_however_plans_are_run(order_s):
    with pytest.raises(InfeasibleBudget) as refusal:
        OrderedPlanner(order_s).within(30)
    assert refusal.value.minimum_bytes == 52
