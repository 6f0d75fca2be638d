"""The search for a planner's budget, on plans and peaks made up by hand."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections import OrderedDict
from dataclasses import dataclass

import pytest

from remat import Graph, InfeasibleBudget, Op, Tensor
from remat.core.plan import Plan, plan_for_schedule
from remat.fit import loop
from remat.fit.loop import Rounds, plan_within
from remat.fit.peaks import PeakRange
from remat.fit.tried_plans import TriedPlans

# A chain whose last op reads what the first one made: it can be kept, or made again at 10 bytes less.
GRAPH = Graph(
    ops=(
        Op(outputs=(0,), time_s=1.0),
        Op(inputs=(0,), outputs=(1,), time_s=1.0),
        Op(inputs=(1,), outputs=(2,), time_s=1.0),
        Op(inputs=(0, 2), outputs=(3,), time_s=1.0),
    ),
    tensors=(Tensor(10), Tensor(40), Tensor(40), Tensor(10)),
    outputs=(3,),
    free_order=False,
)
KEEP, REMAKE = (0, 1, 2, 3), (0, 1, 2, 0, 3)
KEPT_BYTES, REMADE_BYTES = 90, 80


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch):
    monkeypatch.setattr(loop, "_behind_minima", OrderedDict())


def planned(budget_bytes: int) -> Plan:
    if budget_bytes >= KEPT_BYTES:
        return plan_for_schedule(GRAPH, KEEP, planner="by hand")
    if budget_bytes >= REMADE_BYTES:
        return plan_for_schedule(GRAPH, REMAKE, planner="by hand")
    raise InfeasibleBudget("too small", minimum_bytes=REMADE_BYTES, budget_bytes=budget_bytes, binding_op="op 2")


def search(target_bytes: int, **peaks: PeakRange) -> Plan:
    def real_peak(plan: Plan) -> PeakRange:
        return peaks["keep" if plan.schedule == KEEP else "remake"]

    return plan_within(target_bytes, target_bytes, planned, real_peak, rounds=Rounds(6, 4))


def test_the_cheapest_plan_that_holds_is_taken():
    found = search(100, keep=PeakRange(95, 99), remake=PeakRange(85, 88))

    assert found.schedule == KEEP
    assert found.peak_bytes == 95


def test_a_plan_that_the_device_rounds_above_the_target_is_given_up():
    found = search(100, keep=PeakRange(105, 120), remake=PeakRange(90, 97))

    assert found.schedule == REMAKE
    assert found.peak_bytes == 90


def test_what_is_only_likely_to_fit_is_taken_with_a_warning(caplog):
    found = search(100, keep=PeakRange(99, 130), remake=PeakRange(88, 110))

    assert found.schedule == REMAKE
    assert found.peak_bytes == 88
    assert "close to the smallest possible one" in caplog.text
    assert "110 bytes" in caplog.text or "110 B" in caplog.text


def test_what_is_as_likely_to_overrun_is_refused():
    with pytest.raises(InfeasibleBudget) as caught:
        search(100, keep=PeakRange(99, 130), remake=PeakRange(95, 110))

    assert caught.value.minimum_bytes == 110


def test_the_error_names_a_target_that_can_be_held():
    peaks = {"keep": PeakRange(130, 140), "remake": PeakRange(110, 125)}
    with pytest.raises(InfeasibleBudget) as caught:
        search(100, **peaks)

    assert caught.value.minimum_bytes == 125
    assert caught.value.binding_op == "op 2"
    assert search(125, **peaks).schedule == REMAKE


@dataclass
class SmoothPlanner:
    """Meets every budget from 40 to 200 bytes, each saved byte at the same price; counts how often it is asked."""

    price_s: float = 0.1
    asked: int = 0

    def plan(self, budget_bytes: int) -> Plan:
        if budget_bytes < 40:
            raise InfeasibleBudget("too small", minimum_bytes=40, budget_bytes=budget_bytes, binding_op="op 0")
        self.asked += 1
        spent = min(160, 200 - budget_bytes)
        return dataclasses.replace(
            plan_for_schedule(GRAPH, (0,) * spent + KEEP, planner="by hand"),
            peak_bytes=budget_bytes,
            time_s=4.0 + self.price_s * spent,
        )


@pytest.mark.parametrize("rate", [0.4, 0.7, 1.0, 1.3])
def test_a_real_peak_that_falls_more_slowly_than_the_budget_is_met_closely(rate: float):
    """A compiler adds buffers of its own, which no budget of the planner takes away."""
    planner = SmoothPlanner()

    def real_peak(plan: Plan) -> PeakRange:
        return PeakRange(*[int(150 + rate * (plan.peak_bytes - 200))] * 2)

    found = plan_within(110, 140, planner.plan, real_peak, rounds=Rounds(4, 0))

    assert 100 <= found.peak_bytes <= 110
    assert planner.asked <= 4


@pytest.mark.parametrize(("least_gain", "asked"), [(0.0, 5), (0.03, 3)])
def test_rounds_that_can_win_next_to_nothing_are_left_out(least_gain: float, asked: int):
    """The plan that fits leaves half of the budget, but the one that does not would save a thousandth of the time."""
    planner = SmoothPlanner(price_s=1e-4)

    def real_peak(plan: Plan) -> PeakRange:
        return PeakRange.exactly(plan.peak_bytes if plan.peak_bytes < 65 else 300)

    found = plan_within(120, 180, planner.plan, real_peak, rounds=Rounds(6, 0, least_gain))

    assert found.peak_bytes <= 65
    assert planner.asked == asked


@pytest.mark.parametrize(("aim", "asked"), [(1.0, 3), (0.98, 2)])
def test_a_guess_below_the_target_is_met_though_the_peak_grows_by_leaps(aim: float, asked: int):
    planner = SmoothPlanner()

    def real_peak(plan: Plan) -> PeakRange:
        return PeakRange.exactly(plan.peak_bytes + (20 if plan.peak_bytes > 100 else 22))

    found = plan_within(110, 140, planner.plan, real_peak, rounds=Rounds(6, 0, aim=aim))

    assert 104 <= found.peak_bytes <= 110
    assert planner.asked == asked


@pytest.mark.parametrize(("by_share", "asked"), [(False, 3), (True, 2)])
def test_a_guess_falls_by_the_share_where_a_device_needs_twice_the_tensors(by_share: bool, asked: int):
    """By the bytes that are too many the second guess would be 140 - 66."""
    planner = SmoothPlanner()

    def real_peak(plan: Plan) -> PeakRange:
        return PeakRange.exactly(2 * plan.peak_bytes)

    found = plan_within(214, 140, planner.plan, real_peak, rounds=Rounds(6, 0, by_share=by_share))

    assert 204 <= found.peak_bytes <= 214
    assert planner.asked == asked


def test_where_a_smaller_plan_needs_more_the_next_lies_between():
    """Further down nothing fits until the smallest of all, which costs far more."""
    planner = SmoothPlanner()

    def real_peak(plan: Plan) -> PeakRange:
        if plan.peak_bytes >= 140:
            return PeakRange.exactly(130)
        return PeakRange.exactly(150 if plan.peak_bytes < 125 else 108)

    found = plan_within(110, 140, planner.plan, real_peak, rounds=Rounds(4, 4))

    assert found.peak_bytes == 108
    assert planner.asked == 3


def test_between_the_smallest_plan_and_one_that_failed_a_cheaper_one_is_looked_for():
    def real_peak(plan: Plan) -> PeakRange:
        return PeakRange(*[plan.peak_bytes if plan.peak_bytes < 90 else 300] * 2)

    found = plan_within(120, 180, SmoothPlanner().plan, real_peak, rounds=Rounds(1, 4))

    assert 70 <= found.peak_bytes < 90


def test_the_minimum_that_an_error_names_can_be_asked_for_though_the_planner_finds_another_plan():
    peaks = iter([130, 115, 140, 125])
    real: dict[tuple[int, ...], int] = {}
    numbers = itertools.count()

    def never_the_same(budget_bytes: int) -> Plan:
        if budget_bytes < 40:
            raise InfeasibleBudget("too small", minimum_bytes=40, budget_bytes=budget_bytes, binding_op="op 0")
        schedule = (0,) * next(numbers) + KEEP
        return dataclasses.replace(plan_for_schedule(GRAPH, schedule, planner="by hand"), peak_bytes=budget_bytes)

    def real_peak(plan: Plan) -> PeakRange:
        if plan.schedule not in real:
            real[plan.schedule] = next(peaks)
        return PeakRange(*[real[plan.schedule]] * 2)

    with pytest.raises(InfeasibleBudget) as caught:
        plan_within(100, 100, never_the_same, real_peak, rounds=Rounds(1, 1))

    assert caught.value.minimum_bytes == 115
    found = plan_within(115, 115, never_the_same, real_peak, rounds=Rounds(1, 1))
    assert found.peak_bytes == 115


@pytest.mark.parametrize("target_bytes", [1, 50, 59])
def test_the_minimum_that_an_error_names_does_not_depend_on_what_was_asked_for(target_bytes):
    """What is suggested is looked at wherever it may have the smallest peak, also far above the target."""

    def real_peak(plan: Plan) -> PeakRange:
        return PeakRange.exactly(plan.peak_bytes if plan.planner == "suggested" else 120)

    small = dataclasses.replace(plan_for_schedule(GRAPH, (0, *KEEP), planner="suggested"), peak_bytes=60)
    large = dataclasses.replace(plan_for_schedule(GRAPH, (0, 0, *KEEP), planner="suggested"), peak_bytes=150)
    for options in ({"suggestions": lambda: [large, small]}, {"likely": lambda: [large, small]}):
        with pytest.raises(InfeasibleBudget) as caught:
            plan_within(target_bytes, target_bytes, planned, real_peak, Rounds(6, 4), **options)
        assert caught.value.minimum_bytes == 60


@pytest.mark.parametrize(("last", "held"), [(0, 40), (4, 100)])
def test_where_a_suggestion_alone_fits_cheaper_plans_are_looked_for_above_it(last, held):
    """The one that leaves more than half of the target unused is not the end: twice as much as planned is needed."""

    def plan(budget_bytes: int) -> Plan:
        again = (0,) * (100 - min(100, budget_bytes))
        return dataclasses.replace(
            plan_for_schedule(GRAPH, (*again, *KEEP), planner="by hand"), peak_bytes=budget_bytes
        )

    found = plan_within(
        100,
        100,
        plan,
        lambda plan: PeakRange.exactly(2 * plan.peak_bytes),
        Rounds(1, last),
        suggestions=lambda: [dataclasses.replace(plan(20), planner="blocks")],
    )
    assert found.peak_bytes == held
    assert (found.planner == "blocks") == (not last)


@pytest.mark.parametrize(
    ("peaks", "asked"),
    [((100, 90, 80, 70, 60, 50), 6), ((100, 90, 80, 70, 75, 50), 5), ((60, 90, 80, 70, 65, 50), 4)],
    ids=["falling", "rising at last", "risen before"],
)
def test_plans_far_from_the_fewest_bytes_are_tried_while_real_peaks_fall(peaks, asked):
    real: dict[int, int] = {}

    def plan(budget_bytes: int) -> Plan:
        if budget_bytes < 1000:
            raise InfeasibleBudget("too small", minimum_bytes=1000, budget_bytes=budget_bytes, binding_op="op 0")
        schedule = (0,) * (budget_bytes - 1000) + KEEP
        return dataclasses.replace(plan_for_schedule(GRAPH, schedule, planner="by hand"), peak_bytes=budget_bytes)

    def real_peak(plan: Plan) -> PeakRange:
        return PeakRange.exactly(real.setdefault(plan.peak_bytes, peaks[len(real)] if len(real) < len(peaks) else 999))

    with pytest.raises(InfeasibleBudget) as caught:
        plan_within(10, 10, plan, real_peak, Rounds(1, 6))
    assert sorted(real) == [1000, 1020, 1100, 1170, 1200, 1300][:asked]
    assert caught.value.minimum_bytes == min(peaks[:asked])


def test_a_later_error_names_no_more_than_an_earlier_one():
    """Where a planner finds other plans the next time, the plan behind the first error still counts."""
    real = {KEEP: 115, REMAKE: 140}
    schedules = iter(real)

    def another_each_time(budget_bytes: int) -> Plan:
        if budget_bytes < 40:
            raise InfeasibleBudget("too small", minimum_bytes=40, budget_bytes=budget_bytes, binding_op="op 0")
        return dataclasses.replace(plan_for_schedule(GRAPH, next(schedules), planner="by hand"), peak_bytes=90)

    def real_peak(plan: Plan) -> PeakRange:
        return PeakRange.exactly(real[plan.schedule])

    for target_bytes in (10, 5):
        with pytest.raises(InfeasibleBudget) as caught:
            plan_within(target_bytes, 40, another_each_time, real_peak, Rounds(1, 0))
        assert caught.value.minimum_bytes == 115


@pytest.mark.parametrize("target_bytes", [41, 60, 75, 90, 130])
def test_a_plan_does_not_depend_on_what_the_process_has_planned_before(target_bytes):
    """Where each of several processes plans, all have to come to the same plan."""

    def real_peak(plan: Plan) -> PeakRange:
        return PeakRange.exactly(plan.peak_bytes + len(plan.schedule) // 2 + (7 if plan.peak_bytes > 60 else 0))

    def outcome() -> tuple[int, ...] | int:
        try:
            planner = SmoothPlanner()
            return plan_within(target_bytes, target_bytes, planner.plan, real_peak, rounds=Rounds(6, 4)).schedule
        except InfeasibleBudget as error:
            return error.minimum_bytes

    before = outcome()
    for other_bytes in (20, 35, 50, 70, 110):
        with contextlib.suppress(InfeasibleBudget):
            plan_within(other_bytes, other_bytes, SmoothPlanner().plan, real_peak, rounds=Rounds(6, 4))
    assert outcome() == before


@pytest.mark.parametrize("target_bytes", [1, 25, 39, 41])
def test_the_minimum_that_an_error_names_can_be_kept_by_a_process_that_knows_nothing(monkeypatch, target_bytes):
    def real_peak(plan: Plan) -> PeakRange:
        return PeakRange.exactly(plan.peak_bytes + (3 * len(plan.schedule)) % 5)

    try:
        plan_within(target_bytes, target_bytes, SmoothPlanner().plan, real_peak, rounds=Rounds(6, 4))
    except InfeasibleBudget as error:
        minimum_bytes = error.minimum_bytes
    else:
        pytest.fail(f"{target_bytes} bytes are kept, so this shows nothing")
    monkeypatch.setattr(loop, "_behind_minima", OrderedDict())
    found = plan_within(minimum_bytes, minimum_bytes, SmoothPlanner().plan, real_peak, rounds=Rounds(6, 4))

    assert found.peak_bytes <= minimum_bytes


@pytest.mark.parametrize(("price_s", "asked"), [(0.001, 1), (0.1, 2)])
def test_a_plan_that_costs_next_to_nothing_ends_the_search(price_s, asked):
    """It leaves a sixth of the target unused, but less than least_gain is to be won there."""
    budgets = []

    def find(budget_bytes: int) -> Plan:
        budgets.append(budget_bytes)
        plan = SmoothPlanner(price_s).plan(budget_bytes)
        return dataclasses.replace(plan, overhead=plan.time_s / 4.0 - 1)

    plan_within(120, 100, find, lambda plan: PeakRange.exactly(plan.peak_bytes), Rounds(6, 4, 0.03))
    assert len(budgets) == asked


def test_a_budget_without_a_plan_is_searched_once():
    asked = []

    def find(budget_bytes: int) -> Plan:
        asked.append(budget_bytes)
        return planned(budget_bytes)

    with pytest.raises(InfeasibleBudget):
        plan_within(50, 50, find, lambda _: PeakRange.exactly(200), rounds=Rounds(6, 4))
    assert len(asked) == len(set(asked))


def test_nothing_is_searched_for_below_the_smallest_budget_that_was_named():
    """A thorough search in vain takes the longest: half a minute for a Mamba of 1,820 ops, for each of the guesses."""
    refused = []

    def find(budget_bytes: int) -> Plan:
        try:
            return planned(budget_bytes)
        except InfeasibleBudget as error:
            refused.append((budget_bytes, error.minimum_bytes))
            raise

    with pytest.raises(InfeasibleBudget):
        plan_within(1, 1, find, lambda plan: PeakRange.exactly(plan.peak_bytes), rounds=Rounds(6, 4))
    ((budget_bytes, named_bytes),) = refused
    assert budget_bytes < named_bytes


@pytest.mark.parametrize(("between", "found_bytes"), [(0, 60), (1, 72), (4, 78)])
def test_where_an_allocator_adds_more_to_one_plan_than_to_its_neighbours_the_gaps_are_looked_into(between, found_bytes):
    """Of plans from 60 to 95 bytes, each cheaper than the one before, three fit a target of 100."""
    asked = []

    def find(budget_bytes: int) -> Plan:
        asked.append(budget_bytes)
        if budget_bytes < 60:
            raise InfeasibleBudget("too small", minimum_bytes=60, budget_bytes=budget_bytes, binding_op="op 0")
        size = min(95, budget_bytes)
        made = plan_for_schedule(GRAPH, KEEP, planner="by hand", budget_bytes=budget_bytes)
        return dataclasses.replace(made, fingerprint=str(size), peak_bytes=size, time_s=200.0 - size)

    def real_peak(plan: Plan) -> PeakRange:
        return PeakRange.exactly(99 if plan.peak_bytes in (60, 72, 78) else 110)

    found = plan_within(100, 95, find, real_peak, Rounds(2, 4, least_gain=1.0, between=between))
    assert int(found.fingerprint) == found_bytes, asked


def test_far_above_that_minimum_the_search_goes_on():
    """The plan behind the minimum fits a larger budget, too, but cheaper ones do as well."""
    planner = SmoothPlanner()

    def real_peak(plan: Plan) -> PeakRange:
        return PeakRange.exactly(plan.peak_bytes + (60 if plan.peak_bytes > 80 else 0))

    with pytest.raises(InfeasibleBudget) as caught:
        plan_within(30, 30, planner.plan, real_peak, rounds=Rounds(6, 1))
    found = plan_within(130, 130, planner.plan, real_peak, rounds=Rounds(6, 4))

    assert caught.value.minimum_bytes == 40 < found.peak_bytes <= 80


@pytest.mark.parametrize(("seconds", "chosen"), [(0.8, "small"), (0.97, "large"), (None, "large")])
def test_a_plan_whose_run_is_expected_to_be_much_faster_is_taken(seconds, chosen):
    """What is recomputed may cost less than the memory that it saves."""

    def way(name: str, size_bytes: int, time_s: float) -> Plan:
        plan = plan_for_schedule(GRAPH, KEEP, planner="by hand")
        return dataclasses.replace(plan, fingerprint=name, peak_bytes=size_bytes, time_s=time_s, overhead=time_s - 1)

    too_large, large, small = way("too large", 110, 1.0), way("large", 90, 1.03), way("small", 40, 1.14)
    expected = {"large": 1.0, "small": seconds}
    found = plan_within(
        100,
        120,
        lambda budget_bytes: too_large if budget_bytes >= 110 else large,
        lambda plan: PeakRange.exactly(plan.peak_bytes),
        Rounds(6, 4),
        likely=lambda: [small],
        expected_s=lambda plan: expected[plan.fingerprint],
    )
    assert found.fingerprint == chosen


@pytest.mark.parametrize("has_likely", [True, False])
def test_a_likely_plan_that_fits_leaves_room_for_a_cheaper_one(has_likely):
    """Of three ways to write a step, far apart in bytes, guesses often lead to one that is known to be too large."""

    def way(name: str, size_bytes: int, time_s: float) -> Plan:
        plan = plan_for_schedule(GRAPH, KEEP, planner="by hand")
        return dataclasses.replace(plan, fingerprint=name, peak_bytes=size_bytes, time_s=time_s, overhead=time_s - 1)

    large, middle, small = way("large", 70, 1.1), way("middle", 50, 1.2), way("small", 30, 1.9)
    real = {"large": 110, "middle": 90, "small": 60}
    asked = []

    def plan(budget_bytes: int) -> Plan:
        return large if budget_bytes >= 70 else middle if budget_bytes >= 50 else small

    def real_peak(one: Plan) -> PeakRange:
        asked.append(one.fingerprint)
        return PeakRange.exactly(real[one.fingerprint])

    likely = (lambda: [small]) if has_likely else tuple
    found = plan_within(100, 130, plan, real_peak, Rounds(6, 4, 0.03), likely=likely)

    assert found.fingerprint == "middle"
    assert asked == (["large", "small", "middle"] if has_likely else ["large", "middle"])


@pytest.mark.parametrize(("close_enough", "asked"), [(0.05, 1), (0.02, 2)])
def test_a_search_ends_as_close_to_the_target_as_it_is_to(close_enough, asked):
    budgets = []

    def find(budget_bytes):
        budgets.append(budget_bytes)
        return dataclasses.replace(planned(REMADE_BYTES), fingerprint=str(len(budgets)), budget_bytes=budget_bytes)

    plan_within(
        100, 80, find, lambda _: PeakRange.exactly(96 + len(budgets) // 2), Rounds(2, 0, 0.0, close_enough=close_enough)
    )
    assert len(budgets) == asked


def test_the_plan_has_the_largest_budget_that_leads_to_it():
    """What is looked for with more work afterwards may then use all of it."""
    asked = []

    def find(budget_bytes):
        asked.append(budget_bytes)
        return dataclasses.replace(planned(budget_bytes), budget_bytes=budget_bytes)

    def real_peak(plan):
        return PeakRange.exactly(120 if plan.schedule == KEEP else 90)

    found = plan_within(100, 95, find, real_peak, Rounds(6, 4))
    assert found.schedule == REMAKE
    assert found.budget_bytes == max(budget for budget in asked if budget < KEPT_BYTES)
    assert len([budget for budget in asked if budget < KEPT_BYTES]) > 1


@pytest.mark.parametrize(
    ("peaks", "gap"),
    [
        ([92, 110, 128, 137], None),  # On a line: 75 would take 101.
        ([92, 125, 130, 115], (70, 80)),  # By their line 75 would take 107, but they lie 15 off it.
        ([90, 110, 122], (70, 80)),  # Too few to tell.
    ],
)
def test_between_plans_one_is_looked_for_where_it_may_fit(peaks, gap):
    real = iter(peaks)
    tried = TriedPlans(100, lambda _: PeakRange.exactly(next(real)))
    for guess_bytes, _ in zip((70, 80, 90, 95), peaks, strict=False):
        plan = plan_for_schedule(GRAPH, KEEP, planner="by hand")
        tried.add(guess_bytes, dataclasses.replace(plan, fingerprint=str(guess_bytes), time_s=200.0 - guess_bytes))

    best_s = min(one.time_s for one in tried.fitting)
    assert tried.widest_gap([one.guess_bytes for one in tried.all], best_s) == gap


@pytest.mark.parametrize(
    ("squeezes", "failed_bytes", "found"),
    [(0, 102, "smallest"), (1, 102, "still over"), (2, 102, "squeezed"), (2, 110, "smallest")],
    ids=["none", "one", "again", "too far off"],
)
def test_a_much_cheaper_plan_that_fails_by_little_is_squeezed(squeezes, failed_bytes, found):
    times = {"dear": 3.0, "failed": 1.0, "still over": 1.2, "squeezed": 1.4}
    peaks = {"dear": 90, "failed": failed_bytes, "still over": 101, "squeezed": 99}
    made = []

    def plan(name: str, size: int) -> Plan:
        by_hand = plan_for_schedule(GRAPH, KEEP, planner="by hand")
        return dataclasses.replace(by_hand, fingerprint=name, peak_bytes=size, time_s=times[name])

    def find(budget_bytes: int) -> Plan:
        return plan("failed", 95) if budget_bytes >= 95 else plan("dear", 60)

    def squeezed(near: Plan) -> Plan:
        made.append(near.fingerprint)
        return plan("still over", 95) if near.fingerprint == "failed" else plan("squeezed", 94)

    rounds = Rounds(2, 4, squeezes=squeezes)
    taken = plan_within(100, 95, find, lambda one: PeakRange.exactly(peaks[one.fingerprint]), rounds, squeezed=squeezed)

    assert taken.fingerprint == ("squeezed" if found == "squeezed" else "dear")
    assert made == {"smallest": [], "still over": ["failed"], "squeezed": ["failed", "still over"]}[found]
