"""One of several processes of MultiWorkerMirroredStrategy: python ranks_worker.py PORT COUNT NUMBER CASE...; JSON."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path

PORT, COUNT, NUMBER = (int(argument) for argument in sys.argv[1:4])
os.environ["TF_CONFIG"] = json.dumps(
    {
        "cluster": {"worker": [f"127.0.0.1:{PORT + n}" for n in range(COUNT)]},
        "task": {"type": "worker", "index": NUMBER},
    }
)

import numpy as np  # noqa: E402 - TensorFlow reads TF_CONFIG
import tensorflow as tf  # noqa: E402

import remat  # noqa: E402
import remat.tensorflow  # noqa: E402
from remat.fit import ranks as ranks_of_fit  # noqa: E402
from remat.tensorflow._processes import ProcessStore  # noqa: E402

ROWS, WIDTH, LAYERS, UPDATES = 8192, 256, 6, 5
SHOWN_ROWS = 16


def weights_of():
    return [tf.Variable(tf.random.stateless_normal((WIDTH, WIDTH), [1, n]) * 0.05) for n in range(LAYERS)]


def batch_of_all(number):
    return tf.random.stateless_normal((ROWS, WIDTH), [3, number])


def step_of(strategy, weights, asked, tapes, pieces=1):
    """A step of gradient descent on the mean over all replicas' samples."""
    count = strategy.num_replicas_in_sync

    def loss_of(x):
        for weight in weights:
            x = tf.tanh(x @ weight)
        return tf.reduce_sum(x * x) / ROWS

    def one_replica(x):
        if pieces > 1:
            value_and_grad = remat.tensorflow.value_and_grad(
                loss_of, variables=weights, micro_batches=pieces, reduction="sum", **asked
            )
            loss, gradients = value_and_grad(x)
        else:
            with remat.tensorflow.GradientTape(**asked) if asked else tf.GradientTape() as tape:
                loss = loss_of(x)
            gradients = tape.gradient(loss, weights)
            tapes.append(tape)
        if count > 1:
            gradients = tf.distribute.get_replica_context().all_reduce("sum", gradients)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss

    return tf.function(lambda x: strategy.run(one_replica, args=(x,)))


def mine(strategy, number):
    share = ROWS // strategy.num_replicas_in_sync
    return batch_of_all(number)[NUMBER * share : (NUMBER + 1) * share]


def trained(strategy, asked=None, pieces=1):
    with strategy.scope():
        weights = weights_of()
    tapes = []
    step = step_of(strategy, weights, asked or {}, tapes, pieces)
    for number in range(UPDATES):
        batch = mine(strategy, number)
        loss = step(batch)
    operations = step.get_concrete_function(batch).graph.get_operations()
    plan = tapes[0].plan if tapes and asked else None
    return {
        "loss": float(loss),
        "weights": [weight.numpy()[:SHOWN_ROWS].tolist() for weight in weights],
        "collectives": [[op.type, list(op.inputs[0].shape)] for op in operations if op.type.startswith("Collective")],
        "plan": None
        if plan is None
        else {
            "schedule": list(plan.schedule),
            "recomputed": plan.recomputed,
            "peak_bytes": plan.peak_bytes,
            "budget_bytes": plan.budget_bytes,
            "plain_bytes": plan.baseline_peak_bytes,
            "measured_peak_bytes": plan.measured_peak_bytes,
        },
    }


def refused(strategy, what):
    """The error of processes that differ in the budget, in the step, or in that one of them plans nothing."""
    budget = f"{70 + 10 * NUMBER}%" if what == "budget" else 1000 if what == "infeasible" else "80%"
    strict = what == "strict"
    with strategy.scope():
        weights = weights_of()  # Each variable is a collective of its own, so that all processes have as many.
    if what == "silent":
        ranks_of_fit.Ranks.__init__.__defaults__ = (2.0,)
        if NUMBER == 1:
            time.sleep(6)
            return "planned nothing"
    if what == "step":
        weights = weights[: LAYERS - NUMBER]
    step = step_of(strategy, weights, {"budget": budget, "planner": "peak_greedy", "strict": strict}, [])
    if strict and NUMBER == 1:
        _more_than_its_budget()
    try:
        step(mine(strategy, 0))
    except (remat.PlanMismatch, remat.InfeasibleBudget) as error:
        return f"{type(error).__name__} {error}"
    return "no error"


def _more_than_its_budget():
    from remat.tensorflow.peak.device import Device

    Device.peak_bytes = property(lambda self: 1 << 40)


def killed(strategy, folder):
    """Trains with checkpoints of the user's; the second process waits in the fourth update until somebody ends it."""
    with strategy.scope():
        weights = weights_of()
    file, done = Path(folder) / "weights.npz", 0
    if file.exists():
        with np.load(file) as saved:
            done = int(saved["done"])
            for number, weight in enumerate(weights):
                weight.assign(saved[f"w{number}"])
    step = step_of(strategy, weights, {"budget": "80%", "planner": "peak_greedy"}, [])
    for number in range(done, UPDATES):
        if number == 3 and done == 0 and NUMBER == 1:
            (Path(folder) / "ready").write_text(str(os.getpid()))
            time.sleep(600)
        float(step(mine(strategy, number)))
        if NUMBER == 0:
            part = Path(folder) / "part.npz"
            np.savez(part, done=number + 1, **{f"w{n}": w.numpy() for n, w in enumerate(weights)})
            part.rename(file)
    return [weight.numpy()[:SHOWN_ROWS].tolist() for weight in weights]


def main():
    tf.config.experimental.enable_op_determinism()
    distribute = tf.distribute
    strategy = distribute.MultiWorkerMirroredStrategy() if COUNT > 1 else distribute.OneDeviceStrategy("CPU:0")
    greedy = {"planner": "peak_greedy"}
    cases = {
        "plain": lambda: trained(strategy),
        "again": lambda: trained(strategy),
        "planned": lambda: trained(strategy, {"budget": "80%", **greedy}),
        "pieces": lambda: trained(strategy, pieces=4),
        "planned_pieces": lambda: trained(strategy, {"budget": 24 << 20, **greedy}, pieces=4),
    }
    results = {}
    for case in sys.argv[4:]:
        name, _, more = case.partition(":")
        if name == "refused":
            results[case] = refused(strategy, more)
        else:
            results[case] = killed(strategy, more) if name == "killed" else cases[name]()
    print(json.dumps(results), flush=True)
    _leave_together()


def _leave_together():
    """The first process serves the others until all have what they came for. TensorFlow's own end may hang."""
    with contextlib.suppress(remat.PlanMismatch, tf.errors.OpError):
        if COUNT > 1:
            ranks_of_fit.Ranks(NUMBER, COUNT, ProcessStore(), 30.0).said_by_all("test/done", "")
            time.sleep(1 if NUMBER == 0 else 0)
    os._exit(0)


if __name__ == "__main__":
    main()
