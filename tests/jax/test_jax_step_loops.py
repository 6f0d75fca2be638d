"""Loops over training steps and over micro-batches, written by hand: a budget plans the step in their bodies."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax_models import assert_close, normal

import remat
import remat.jax
from remat.jax.peak import peak_of
from remat.jax.sharding import arrays_sent

DEVICES = 4
ROWS, WIDTH, LAYERS, RATE = 2048, 64, 8, 0.1
ACTIVATION = ROWS * WIDTH * 4


def arguments():
    weights = [normal(n, WIDTH, WIDTH, scale=WIDTH**-0.5) for n in range(LAYERS)]
    return weights, normal(88, ROWS, WIDTH), jax.random.key(3)


def loss_of(weights, x, key):
    for number, weight in enumerate(weights):
        x = jnp.tanh(x @ weight)
        x = x * jax.random.bernoulli(jax.random.fold_in(key, number), 0.9, (x.shape[0], 1))
    return jnp.mean(jnp.square(x))


def updated(weights, x, key):
    loss, gradients = jax.value_and_grad(loss_of)(weights, x, key)
    return jax.tree.map(lambda weight, gradient: weight - RATE * gradient, weights, gradients), loss


def scanned_steps(weights, x, key):
    return lax.scan(
        lambda weights, number: updated(weights, x, jax.random.fold_in(key, number)), weights, jnp.arange(3)
    )


def counted_steps(weights, x, key):
    return lax.fori_loop(0, 3, lambda number, now: updated(now, x, jax.random.fold_in(key, number))[0], weights)


def steps_until_done(weights, x, key):
    def step(state):
        weights, number, _ = state
        return *updated(weights, x, jax.random.fold_in(key, number))[:1], number + 1, jnp.float32(1)

    return lax.while_loop(lambda state: (state[1] < 3) & (state[2] > 0), step, (weights, 0, jnp.float32(1)))


def micro_batches(weights, x, key):
    """As users write gradient accumulation."""

    def add(total, piece):
        loss, gradients = jax.value_and_grad(loss_of)(weights, piece, key)
        return jax.tree.map(jnp.add, total, gradients), loss

    total, losses = lax.scan(add, jax.tree.map(jnp.zeros_like, weights), jnp.stack([x, x + 1, x - 1]))
    return jax.tree.map(lambda weight, gradient: weight - RATE * gradient / 3, weights, total), jnp.mean(losses)


def epochs_of_batches(weights, x, key):
    """A loop of a loop of steps, over batches in another order in each epoch."""

    def epoch(weights, number):
        order = jax.random.permutation(jax.random.fold_in(key, number), 2)
        return lax.scan(lambda weights, one: updated(weights, x + one, key), weights, order.astype(x.dtype))

    return lax.scan(epoch, weights, jnp.arange(2))


def steps_of_one_function_twice(weights, x, key):
    """Both calls have the same body, an object that JAX keeps."""
    some = jax.jit(lambda weights, x: lax.scan(lambda now, _: updated(now, x, key), weights, None, length=2))
    weights, _ = some(weights, x)
    return some(weights, x + 1)


def one_of_two_steps(weights, x, key):
    return lax.cond(jnp.sum(x) > 0, lambda: updated(weights, x, key), lambda: updated(weights, 2 * x, key))


CASES = [
    scanned_steps,
    counted_steps,
    steps_until_done,
    micro_batches,
    epochs_of_batches,
    steps_of_one_function_twice,
    one_of_two_steps,
]


@pytest.mark.parametrize("step", CASES, ids=lambda step: step.__name__)
def test_numbers_and_memory(step):
    given = arguments()
    plain = jax.jit(step)
    ours = remat.jax.jit(step, budget="70%")

    assert_close(ours(*given), plain(*given))
    plan = ours.plan
    plain_bytes = remat.jax.measure(plain, *given, repeats=1).peak_bytes
    our_bytes = remat.jax.measure(ours, *given, repeats=1).peak_bytes
    assert plan.baseline_peak_bytes == plain_bytes
    assert our_bytes == plan.peak_bytes <= plan.budget_bytes
    assert our_bytes < plain_bytes - 2 * ACTIVATION


def test_the_smallest_budget_is_near_that_of_one_step():
    """A step in the loop needs what it needs alone, and the loop a second set of weights."""
    given = arguments()

    def smallest(step) -> int:
        with pytest.raises(remat.InfeasibleBudget) as refused:
            remat.jax.jit(step, budget=1)(*given)
        return refused.value.minimum_bytes

    alone, looped = smallest(updated), smallest(scanned_steps)
    assert alone < looped < alone + ACTIVATION
    ours = remat.jax.jit(scanned_steps, budget=looped)
    assert_close(ours(*given), jax.jit(scanned_steps)(*given))
    assert remat.jax.measure(ours, *given, repeats=1).peak_bytes <= looped


def test_dropout_in_the_loop_is_not_drawn_again():
    """To the bit: a plan for the body repeats what does not depend on chance, or the same draw of the same key."""
    given = arguments()
    plain, ours = jax.jit(scanned_steps)(*given), remat.jax.jit(scanned_steps, budget="70%")(*given)
    for one, other in zip(jax.tree.leaves(plain), jax.tree.leaves(ours), strict=True):
        assert np.array_equal(one, other)


def test_a_plan_is_followed_in_another_function():
    given = arguments()
    first = remat.jax.jit(scanned_steps, budget="70%")
    first(*given)
    again = remat.jax.jit(scanned_steps, plan=first.plan)
    assert_close(again(*given), jax.jit(scanned_steps)(*given))
    assert remat.jax.measure(again, *given, repeats=1).peak_bytes == first.plan.peak_bytes


def test_donated_weights():
    weights, x, key = arguments()
    ours = remat.jax.jit(scanned_steps, budget="70%", donate_argnums=0)
    wanted = jax.jit(scanned_steps)(weights, x, key)
    assert_close(ours(weights, x, key), wanted)
    assert ours.plan.peak_bytes <= ours.plan.budget_bytes
    assert weights[0].is_deleted()


def test_a_callback_in_the_loop_runs_once_for_each_step():
    seen = []

    def step(weights, x, key):
        def one(weights, number):
            weights, loss = updated(weights, x, jax.random.fold_in(key, number))
            jax.debug.callback(lambda number: seen.append(int(number)), number)
            return weights, loss

        return lax.scan(one, weights, jnp.arange(3))

    given = arguments()
    ours = remat.jax.jit(step, budget="70%")
    jax.block_until_ready(ours(*given))
    jax.effects_barrier()
    assert sorted(seen) == [0, 1, 2]
    assert_close(ours(*given), jax.jit(step)(*given))


def over_devices(kind):
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(kind,))
    weights, x, _ = arguments()
    pieces = jnp.stack([jnp.tile(x, (2, 1)), jnp.tile(x + 1, (2, 1))])
    weights = jax.device_put(weights, NamedSharding(mesh, PartitionSpec()))
    return mesh, weights, jax.device_put(pieces, NamedSharding(mesh, PartitionSpec(None, "data")))


def plain_loss(weights, x):
    for weight in weights:
        x = jnp.tanh(x @ weight)
    return jnp.mean(jnp.square(x))


def added_up(weights, pieces, each=lambda gradients: gradients):
    def add(total, piece):
        loss, gradients = jax.value_and_grad(plain_loss)(weights, piece)
        return jax.tree.map(jnp.add, total, each(gradients)), loss

    total, losses = lax.scan(add, jax.tree.map(jnp.zeros_like, weights), pieces)
    return total, jnp.mean(losses)


def assert_planned(step, *given):
    """A quarter less of what one device holds, the same numbers, and nothing sent more than in the plain program."""
    plain, ours = jax.jit(step), remat.jax.jit(step, budget="75%")
    assert_close(ours(*given), plain(*given))
    plain_bytes = peak_of(plain.lower(*given).compile().memory_analysis())
    assert ours.plan.baseline_peak_bytes == plain_bytes
    assert ours.plan.peak_bytes <= ours.plan.budget_bytes < plain_bytes
    compiled = ours.lower(*given).compile()
    assert peak_of(compiled.memory_analysis()) == ours.plan.peak_bytes
    assert arrays_sent(compiled.as_text()) <= arrays_sent(plain.lower(*given).compile().as_text())


def test_what_a_loop_changes_in_place():
    """A body that reads or writes a ``jax.Ref`` stays as it is; one among the arguments is refused."""

    def step(weights, x, key):
        total = jax.new_ref(jnp.zeros(()))

        def one(weights, number):
            weights, loss = updated(weights, x, jax.random.fold_in(key, number))
            total[...] += loss
            return weights, loss

        return lax.scan(one, weights, jnp.arange(3))[0], total[...]

    given = arguments()
    assert_close(remat.jax.jit(step, budget="100%")(*given), jax.jit(step)(*given))
    with pytest.raises(remat.InfeasibleBudget, match="scan"):
        remat.jax.jit(step, budget="70%")(*given)

    def counting(weights, x, key, total):
        weights, loss = updated(weights, x, key)
        total[...] += loss
        return weights

    with pytest.raises(remat.UnsupportedStep, match=r"a jax\.Ref .* return the new value instead"):
        remat.jax.jit(counting, budget="70%")(*given, jax.new_ref(jnp.zeros(())))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_micro_batches_over_devices(kind):
    _, weights, pieces = over_devices(kind)
    assert_planned(added_up, weights, pieces)


@pytest.mark.parametrize(
    ("checked", "sent"),
    [
        (False, "at the end"),
        pytest.param(False, "each time", marks=pytest.mark.thorough),
        pytest.param(True, "each time", marks=pytest.mark.thorough),
    ],
)
def test_micro_batches_inside_of_shard_map(checked, sent):
    """Where types say over which axes values vary, JAX sums gradients of what is the same on all devices by itself."""
    mesh, weights, pieces = over_devices(AxisType.Auto)

    def mean_over_devices(tree):
        return jax.tree.map(lambda one: lax.pmean(one, "data"), tree)

    def local(weights, pieces):
        each = mean_over_devices if sent == "each time" and not checked else (lambda tree: tree)
        total, loss = added_up(weights, pieces, each)
        return mean_over_devices(total) if sent == "at the end" else total, lax.pmean(loss, "data")

    specs = {
        "in_specs": (PartitionSpec(), PartitionSpec(None, "data")),
        "out_specs": (PartitionSpec(), PartitionSpec()),
    }
    assert_planned(jax.shard_map(local, mesh=mesh, check_vma=checked, **specs), weights, pieces)


@pytest.mark.thorough
def test_scanned_layers_in_a_loop_over_micro_batches():
    """In the body lies a pair of loops, with what the forward one leaves to the backward one."""

    def loss(weights, x):
        x, _ = lax.scan(lambda h, weight: (h + jnp.tanh(jnp.sin(h @ weight) @ weight), None), x, weights)
        return jnp.mean(jnp.square(x))

    def step(weights, x):
        def add(total, piece):
            value, gradient = jax.value_and_grad(loss)(weights, piece)
            return total + gradient, value

        return lax.scan(add, jnp.zeros_like(weights), jnp.stack([x, 2 * x]))

    given = jnp.stack(arguments()[0]), arguments()[1]
    ours = remat.jax.jit(step, budget="40%")
    assert_close(ours(*given), jax.jit(step)(*given))
    assert remat.jax.measure(ours, *given, repeats=1).peak_bytes <= ours.plan.budget_bytes


def test_a_barrier_of_several_values_makes_no_bytes():
    def function(x):
        first, second = jnp.tanh(x), jnp.sin(x)
        first, second = lax.optimization_barrier((first, second))
        return first @ second

    x = jnp.ones((64, 64))
    graph = remat.jax.trace(function, x)
    # The argument, two values, and the product of them.
    assert remat.simulate(graph, graph.plain_schedule).peak_bytes == 4 * x.nbytes
