"""One of several processes of ``jax.distributed``: python ranks_worker.py PORT COUNT NUMBER CASE...; prints JSON."""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import remat
import remat.jax
from remat.fit import ranks as ranks_of_fit
from remat.jax.sharding import arrays_sent

LAYERS, WIDTH, BATCH, UPDATES = 8, 64, 4096, 5
BUDGETS = {"data": "75%", "tensor": "90%", "full": "80%"}


def first_weights(layers=LAYERS):
    random = np.random.default_rng(0)
    return [random.normal(0, 0.12, (WIDTH, WIDTH)).astype("float32") for _ in range(layers)]


def batches():
    random = np.random.default_rng(1)
    return [random.normal(size=(BATCH, WIDTH)).astype("float32") for _ in range(UPDATES)]


def step_of(inside):
    """A step of gradient descent; ``inside`` says where the weights of a layer lie while it runs."""

    def loss(weights, x):
        for number, weight in enumerate(weights):
            x = jnp.tanh(jnp.sin(x @ inside(weight, number)))
        return jnp.mean(jnp.square(x))

    def step(weights, x):
        value, gradients = jax.value_and_grad(loss)(weights, x)
        return value, [w - 0.5 * g for w, g in zip(weights, gradients, strict=True)]

    return step


def case_of(kind, mesh):
    """The step, the shardings of its weights, and that of the batch."""

    def place(*axes):
        return NamedSharding(mesh, PartitionSpec(*axes))

    if kind == "data":
        return step_of(lambda w, _: w), [place()] * LAYERS, place("all")
    if kind == "tensor":
        shardings = [place("all", None) if n % 2 else place(None, "all") for n in range(LAYERS)]
        return step_of(lambda w, _: w), shardings, place()
    # The weights lie in parts and are put together where they are used, as under FSDP.
    whole = functools.partial(jax.lax.with_sharding_constraint, shardings=place())
    return step_of(lambda w, _: whole(w)), [place("all", None)] * LAYERS, place("all")


def placed(array, sharding):
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def whole(array):
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def trained(step, kind, mesh, from_update=0, weights=None):
    _, shardings, of_batch = case_of(kind, mesh)
    weights = [placed(w, s) for w, s in zip(weights or first_weights(), shardings, strict=True)]
    for x in batches()[from_update:]:
        _, weights = step(weights, placed(x, of_batch))
    return [whole(w) for w in weights]


def compared(kind, mesh):
    step, shardings, of_batch = case_of(kind, mesh)
    out = {"out_shardings": (NamedSharding(mesh, PartitionSpec()), shardings)}
    plain = jax.jit(step, **out)
    ours = remat.jax.jit(step, budget=BUDGETS[kind], planner="peak_greedy", **out)
    args = [placed(w, s) for w, s in zip(first_weights(), shardings, strict=True)], placed(batches()[0], of_batch)
    plain_weights, our_weights = trained(plain, kind, mesh), trained(ours, kind, mesh)
    programs = [one.lower(*args).compile() for one in (plain, ours)]

    def peak(program):
        m = program.memory_analysis()
        return m.argument_size_in_bytes + m.output_size_in_bytes + m.temp_size_in_bytes - m.alias_size_in_bytes

    return {
        "schedule": list(ours.plan.schedule),
        "recomputed": ours.plan.recomputed,
        "budget_bytes": ours.plan.budget_bytes,
        "predicted_bytes": ours.plan.peak_bytes,
        "peaks": [peak(program) for program in programs],
        "sent": [arrays_sent(program.as_text()) for program in programs],
        "difference": max(float(np.abs(a - b).max()) for a, b in zip(plain_weights, our_weights, strict=True)),
        "weights": [w.tolist() for w in our_weights],
    }


def disagreeing(mesh, what):
    """The error of processes that differ in the budget, in the step, or in that one of them plans nothing."""
    number = jax.process_index()
    budget = f"{75 + 5 * number}%" if what == "budget" else 1000 if what == "infeasible" else "75%"
    layers = LAYERS - number if what == "step" else LAYERS
    step, shardings, of_batch = case_of("data", mesh)
    args = (
        [placed(w, s) for w, s in zip(first_weights(layers), shardings, strict=False)],
        placed(batches()[0], of_batch),
    )
    if what == "silent":
        ranks_of_fit.Ranks.__init__.__defaults__ = (2.0,)
        if number == 1:
            time.sleep(5)
            return "planned nothing"
    try:
        remat.jax.jit(step, budget=budget, planner="peak_greedy").lower(*args)
    except (remat.PlanMismatch, remat.InfeasibleBudget) as error:
        return f"{type(error).__name__} {error}"
    return "no error"


def killed(mesh, folder):
    """Trains with checkpoints of the user's; the second process waits in the third update until somebody ends it."""
    step, shardings, of_batch = case_of("data", mesh)
    ours = remat.jax.jit(step, budget=BUDGETS["data"], planner="peak_greedy")
    file = Path(folder) / "weights.npz"
    done = 0
    weights = first_weights()
    if file.exists():
        with np.load(file) as saved:
            done, weights = int(saved["done"]), [saved[f"w{n}"] for n in range(LAYERS)]
    placed_weights = [placed(w, s) for w, s in zip(weights, shardings, strict=True)]
    for number, x in list(enumerate(batches()))[done:]:
        if number == 3 and done == 0 and jax.process_index() == 1:
            (Path(folder) / "ready").write_text(str(os.getpid()))
            time.sleep(600)
        value, placed_weights = ours(placed_weights, placed(x, of_batch))
        value.block_until_ready()
        if jax.process_index() == 0:
            part = Path(folder) / "part.npz"
            np.savez(part, done=number + 1, **{f"w{n}": np.asarray(w) for n, w in enumerate(placed_weights)})
            part.rename(file)
    return [np.asarray(w).tolist() for w in placed_weights]


def main():
    port, count, number, cases = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
    jax.distributed.initialize(
        f"127.0.0.1:{port}", count, number, heartbeat_timeout_seconds=10, shutdown_timeout_seconds=60
    )
    mesh = Mesh(np.array(jax.devices()), ("all",))
    results = {}
    for case in cases:
        name, _, more = case.partition(":")
        if name in BUDGETS:
            results[case] = compared(name, mesh)
        elif name == "killed":
            results[case] = killed(mesh, more)
        else:
            results[case] = disagreeing(mesh, more)
    print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
