"""Steps on two replicas of one process, two logical CPU devices: plain ones, and under a budget of each device."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import tensorflow as tf

import remat
import remat.tensorflow

sys.path.insert(0, str(Path(__file__).parents[1]))

from worker_process import serve

REPLICAS, ROWS, WIDTH, LAYERS, UPDATES = 2, 4096, 128, 6, 5


def _strategy():
    if not tf.config.list_logical_devices("CPU")[1:]:
        raise AssertionError("logical devices are made when the process starts")
    return tf.distribute.MirroredStrategy([f"CPU:{n}" for n in range(REPLICAS)])


def _batch(strategy):
    rows = tf.random.stateless_normal((ROWS, WIDTH), [3, 4])
    data = tf.data.Dataset.from_tensor_slices(rows).batch(ROWS, drop_remainder=True)
    return next(iter(strategy.experimental_distribute_dataset(data)))


def trained(asked=None, *, names_kept=False, in_xla=False):
    """Five updates; what the weights, the losses and the collectives came to, and what each replica's tape says."""
    strategy = _strategy()
    with strategy.scope():
        weights = [tf.Variable(tf.random.stateless_normal((WIDTH, WIDTH), [1, n]) * 0.05) for n in range(LAYERS)]
    tapes = []

    def one_replica(x):
        kept = []
        options = {**(asked or {}), **({"checkpoints": kept} if names_kept else {})}
        with remat.tensorflow.GradientTape(**options) if options else tf.GradientTape() as tape:
            for number, weight in enumerate(weights):
                x = tf.tanh(x @ weight)
                if number == LAYERS // 2:
                    kept.append(x)
            loss = tf.reduce_sum(x * x)
        gradients = tape.gradient(loss, weights)
        gradients = tf.distribute.get_replica_context().all_reduce("sum", gradients)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.assign_sub(1e-6 * gradient)
        tapes.append(tape)
        return loss

    @tf.function(jit_compile=in_xla)
    def step(x):
        return strategy.run(one_replica, args=(x,))

    batch = _batch(strategy)
    losses = [[float(loss) for loss in step(batch).values] for _ in range(UPDATES)]
    operations = step.get_concrete_function(batch).graph.get_operations()
    return {
        "weights": [weight.numpy().tobytes().hex() for weight in weights],
        "losses": losses,
        "collectives": [
            [op.type, op.device, list(op.inputs[0].shape)] for op in operations if op.type.startswith("Collective")
        ],
        "plans": [_said_of(tape) for tape in tapes] if asked or names_kept else [],
        "schedule": list(tapes[0].plan.schedule) if asked else None,
    }


def _said_of(tape):
    plan = tape.plan
    return {
        "schedule": list(plan.schedule),
        "recomputed": len(tape.recomputed_operations),
        "devices": sorted({op.device for op in tape._rewritten.copies}),
        "budget_bytes": plan.budget_bytes,
        "peak_bytes": plan.peak_bytes,
        "measured_peak_bytes": plan.measured_peak_bytes,
        "plain_bytes": plan.baseline_peak_bytes,
    }


def trained_by_a_plan(asked):
    """As ``trained`` by the plan that the first replica made for a budget; what that and this came to."""
    made = []

    class Noting(remat.tensorflow.GradientTape):
        def _finish(self, succeeded):
            super()._finish(succeeded)
            made.append(self.plan)

    own, remat.tensorflow.GradientTape = remat.tensorflow.GradientTape, Noting
    try:
        by_budget = trained(asked)
    finally:
        remat.tensorflow.GradientTape = own
    return by_budget, trained({"plan": made[0]})


def refused(asked, *, where="replica", in_xla=False):
    """The one line of the error."""
    try:
        if where == "replica":
            trained(asked, in_xla=in_xla)
        elif where == "gradients":
            _in_replica(lambda x: remat.tensorflow.gradients(tf.reduce_sum(x * x), x, **asked))
        else:
            _outside(asked)
    except remat.UnsupportedStep as error:
        return str(error)
    except remat.InfeasibleBudget as error:
        return f"InfeasibleBudget {error}"
    return "nothing was refused"


def _in_replica(function):
    strategy = _strategy()
    tf.function(lambda x: strategy.run(function, args=(x,)))(_batch(strategy))


def _outside(asked):
    strategy = _strategy()
    with strategy.scope():
        weight = tf.Variable(np.ones((2, 2), "float32"))

    @tf.function
    def step():
        with strategy.scope(), remat.tensorflow.GradientTape(**asked) as tape:
            loss = tf.reduce_sum(weight * weight)
        return tape.gradient(loss, weight)

    step()


def failing():
    """A replica whose trace fails: is the error the user's, and how many plans are made while it is handled?"""
    try:
        _in_replica(_raises)
    except Exception as error:  # AutoGraph's, which names the user's own.
        first = "ZeroDivisionError" in str(error)
        again = trained({"budget": "90%", "planner": "peak_greedy"})  # While an error is being handled.
    return first, len(again["plans"])


def _raises(x):
    with remat.tensorflow.GradientTape(budget="90%"):
        if tf.distribute.get_replica_context().replica_id_in_sync_group is not None:
            raise ZeroDivisionError
    return x


if __name__ == "__main__":
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * REPLICAS
    )
    tf.config.experimental.enable_op_determinism()
    serve(
        {one.__name__: one for one in (trained, trained_by_a_plan, refused, failing)},
    )
