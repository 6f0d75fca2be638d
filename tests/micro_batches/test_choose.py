"""The choice between recomputation and micro-batches, on plans and times that are made up."""

from __future__ import annotations

import dataclasses

import pytest

import remat
from remat.core.plan import Plan
from remat.micro_batches.choose import PieceTimes, choose, choose_for_batch, counts_to_try
from remat.micro_batches.cut import largest_size

BATCH, BUDGET = 64, 1000


def plan(overhead):
    return Plan((0,), "none", 900, 2000, 1 + overhead, 1.0, overhead, 0.0, "", "made up", BUDGET, 0.0)


def plans(by_count, asked):
    """A planner that knows an overhead, or a smallest budget, by the number of micro-batches."""

    def plan_for(count):
        asked.append(count)
        known = by_count[count]
        if known >= 1.0:
            raise remat.InfeasibleBudget("no", minimum_bytes=known, budget_bytes=BUDGET, binding_op="")
        return plan(known)

    return plan_for


def chosen(by_count, seconds=lambda size: size + 2.0, **options):
    """The choice, and for which numbers a plan was made."""
    asked = []
    return choose(BATCH, BUDGET, plans(by_count, asked), seconds, counts=[1, 2, 3, 4, 6, 8], **options), asked


@pytest.mark.parametrize(
    ("overheads", "best"),
    [
        ({1: 0.0, 2: 0.0, 3: 0.0, 4: 0.0, 6: 0.0, 8: 0.0}, 1),
        ({1: 0.30, 2: 0.20, 3: 0.15, 4: 0.0, 6: 0.0, 8: 0.0}, 4),  # 85.8, 81.6, 82.8 and 72 seconds
        ({1: 0.30, 2: 0.04, 3: 0.0, 4: 0.0, 6: 0.0, 8: 0.0}, 2),  # 85.8, 70.7 and 72
        ({1: 1300, 2: 1100, 3: 0.5, 4: 0.3, 6: 0.0, 8: 0.0}, 6),  # 108, 93.6, 78 and 80
    ],
)
def test_the_least_time_wins(overheads, best):
    found, _ = chosen(overheads)
    assert found.micro_batches == best
    others = [option.time_s for option in found.options if option.plan is not None]
    assert found.chosen.time_s <= min(others) * 1.02


def test_brute_force_agrees():
    """Every option planned: what was skipped was never better."""
    overheads = {1: 0.9, 2: 0.35, 3: 0.17, 4: 0.08, 6: 0.01, 8: 0.0}
    for fixed in (0.0, 0.5, 1.0, 2.0, 4.0, 8.0):
        found, asked = chosen(overheads, lambda size, fixed=fixed: size + fixed)
        times = {n: n * (largest_size(BATCH, n) + fixed) * (1 + extra) for n, extra in overheads.items()}
        assert times[found.micro_batches] <= min(times.values()) * 1.02
        assert len(asked) == len(set(asked))


def test_no_plan_is_made_for_what_is_slower_anyway():
    found, asked = chosen({1: 0.05, 2: 0.0}, lambda size: size + 10.0)
    assert asked == [1]
    assert "not planned: 84 s per update with nothing recomputed" in str(found)


def test_equal_times_mean_fewer_micro_batches():
    found, _ = chosen({1: 0.019, 2: 0.0, 3: 0.0, 4: 0.0, 6: 0.0, 8: 0.0}, lambda size: size + 0.0)
    assert found.micro_batches == 1


def test_exact_recomputation_is_preferred_where_samples_are_coupled():
    overheads = {1: 0.9, 2: 0.0, 3: 0.0, 4: 0.0, 6: 0.0, 8: 0.0}
    assert chosen(overheads)[0].micro_batches == 2
    found, asked = chosen(overheads, coupled=["norm"])
    assert (found.micro_batches, asked) == (1, [1])
    assert "1 micro-batch: exact, where micro-batches would change what norm do" in str(found)


def test_where_it_does_not_fit_as_few_micro_batches_as_fit():
    found, asked = chosen({1: 1500, 2: 1200, 3: 0.8, 4: 0.0, 6: 0.0, 8: 0.0}, coupled=["norm"])
    assert (found.micro_batches, asked) == (3, [1, 2, 3])
    assert "does not fit: the smallest budget is 1.46 KiB" in str(found)
    assert "3 micro-batches, the fewest that fit" in str(found)


def test_nothing_fits():
    with pytest.raises(remat.InfeasibleBudget) as caught:
        chosen({1: 3000, 2: 2000, 3: 1500, 4: 1300, 6: 1200, 8: 1100})
    assert caught.value.minimum_bytes == 1100


def test_why_micro_batches_are_out_of_the_question():
    found, asked = chosen({1: 0.4}, only_whole="it has its own train_step")
    assert (found.micro_batches, asked) == (1, [1])
    assert "not possible: it has its own train_step" in str(found)
    assert "6 to 8 micro-batches: not planned, for the same reason" in str(found)
    assert "1 micro-batch, the only possibility" in str(found)
    with pytest.raises(remat.InfeasibleBudget, match="stays in one piece: it has its own train_step"):
        chosen({1: 3000, 2: 2000}, only_whole="it has its own train_step")


def test_one_line_per_option():
    found, _ = chosen({1: 0.30, 2: 0.04, 3: 0.0, 4: 0.0, 6: 0.0, 8: 0.0})
    lines = str(found).splitlines()
    assert lines[0] == "remat micro-batches: batches of 64 samples within 1000 B"
    assert len(lines) == 1 + 6 + 1
    assert [line for line in lines if line.startswith("*")] == [lines[2]]
    assert lines[2] == ("*    2 x 32    70.7 s per update, peak 900 B: recomputation +4.0%, small micro-batches +3.0%")


def test_the_long_tail_of_slower_options_is_one_line():
    counts = list(counts_to_try(BATCH))
    found = choose(BATCH, BUDGET, plans({1: 0.3, 2: 0.0}, []), lambda size: size + 20.0, counts=counts)
    assert found.micro_batches == 2
    assert [option.micro_batches for option in found.options] == counts
    assert str(found).splitlines()[-3:-1] == [
        "     6 x 11    not planned: 186 s per update with nothing recomputed",
        "  8 to 64 micro-batches: not planned, slower still",
    ]


def test_what_is_close_is_timed():
    """The plan says that recomputing 4 % of half the batch is cheapest; the clock says 20 %."""
    timed = []

    def measure(options):
        timed.extend(option.micro_batches for option in options)
        return {o.micro_batches: o.plain_time_s * (1.2 if o.recomputes else 1.0) for o in options}

    overheads = {1: 0.30, 2: 0.04, 3: 0.0, 4: 0.0, 6: 0.0, 8: 0.0}
    assert chosen(overheads)[0].micro_batches == 2
    found, asked = chosen(overheads, measure=measure)
    assert (found.micro_batches, sorted(timed), asked) == (3, [1, 2, 3], [1, 2, 3])
    assert "the least measured time" in str(found)
    assert ", timed" in str(found)


def test_slices_are_timed_as_recomputations_are():
    """By the cost model two micro-batches in slices take as long as plain ones; the clock says a tenth more."""
    overheads = {1: 1500, 2: 0.0, 3: 0.0, 4: 0.0, 6: 0.0, 8: 0.0}

    def plan_for(count):
        made = plans(overheads, [])(count)
        return dataclasses.replace(made, split=object()) if count == 2 else made

    def measure(options):
        return {o.micro_batches: o.plain_time_s * (1.1 if o.micro_batches == 2 else 1.0) for o in options}

    def choice(**options):
        return choose(BATCH, BUDGET, plan_for, lambda size: size + 1e-3, counts=[1, 2, 3, 4, 6, 8], **options)

    assert choice().micro_batches == 2
    assert choice(measure=measure).micro_batches == 4


def test_nothing_is_timed_where_recomputation_does_not_decide():
    def measure(options):
        raise AssertionError("timed")

    assert chosen({1: 0.0}, measure=measure)[0].micro_batches == 1
    assert chosen({1: 1500, 2: 0.0}, measure=measure)[0].micro_batches == 2


def test_seconds_of_the_cost_model_are_not_held_against_the_clocks():
    overheads = {1: 0.30, 2: 0.04, 3: 0.0, 4: 0.0, 6: 0.0, 8: 0.0}
    only_one = lambda options: {3: 1e-3}  # noqa: E731
    assert chosen(overheads, measure=only_one, times_are_measured=False)[0].micro_batches == 2
    assert chosen(overheads, measure=only_one)[0].micro_batches == 3


def test_numbers_to_try():
    assert list(counts_to_try(1)) == [1]
    assert list(counts_to_try(20)) == [1, 2, 3, 4, 6, 8, 12, 16]
    assert [largest_size(10, count) for count in (1, 3, 4, 10)] == [10, 4, 3, 1]


def test_times_in_between_and_beyond():
    times = PieceTimes({8: 10.0, 16: 18.0, 32: 34.0})  # 2 and 1 per sample
    assert times(16) == 18.0
    assert times(24) == pytest.approx(26.0)
    assert times(64) == pytest.approx(66.0)
    assert times(1) == pytest.approx(3.0)


def test_a_larger_piece_never_takes_more_than_in_proportion():
    """The largest piece measured was disturbed: its slope is not taken further."""
    assert PieceTimes({8: 1.0, 16: 8.0})(32) <= 16.0
    assert PieceTimes({8: 4.0, 16: 2.0})(32) == 2.0
    assert PieceTimes({8: 4.0})(16) == 8.0


def for_batch(fits_plainly, overheads, timed=None):
    """The choice for a batch of which a front end knows which numbers of micro-batches fit."""

    def times_s(sizes):
        timed.append(sizes)
        return {size: size + 2.0 for size in sizes}

    return choose_for_batch(
        BATCH, BUDGET, plans(overheads, []), fits_plainly=fits_plainly, predicted_s=float, times_s=times_s
    )


def test_a_batch_that_fits_is_neither_cut_nor_timed():
    found = for_batch(lambda count: True, {1: 0.0})
    assert [option.micro_batches for option in found.options] == [1]
    assert "there is no choice, so none was timed" in str(found)


def test_the_largest_pieces_that_fit_are_timed_and_smaller_ones():
    timed = []
    found = for_batch(lambda count: count >= 6, {1: 0.5, 2: 0.3, 3: 0.2, 4: 0.1, 6: 0.0}, timed)
    assert timed == [[2, 5, 11]]
    assert found.times_are_measured
    assert found.micro_batches == 4  # 99, 88.4, 86.4, 79.2 and 78 seconds


def test_where_no_piece_fits_as_it_is_times_are_the_cost_models():
    overheads = {count: 0.5 for count in counts_to_try(BATCH)}
    found = for_batch(lambda count: False, overheads)
    assert not found.times_are_measured
    assert "no micro-batch fits with nothing recomputed" in str(found)


def test_a_batch_that_cannot_be_cut():
    def fits_plainly(count):
        if count > 1:
            raise remat.UnsupportedStep("it has its own train_step")
        return False

    found = for_batch(fits_plainly, {1: 0.4})
    assert found.micro_batches == 1
    assert "not possible: it has its own train_step" in str(found)
    assert "there is no choice" in str(found)
