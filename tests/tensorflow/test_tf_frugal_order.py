"""Functions are planned in an order in which gradients of weights come first; plans that know the other one hold."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from small_steps import BATCH, PLANNING, WIDTH, Ran, assert_equal_gradients, inputs

import remat
from remat.core.plan import Plan, plan_for_schedule
from remat.core.simulator import simulate
from remat.fit.request import Request
from remat.fit.variants import Variants
from remat.tensorflow import GradientTape
from remat.tensorflow.loops.variants import Variant
from remat.tensorflow.peak import candidates
from remat.tensorflow.planned import PlannableFunction
from remat.tensorflow.trace.func_graph import FunctionToPlan

WIDER = 4 * WIDTH


class Blocks:
    """Residual blocks of two products and a Gelu, whose activation is four times as wide as the block's input."""

    def __init__(self, count: int = 4) -> None:
        random = np.random.default_rng(0)

        def weight(rows: int, columns: int) -> tf.Variable:
            return tf.Variable(random.normal(size=(rows, columns), scale=rows**-0.5).astype("float32"))

        self.weights = [one for _ in range(count) for one in (weight(WIDTH, WIDER), weight(WIDER, WIDTH))]

    def loss(self, x: tf.Tensor) -> tf.Tensor:
        for wide, narrow in zip(self.weights[::2], self.weights[1::2], strict=True):
            x += tf.nn.gelu(x @ wide) @ narrow
        return tf.reduce_mean(x**2)


def run(blocks: Blocks, x: tf.Tensor, **options: object) -> Ran:
    tapes = []

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
        tapes.append(GradientTape(**options) if options else tf.GradientTape())
        with tapes[0]:
            value = blocks.loss(x)
        return value, tapes[0].gradient(value, blocks.weights)

    value, gradients = step(x)
    return Ran(float(value), gradients, tapes[0], step.get_concrete_function(x))


def plannable(blocks: Blocks, x: tf.Tensor) -> PlannableFunction:
    return PlannableFunction(FunctionToPlan(run(blocks, x).function.graph))


def test_an_activation_goes_before_its_gradient_is_made() -> None:
    function = plannable(Blocks(), inputs())
    written, ordered = function.as_written, function.plain.step
    assert set(ordered.operations) == set(written.operations)
    for step, expected in ((written, ["MatMul", "MatMul_1"]), (ordered, ["MatMul_1", "MatMul"])):
        ends = [op.name.removeprefix("gradient_tape/matmul_7/") for op in step.operations]
        assert [end for end in ends if end in expected] == expected
    wide_bytes = BATCH * WIDER * 4
    peaks = [simulate(step.graph, step.graph.plain_schedule).peak_bytes for step in (written, ordered)]
    assert peaks[0] - peaks[1] >= wide_bytes - WIDTH * WIDER * 4
    # The plain step runs as it was written.
    assert function.plain.plain_peak.expected_bytes >= peaks[0]


def test_a_budget_just_below_is_asked_for_in_the_written_order(monkeypatch: pytest.MonkeyPatch) -> None:
    function = plannable(Blocks(), inputs())
    written, ordered = function.as_written.graph, function.plain.graph
    budget_bytes = simulate(written, written.plain_schedule).peak_bytes * 6 // 10
    needed = {ordered.fingerprint: 1.04, written.fingerprint: 1.0}

    def find(variants: Variants[Variant], budget_bytes: int, *args: object, **options: object) -> Plan:
        graph = variants[0].graph
        if needed[graph.fingerprint] > 1:
            least_bytes = int(needed[graph.fingerprint] * budget_bytes)
            raise remat.InfeasibleBudget("", minimum_bytes=least_bytes, budget_bytes=budget_bytes, binding_op="")
        return plan_for_schedule(graph, graph.plain_schedule, planner="auto")

    monkeypatch.setattr(candidates, "cheapest_plan", find)
    assert function.plain.find(budget_bytes, Request(budget="60%")).fingerprint == written.fingerprint
    for needed_in_order, needed_as_written, named in ((1.5, 1.0, 1.5), (1.04, 1.02, 1.04)):
        needed.update({ordered.fingerprint: needed_in_order, written.fingerprint: needed_as_written})
        with pytest.raises(remat.InfeasibleBudget) as caught:
            function.plain.find(budget_bytes, Request(budget="60%"))
        assert caught.value.minimum_bytes == int(named * budget_bytes)


def test_a_plan_for_the_order_as_written_is_followed() -> None:
    blocks, x = Blocks(), inputs()
    kept = run(blocks, x, checkpoints="speed")
    again = run(blocks, x, plan=kept.tape.plan)
    assert kept.tape.plan.fingerprint == plannable(blocks, x).as_written.graph.fingerprint
    assert again.tape.plan.schedule == kept.tape.plan.schedule
    assert again.tape.recomputed_operations == kept.tape.recomputed_operations
    assert_equal_gradients(again, run(blocks, x))


def test_a_plan_for_the_other_order_is_followed() -> None:
    blocks, x = Blocks(), inputs()
    found = run(blocks, x, budget="60%", **PLANNING)
    again = run(blocks, x, plan=found.tape.plan)
    assert found.tape.plan.fingerprint == plannable(blocks, x).plain.graph.fingerprint
    assert again.tape.plan.schedule == found.tape.plan.schedule
    assert_equal_gradients(again, run(blocks, x))
