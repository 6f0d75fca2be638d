"""The first call of a function under a budget is measured: its plan says what it took, and a broken budget is told."""

from __future__ import annotations

import pytest
import tensorflow as tf
from small_steps import WIDTH, Chain, inputs

import remat
from blind_allocator import sees_only
from remat.tensorflow import GradientTape, _private, _traces
from remat.tensorflow.api.gradients import gradients, last_plan
from said import said

LARGE = 4096
"""Samples: the first calls of other functions, such as initial values, are small beside such a step."""


@pytest.fixture
def blind(monkeypatch):
    """Half of what is needed is seen. No plan of a chain needs so little, so each breaks 70 % of what is seen."""
    sees_only(0.5, monkeypatch)


def stepping(chain, tapes, **options):
    @tf.function
    def step(x):
        tape = GradientTape(planner="peak_greedy", **options)
        tapes.append(tape)
        with tape:
            loss = tf.reduce_mean(tf.square(chain(x)))
        return tape.gradient(loss, chain.weights)

    return step


def test_the_plan_says_what_the_first_call_took(caplog):
    tapes = []
    step = stepping(Chain(), tapes, budget="70%")
    # TensorFlow's own memory: a constant may share NumPy's, which no counter of TensorFlow sees.
    x = tf.random.stateless_normal((LARGE, WIDTH), [0, 3])
    concrete = step.get_concrete_function(x)
    tf.function(lambda: tf.ones(10))()
    assert tapes[-1].plan.measured_peak_bytes is None, "another function was called, not this one"
    concrete(x)
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


def test_what_never_comes_is_not_waited_for_without_end():
    chain, tapes = Chain(), []
    for _ in range(3 * _traces._MOST_AWAITED):
        step = stepping(chain, tapes, budget="90%")
        tf.function(lambda x, step=step: step(x)).get_concrete_function(inputs())
    assert len(_traces._awaited) == _traces._MOST_AWAITED
    nested = list(tapes)
    for _ in range(_traces._MOST_AWAITED):
        stepping(chain, tapes, budget="90%")(inputs())
        assert tapes[-1].plan.measured_peak_bytes is not None
    assert all(tape.plan.measured_peak_bytes is None for tape in nested), "another trace of the same operations"
    _traces._awaited.clear()
    tf.function(lambda: tf.ones(10))()
    assert "call_function" not in vars(_private._context.context())


def test_gradients_are_measured_alike(blind, caplog):
    chain = Chain()

    @tf.function
    def step(x):
        return gradients(tf.reduce_mean(tf.square(chain(x))), chain.weights, budget="70%", planner="peak_greedy")

    step(inputs(LARGE))
    assert last_plan().measured_peak_bytes > 1.01 * last_plan().budget_bytes
    (line,) = said(caplog)
    assert "more than the budget of" in line
