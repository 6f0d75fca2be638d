"""``micro_batches="auto"``: the cheapest pair of micro-batches and recomputation, and the numbers of plain training."""

from __future__ import annotations

import re

import keras
import numpy as np
import pytest
from accumulation import train
from keras import layers
from small_models import BATCH, BEST, QUICK, WIDTH, OwnTrainStep, assert_same_variables, compiled, data, functional

import remat
from remat.tensorflow.peak.device import current_device

LINE = re.compile(r"^([ *]) +(\d+) x (\d+) +(\S.*)$", re.MULTILINE)


def dense():
    """No layer couples samples or draws numbers, so that every number of micro-batches gives the same ones."""
    values = inputs = keras.Input((WIDTH,))
    for _ in range(6):
        values = layers.Dense(2 * WIDTH, activation="tanh")(values)
    return keras.Model(inputs, layers.Dense(10)(values))


def training(model):
    return model.fit(*data(2 * BATCH), batch_size=BATCH, shuffle=False, verbose=0)


def trained(build, budget, planning=QUICK):
    """The model, and its training's history, within a budget; None trains plainly."""
    keras.utils.set_random_seed(3)
    model = compiled(build)
    if budget is not None:
        remat.keras.limit_memory(model, budget, micro_batches="auto", **planning)
    return model, training(model).history


def test_the_same_numbers_within_the_budget_and_a_line_per_option(capsys):
    plain, expected = trained(dense, None)
    # Less than what the plain step takes, and room for a micro-batch whose blocks fill the heap's holes badly. The
    # counter does not see the weights, which are small, nor the optimizer's two copies and the gradients of them.
    unseen_bytes = 4 * 4 * plain.count_params()
    model, history = trained(dense, current_device().in_use_bytes + 3_500_000 + unseen_bytes, BEST)

    choice, plan = remat.keras.micro_batch_choice_of(model), remat.keras.plan_of(model)
    assert plan.peak_bytes <= choice.budget_bytes == plan.budget_bytes
    assert choice.options[0].micro_batches == 1
    assert choice.options[0].recomputes or choice.options[0].plan is None, "the whole batch does not fit as it is"
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5)
    assert_same_variables(model, plain)

    printed = capsys.readouterr().out
    assert printed.count("remat micro-batches: batches of 1024 samples within") == 1
    lines = LINE.findall(printed)
    assert [int(count) for _, count, _, _ in lines][:3] == [1, 2, 3]
    assert [int(count) for mark, count, _, _ in lines if mark == "*"] == [choice.micro_batches]
    # A single option close to the best prediction, as a disturbed clock may say, is not timed.
    how = "predicted" if choice.chosen.measured_time_s is None else "measured"
    assert f"the least {how} time" in printed
    assert choice.times_are_measured


@pytest.mark.thorough
def test_arrays_of_train_on_batch_are_cut_with_every_lever():
    plain, _ = trained(dense, None)
    model = compiled(dense)
    levers = ("recompute", "micro_batches", "split", "update")
    budget = current_device().in_use_bytes + 3_500_000 + 4 * 4 * plain.count_params()
    remat.keras.limit_memory(model, budget, levers=levers, **QUICK)
    x, y = data(BATCH)
    model.train_on_batch(x, y)
    options = remat.keras.micro_batch_choice_of(model).options
    assert len(options) > 2
    assert not any(option.why_not.startswith("not possible") for option in options)


@pytest.mark.slow
def test_batch_normalization_is_recomputed(capsys):
    """Dropout, metrics, seeds and statistics besides: that pieces were timed leaves no trace in them."""
    plain, expected = trained(functional, None)
    model, history = trained(functional, "95%")
    assert remat.keras.micro_batch_choice_of(model).micro_batches == 1
    assert remat.keras.plan_of(model).recomputed > 0
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5)
    assert_same_variables(model, plain)
    printed = capsys.readouterr().out
    assert re.search(r"1 micro-batch: exact, where micro-batches would change what batch_norm\S* do", printed)


def test_what_fits_is_left_alone(capsys):
    model, _ = trained(dense, "1GiB")
    assert remat.keras.micro_batch_choice_of(model).options == (remat.keras.micro_batch_choice_of(model).chosen,)
    assert "1 micro-batch: the whole batch fits as it is" in capsys.readouterr().out


@pytest.mark.slow
def test_a_step_of_the_models_own_is_recomputed(capsys):
    model, _ = trained(OwnTrainStep, "95%")
    assert remat.keras.plan_of(model).recomputed > 0
    printed = capsys.readouterr().out
    assert re.search(r"not possible: .* has its own train_step", printed)
    assert "1 micro-batch, the only possibility" in printed


@pytest.mark.slow
def test_a_larger_batch_is_chosen_for_again(capsys):
    keras.utils.set_random_seed(3)
    model = compiled(dense)
    remat.keras.limit_memory(model, "12MB", micro_batches="auto", **QUICK)
    x, y = data(4 * BATCH)
    model.fit(x[:256], y[:256], batch_size=256, verbose=0)
    small = remat.keras.micro_batch_choice_of(model)
    model.fit(x, y, batch_size=2 * BATCH, verbose=0)
    large = remat.keras.micro_batch_choice_of(model)
    assert (small.batch_size, large.batch_size) == (256, 2 * BATCH)
    assert (small.micro_batches, small.chosen.plan.overhead) == (1, 0.0)
    assert len(large.options) > 1, "the whole batch does not fit as it is"
    assert large.chosen.plan.peak_bytes <= large.budget_bytes
    assert capsys.readouterr().out.count("remat micro-batches") == 2


@pytest.mark.slow
def test_under_xla():
    def build():
        return compiled(dense, jit_compile=True)

    plain = train(build, training, 1)
    keras.utils.set_random_seed(7)
    model = build()
    remat.keras.limit_memory(model, "60%", micro_batches="auto", **QUICK)
    history = training(model).history
    np.testing.assert_allclose(history["loss"], plain.history["loss"], rtol=1e-5)
    assert_same_variables(model, plain.model)


def test_the_earlier_name():
    assert remat.keras.joint_plan_of is remat.keras.micro_batch_choice_of


@pytest.mark.slow
def test_nothing_fits():
    model = compiled(dense)
    remat.keras.limit_memory(model, "1KB", micro_batches="auto", **QUICK)
    with pytest.raises(remat.InfeasibleBudget, match=r"within 1000 bytes .* was found"):
        training(model)


@pytest.mark.parametrize("options", [{"budget": None}, {"checkpoints": ["dense"]}])
def test_auto_needs_a_budget(options):
    with pytest.raises(ValueError, match=r"micro_batches='auto' chooses what a budget costs least with; give one"):
        remat.keras.limit_memory(dense(), micro_batches="auto", **options)
