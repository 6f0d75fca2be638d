"""Recurrences under ``lax.scan``: which loops belong together, and loops that leave only starts of chunks behind."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax_models import GREEDY, assert_close, normal

import remat
import remat.jax
from remat.jax.scans.loops import Choice, LoopPair, Way
from remat.jax.scans.pairs import find_pairs
from remat.jax.trace.program import Flattener, alive
from remat.jax.variants import variants_of

STEPS, BATCH, WIDTH = 64, 32, 32


def cell(weights, h, t):
    a, b = weights
    return jnp.tanh(t @ a + h @ b)


def run(weights, xs, *, reverse=False, each=cell):
    def body(h, t):
        h = each(weights, h, t)
        return h, h

    return lax.scan(body, jnp.zeros(xs.shape[1:]), xs, reverse=reverse)


def weights(*seeds):
    return [tuple(normal(2 * seed + k, WIDTH, WIDTH, scale=WIDTH**-0.5) for k in range(2)) for seed in seeds]


def stacked(params, xs):
    for own in params:
        _, xs = run(own, xs)
    return jnp.mean(xs**2)


def bidirectional(params, xs):
    _, there = run(params[0], xs)
    _, back = run(params[1], xs, reverse=True)
    _, both = run(params[2], there + back)
    return jnp.mean(both**2)


def encoder_decoder(params, xs):
    last, states = run(params[0], xs)

    def decode(h, t):
        h = cell(params[1], h, t + jnp.tanh(h * states.mean(0)))
        return h, h

    _, out = lax.scan(decode, last, xs)
    return jnp.mean(out**2) + jnp.mean(states[::2] * out[::2])


def nested(params, xs):
    """A loop over layers around loops over time."""
    a, b = (jnp.stack(parts) for parts in zip(*params, strict=True))
    xs, _ = lax.scan(lambda xs, own: (run(own, xs)[1], None), xs, (a, b))
    return jnp.mean(xs**2)


def two_stacks(params, xs):
    """Two stacks of different use: one is read by others, the other by the backward loop alone."""

    def body(h, t):
        h = cell(params[0], h, t)
        g = jnp.sin(h @ params[1][0])
        return h, (g, jnp.cos(g).sum())

    h, (gs, sums) = lax.scan(body, jnp.zeros((BATCH, WIDTH)), xs)
    return jnp.mean(gs[3:] ** 2) + jnp.mean(h) + jnp.mean(sums) * 1e-3


LOSSES = {
    "stacked": (stacked, 2),
    "bidirectional": (bidirectional, 3),
    "encoder-decoder": (encoder_decoder, 2),
    "nested": (nested, 2),
    "two stacks": (two_stacks, 2),
}


def arguments(count, steps=STEPS):
    return weights(*range(count)), normal(90, steps, BATCH, WIDTH)


def flat_gradient(loss, args):
    leaves, structure = jax.tree.flatten(args)
    return (lambda *flat: jax.value_and_grad(loss)(*jax.tree.unflatten(structure, flat))), leaves


def pairs_of(loss, args):
    gradient, leaves = flat_gradient(loss, args)
    closed = jax.make_jaxpr(gradient)(*leaves)
    flattener = Flattener()
    outputs = flattener.add(closed, [flattener.value(var.aval) for var in closed.jaxpr.invars])
    equations = alive(flattener.equations, outputs)
    loops = [number for number, one in enumerate(equations) if one.eqn.primitive.name == "scan"]
    return [(loops.index(pair.forward), loops.index(pair.backward)) for pair in find_pairs(equations, outputs)]


@pytest.mark.parametrize("layers", [1, 2, 4])
def test_each_layer_is_paired_with_its_own_backward_loop(layers):
    """Every layer's outputs are read by the next one's loops, too."""
    assert pairs_of(stacked, arguments(layers)) == [(n, 2 * layers - 1 - n) for n in range(layers)]


def test_loops_that_only_follow_one_another_are_no_pair():
    """The second loop alone reads what the first one stacks, and it runs in the same direction: it is no gradient."""
    args = arguments(2)
    closed = jax.make_jaxpr(stacked)(*args)
    flattener = Flattener()
    outputs = flattener.add(closed, [flattener.value(var.aval) for var in closed.jaxpr.invars])
    assert sum(one.eqn.primitive.name == "scan" for one in flattener.equations) == 2
    assert find_pairs(flattener.equations, outputs) == []


def test_both_directions_are_paired():
    pairs = pairs_of(bidirectional, arguments(3))
    assert len(pairs) == 3
    assert pairs[-1] == (2, 3)
    assert {number for pair in pairs for number in pair} == set(range(6))


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_those_of_the_plain_loops(name):
    loss, count = LOSSES[name]
    args = arguments(count)
    ours = remat.jax.value_and_grad(loss, budget="70%", **GREEDY)
    found = ours(*args)

    assert_close(found, jax.jit(jax.value_and_grad(loss))(*args))
    assert ours.plan.peak_bytes <= ours.plan.budget_bytes
    measured = remat.jax.measure(remat.jax.jit(ours), *args, repeats=1)
    assert measured.peak_bytes == ours.plan.peak_bytes


WAYS = [
    (steps, chunked, chunks, reverse)
    for steps, chunked, chunks in (
        (61, 56, (8,)),
        (61, 48, (12, 4)),
        (64, 64, (8,)),
        (64, 32, (8,)),
        (64, 64, (16, 4)),
    )
    for reverse in (False, True)
]
QUICK = ((61, 56, (8,), True), (61, 48, (12, 4), False))


@pytest.mark.parametrize(
    ("steps", "chunked", "chunks", "reverse"),
    [one if one in QUICK else pytest.param(*one, marks=pytest.mark.slow) for one in WAYS],
)
def test_chunks_of_every_kind_are_exact(monkeypatch, reverse, steps, chunked, chunks):
    """All of the iterations in chunks or some, one level or two, with iterations left over or none."""
    ran = []

    def loss(params, xs):
        _, ys = run(params[0], xs, reverse=reverse)
        return jnp.mean(jnp.cumsum(ys, 0) ** 2)

    def in_chunks(self, way, broadcasts, planned):
        wanted = frozenset(way.pair.needed) - way.pair.free
        choice = Choice(wanted if chunked < steps else frozenset(), chunked, chunks, wanted)
        ran.append(choice)
        original(self, Way(way.pair, choice), broadcasts, planned)

    original = LoopPair.__init__
    monkeypatch.setattr(LoopPair, "__init__", in_chunks)
    args = arguments(1, steps)
    gradient, leaves = flat_gradient(loss, args)
    variants, _ = variants_of(gradient, leaves)
    program = variants[1].program
    from remat.jax.emit.evaluate import emit

    plain_order = tuple(range(len(program.instructions)))
    made = emit(program, plain_order, variants[1].turning_point, "data")(leaves, list(program.constants.values()))

    assert ran
    # The same operations on the same values in the same order: equal to the last bit, up to how they were compiled. On
    # jaxlib 0.10.0 the loss of one way differs by 1.3e-6, on others by less than 1e-6.
    assert_close(made, jax.tree.leaves(jax.jit(gradient)(*leaves)), rtol=2e-6)


def gru(own, h, t):
    w, u = own
    of_input, of_state = jnp.split(t @ w, 3, -1), jnp.split(h @ u, 3, -1)
    reset, update = (jax.nn.sigmoid(a + b) for a, b in zip(of_input[:2], of_state[:2], strict=True))
    return (1 - update) * jnp.tanh(of_input[2] + reset * of_state[2]) + update * h


def stacked_grus(wrap):
    def loss(params, xs):
        for own in params:
            _, xs = run(own, xs, each=wrap(gru))
        return jnp.mean(xs**2)

    return loss


def test_two_stacked_grus_need_less_than_with_checkpointed_cells():
    """256 steps, well below the bytes of ``jax.checkpoint`` on the cell, which keeps every carry."""
    params = [tuple(normal(7 * n + k, WIDTH, 3 * WIDTH, scale=WIDTH**-0.5) for k in range(2)) for n in range(2)]
    args = params, normal(9, 256, BATCH, WIDTH)
    plain = jax.value_and_grad(stacked_grus(lambda each: each))
    theirs = remat.jax.measure(remat.jax.jit(jax.value_and_grad(stacked_grus(jax.checkpoint))), *args, repeats=1)
    smaller = remat.jax.value_and_grad(stacked_grus(lambda each: each), budget=int(0.85 * theirs.peak_bytes), **GREEDY)

    assert_close(smaller(*args), jax.jit(plain)(*args))
    assert remat.jax.measure(remat.jax.jit(smaller), *args, repeats=1).peak_bytes <= 0.85 * theirs.peak_bytes


@pytest.mark.slow
def test_a_saved_plan_of_recurrences_is_followed_by_another_function():
    args = arguments(1)
    ours = remat.jax.value_and_grad(stacked, budget="70%", **GREEDY)
    ours(*args)
    again = remat.jax.value_and_grad(stacked, plan=ours.plan)

    assert_close(again(*args), ours(*args), rtol=1e-7)
    assert again.plan is ours.plan


def test_the_same_budget_makes_the_same_plan():
    """Searches are limited by work, not by seconds."""
    args = arguments(1)
    plans = [remat.jax.value_and_grad(stacked, budget="70%").plan_for(*args) for _ in range(2)]

    assert plans[0].schedule == plans[1].schedule
    assert plans[0].fingerprint == plans[1].fingerprint
