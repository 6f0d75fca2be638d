"""What ``GradientTape`` refuses, and what its errors say."""

from __future__ import annotations

import functools

import pytest
import small_steps
import tensorflow as tf
from small_steps import BATCH, PLANNING, WIDTH, Chain, assert_equal_gradients, inputs

import remat
from remat.tensorflow import GradientTape

# AutoGraph replaces exceptions that do not ask to be left alone.
run = functools.partial(small_steps.run, autograph=True)


@pytest.fixture
def chain():
    return Chain()


def loss_of(chain):
    return lambda x: tf.reduce_mean(tf.square(chain(x)))


def plan_for(chain, x):
    return run(loss_of(chain), chain.weights, x, budget="70%").tape.plan


def test_outside_a_function():
    with pytest.raises(remat.UnsupportedStep, match=r"outside tf\.function.*put @tf\.function"), GradientTape(budget=1):
        pass


def test_in_a_tensorflow_1_graph():
    with (
        tf.Graph().as_default(),
        pytest.raises(remat.UnsupportedStep, match="TensorFlow 1 graph"),
        GradientTape(budget=1),
    ):
        pass


def test_neither_budget_nor_plan():
    with pytest.raises(ValueError, match=r"exactly one of budget=, plan= and checkpoints=, not none"):
        GradientTape()


def test_both_budget_and_plan(chain):
    with pytest.raises(ValueError, match=r"exactly one of .*'budget', 'plan'"):
        GradientTape(budget="50%", plan=plan_for(chain, inputs()))


def test_loss_that_depends_on_no_variable(chain):
    stranger = tf.Variable(1.0, name="stranger")

    with pytest.raises(remat.UnsupportedStep, match=r"depends on none of the 1 sources \(stranger"):
        run(loss_of(chain), [stranger], inputs(), budget="70%")


@pytest.mark.parametrize("budget", ["plenty", "-3GiB", "0%", "12 apples", 0, -5])
def test_unreadable_budget_restates_it(chain, budget):
    with pytest.raises(remat.InvalidBudget, match=str(budget)):
        run(loss_of(chain), chain.weights, inputs(), budget=budget)


def test_auto_on_a_cpu(chain):
    with pytest.raises(remat.InvalidBudget, match=r"'auto'.*CPU:0"):
        run(loss_of(chain), chain.weights, inputs(), budget="auto")


def test_below_the_minimum_names_it_and_what_binds_and_the_minimum_works(chain):
    x = inputs()
    plain = run(loss_of(chain), chain.weights, x, budget=None)
    with pytest.raises(remat.InfeasibleBudget) as caught:
        run(loss_of(chain), chain.weights, x, budget=1000)

    error = caught.value
    assert error.budget_bytes == 1000
    assert 1000 < error.minimum_bytes < 40 * BATCH * WIDTH * 4
    assert "op " in error.binding_op
    for said in (str(error.minimum_bytes), "1000 bytes", error.binding_op):
        assert said in str(error)
    found = run(loss_of(chain), chain.weights, x, budget=error.minimum_bytes)
    assert_equal_gradients(found, plain)
    assert found.tape.plan.recomputed > 0
    with pytest.raises(remat.InfeasibleBudget):
        run(loss_of(chain), chain.weights, x, budget=error.minimum_bytes // 2)


def test_a_failed_plan_leaves_the_function_untraced_and_usable(chain):
    x = inputs()
    budget = [1000]

    @tf.function
    def step(x):
        with GradientTape(budget=budget[0], **PLANNING) as tape:
            loss = loss_of(chain)(x)
        return tape.gradient(loss, chain.weights)

    with pytest.raises(remat.InfeasibleBudget):
        step(x)
    budget[0] = "70%"
    assert len(step(x)) == len(chain.weights)


def test_plan_for_the_same_function_is_followed(chain):
    x = inputs()
    first = run(loss_of(chain), chain.weights, x, budget="70%")
    plain = run(loss_of(chain), chain.weights, x, budget=None)  # What it leaves in memory is not part of the function.

    @tf.function
    def step(x):
        with GradientTape(plan=first.tape.plan) as tape:
            loss = loss_of(chain)(x)
        tapes.append(tape)
        return loss, tape.gradient(loss, chain.weights)

    tapes = []
    loss, gradients = step(x)
    assert tapes[0].plan is first.tape.plan
    assert len(tapes[0].recomputed_operations) == first.tape.plan.recomputed > 0
    assert float(loss) == pytest.approx(plain.loss)
    for one, other in zip(gradients, plain.gradients, strict=True):
        tf.debugging.assert_near(one, other)


def test_plan_for_another_function(chain):
    plan = plan_for(chain, inputs())
    other = Chain(depth=3)

    @tf.function
    def step(x):
        with GradientTape(plan=plan) as tape:
            loss = loss_of(other)(x)
        return tape.gradient(loss, other.weights)

    with pytest.raises(remat.PlanMismatch, match="made for another graph"):
        step(inputs())


def test_unknown_planner_lists_the_known_ones(chain):
    with pytest.raises(ValueError, match=r"peak_greedy"):
        run(loss_of(chain), chain.weights, inputs(), budget="70%", planner="magic")


def dynamic_step(chain, **options):
    tapes = []

    @tf.function(input_signature=[tf.TensorSpec([None, WIDTH])])
    def step(x):
        with GradientTape(budget="70%", **PLANNING, **options) as tape:
            loss = loss_of(chain)(x)
        tapes.append(tape)
        return tape.gradient(loss, chain.weights)

    return step, tapes


def test_unknown_batch_dimension_without_its_size(chain):
    step, _ = dynamic_step(chain)

    with pytest.raises(remat.UnsupportedStep, match=r"the shape of x .*None.*batch_size="):
        step(inputs())


def test_unknown_batch_dimension_with_its_size_stays_dynamic(chain):
    step, tapes = dynamic_step(chain, batch_size=BATCH)

    for batch in (BATCH, 100):
        x = inputs(batch)
        plain = run(loss_of(chain), chain.weights, x, budget=None)
        for one, other in zip(step(x), plain.gradients, strict=True):
            tf.debugging.assert_near(one, other)
    assert len(tapes) == 1
    assert tapes[0].plan.recomputed > 0


def test_an_error_in_the_function_is_not_hidden(chain):
    def loss(x):
        chain(x)
        raise RuntimeError("the user's own mistake")

    with pytest.raises(RuntimeError, match="the user's own mistake"):
        run(loss, chain.weights, inputs(), budget="70%")


def test_plan_is_known_inside_the_function_after_gradient(chain):
    seen = []

    @tf.function
    def step(x):
        with GradientTape(budget="70%", **PLANNING) as tape:
            loss = loss_of(chain)(x)
        assert tape.plan is None
        gradients = tape.gradient(loss, chain.weights)
        seen.append(tape.plan)
        return gradients

    step(inputs())
    assert seen[0].recomputed > 0


def test_tracing_while_an_error_is_handled_still_plans(chain):
    """As in: except InfeasibleBudget as error, try again with error.minimum_bytes."""
    try:
        raise KeyError("handled by the caller")
    except KeyError:
        found = run(loss_of(chain), chain.weights, inputs(), budget="70%")

    assert found.tape.plan.recomputed > 0
