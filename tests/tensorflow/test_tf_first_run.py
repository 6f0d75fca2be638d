"""The first call of a function under a budget is measured: its plan says what it took, and a broken budget is told."""

from __future__ import annotations

import pytest
import tensorflow as tf
from small_steps import Chain, inputs

import remat
from blind_allocator import misses_three_tenths
from remat.tensorflow import GradientTape
from remat.tensorflow.api.gradients import gradients, last_plan

LARGE = 4096
"""Samples: the first calls of other functions, such as initial values, are small beside such a step."""


@pytest.fixture
def blind(monkeypatch):
    misses_three_tenths(monkeypatch)


def stepping(chain, tapes, **options):
    @tf.function
    def step(x):
        tape = GradientTape(planner="peak_greedy", **options)
        tapes.append(tape)
        with tape:
            loss = tf.reduce_mean(tf.square(chain(x)))
        return tape.gradient(loss, chain.weights)

    return step


def said(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "remat"]


def test_the_plan_says_what_the_first_call_took(caplog):
    tapes = []
    step = stepping(Chain(), tapes, budget="70%")
    concrete = step.get_concrete_function(inputs(LARGE))
    tf.function(lambda: tf.ones(10))()
    assert tapes[-1].plan.measured_peak_bytes is None, "another function was called, not this one"
    concrete(inputs(LARGE))
    plan = tapes[-1].plan
    assert plan.recomputed > 0
    assert plan.measured_peak_bytes == pytest.approx(plan.peak_bytes, rel=0.05)
    assert not said(caplog)


def test_a_broken_budget_is_told_once(blind, caplog):
    tapes = []
    step = stepping(Chain(), tapes, budget="70%")
    for _ in range(2):
        step(inputs(LARGE))
    plan = tapes[-1].plan
    assert plan.measured_peak_bytes > 1.01 * plan.budget_bytes, "the budget was to be broken"
    (line,) = said(caplog)
    assert "more than the budget of" in line


def test_a_strict_tape_raises_it(blind):
    step = stepping(Chain(), [], budget="70%", strict=True)
    with pytest.raises(remat.PlanMismatch, match="more than the budget of"):
        step(inputs(LARGE))


def test_inside_of_another_function_nothing_is_claimed(blind, caplog):
    tapes = []
    step = stepping(Chain(), tapes, budget="70%")
    tf.function(lambda x: step(x))(inputs(LARGE))
    assert tapes[-1].plan.measured_peak_bytes is None
    assert not said(caplog)


def test_gradients_are_measured_alike(blind, caplog):
    chain = Chain()

    @tf.function
    def step(x):
        return gradients(tf.reduce_mean(tf.square(chain(x))), chain.weights, budget="70%", planner="peak_greedy")

    step(inputs(LARGE))
    assert last_plan().measured_peak_bytes > 1.01 * last_plan().budget_bytes
    (line,) = said(caplog)
    assert "more than the budget of" in line
