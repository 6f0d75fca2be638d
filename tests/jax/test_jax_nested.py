"""Loops of loops: the loops in the body of a pair are written again, too, and the outer menu offers that."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax_models import GREEDY, assert_close, normal

import remat
import remat.jax
from remat.jax.emit.evaluate import emit
from remat.jax.scans.light_loops import with_light_loops_inside
from remat.jax.scans.nested import menu_of, rows_of
from remat.jax.scans.pairs import find_pairs
from remat.jax.trace.program import Flattener, alive
from remat.jax.variants import profile_here, variants_of

LAYERS, STEPS, BATCH, WIDTH = 3, 24, 8, 16


def same(function):
    return function


def over_layers(layer, wrap=same):
    """A loss over layers under ``lax.scan``; ``layer`` takes a sequence, the layer's own weights and a wrapper."""

    def loss(weights, xs, *others):
        body = wrap(lambda xs, own: (layer(xs, own, wrap, *others), None))
        xs, _ = lax.scan(body, xs, weights)
        return jnp.mean(xs**2)

    return loss


def cell(own, h, x):
    h = jnp.tanh(x @ own[0] + h @ own[1])
    return h, jax.nn.silu(h) * x


def run(own, xs, wrap=same, *, reverse=False, start=None):
    start = jnp.zeros(xs.shape[1:]) if start is None else start
    return lax.scan(wrap(lambda h, x: cell(own, h, x)), start, xs, reverse=reverse)


def one(xs, own, wrap):
    return run(own, xs, wrap)[1]


def reversed_one(xs, own, wrap):
    return run(own, xs, wrap, reverse=True)[1]


def handed_on(xs, own, wrap):
    """What is carried is what the next layer reads, so that the backward loop finds it there, one place before."""

    def body(h, x):
        h = jnp.tanh(x @ own[0] + h @ own[1])
        return h, h

    return xs + lax.scan(wrap(body), jnp.zeros(xs.shape[1:]), xs)[1]


def one_after_another(xs, own, wrap):
    """The second one starts where the first one ended, and takes half as many steps."""
    last, ys = run(own, xs, wrap)
    _, zs = run(own, ys[::2], wrap, start=last)
    return xs + jnp.repeat(zs, 2, 0)


def bidirectional(xs, own, wrap):
    return xs + run(own, xs, wrap)[1] * run(own, xs, wrap, reverse=True)[1]


def without_slices(xs, own, wrap):
    """A loop of known length with an integer counter, and a carry that nobody uses."""

    def body(carry, _):
        h, n, unused = carry
        h = jnp.tanh(h @ own[0] + n * 0.1)
        return (h, n + 1, unused), None

    (last, _, _), _ = lax.scan(wrap(body), (xs[0], 0, xs[1, 0]), None, length=STEPS)
    return xs + last


def counted(xs, own, wrap):
    """``fori_loop`` over a known number of steps."""
    return xs + lax.fori_loop(0, STEPS, lambda n, h: jnp.tanh(h @ own[0] + 0.1 * n), xs[0])


def deeper(xs, own, wrap):
    """Three loops in one another."""

    def body(h, x):
        h, _ = lax.scan(wrap(lambda h, n: (jnp.tanh(h @ own[0] + x * n), None)), h, jnp.linspace(0, 1, 6))
        return h, jax.nn.silu(h) * x

    return xs + lax.scan(wrap(body), jnp.zeros(xs.shape[1:]), xs)[1]


def dropped_out(xs, own, wrap, key):
    def body(carry, x):
        h, key = carry
        key, here = jax.random.split(key)
        h, y = cell(own, h, jnp.where(jax.random.bernoulli(here, 0.8, x.shape), x / 0.8, 0))
        return (h, key), y

    return lax.scan(wrap(body), (jnp.zeros(xs.shape[1:]), key), xs)[1]


def attention(x, own, wrap):
    """Causal, in chunks of queries: differentiation makes all masks in a loop before the first layer."""
    keys, size = x @ own[0], 6

    def chunk(_, at):
        place, queries = at
        scores = queries @ keys.transpose(1, 2, 0).astype(x.dtype)
        is_past = (place * size + jnp.arange(size))[:, None] >= jnp.arange(len(x))
        return None, jax.nn.softmax(jnp.where(is_past, scores, -1e9)) @ x.transpose(1, 0, 2)

    queries = (x @ own[1]).transpose(1, 0, 2).reshape(x.shape[1], -1, size, x.shape[2]).transpose(1, 0, 2, 3)
    _, out = lax.scan(wrap(chunk), None, (jnp.arange(len(queries)), queries))
    return x + out.transpose(0, 2, 1, 3).reshape(x.shape)


def attention_in_two_loops(x, own, wrap):
    """As above, and the keys of each chunk of queries in chunks, too: the masks are made in a loop of a loop."""
    size = 6
    keys, values, queries = (
        part.transpose(1, 0, 2).reshape(x.shape[1], -1, size, x.shape[2]).transpose(1, 0, 2, 3)
        for part in (x @ own[0], x, x @ own[1])
    )
    places = jnp.arange(len(queries))

    def of_queries(_, at):
        place, queries = at

        def of_keys(carry, at):
            most, total, out = carry
            other, keys, values = at
            is_past = (place * size + jnp.arange(size))[:, None] >= other * size + jnp.arange(size)
            scores = jnp.where(is_past, queries @ keys.transpose(0, 2, 1), -1e9)
            new = jnp.maximum(most, scores.max(-1))
            shares, old = jnp.exp(scores - new[..., None]), jnp.exp(most - new)
            return (new, total * old + shares.sum(-1), out * old[..., None] + shares @ values), None

        zero = jnp.zeros(queries.shape[:-1])
        carry = (zero - 1e9, zero, jnp.zeros(queries.shape))
        (_, total, out), _ = lax.scan(wrap(of_keys), carry, (places, keys, values))
        return None, out / total[..., None]

    _, out = lax.scan(wrap(of_queries), None, (places, queries))
    return x + out.transpose(0, 2, 1, 3).reshape(x.shape)


NESTS = {
    "one": one,
    "reversed": reversed_one,
    "handed on": handed_on,
    "one after another": one_after_another,
    "bidirectional": bidirectional,
    "without slices": without_slices,
    "counted": counted,
    "deeper": deeper,
    "attention": attention,
    "attention in two loops": attention_in_two_loops,
}
QUICK = ("one", "handed on", "one after another", "attention")


def arguments(layers=LAYERS, steps=STEPS):
    weights = tuple(normal(n, layers, WIDTH, WIDTH, scale=WIDTH**-0.5) for n in range(2))
    return weights, normal(9, steps, BATCH, WIDTH)


def flat_gradient(loss, args):
    leaves, structure = jax.tree.flatten(args)
    return (lambda *flat: jax.value_and_grad(loss)(*jax.tree.unflatten(structure, flat))), leaves


def pair_of(loss, args):
    """The outer pair."""
    gradient, leaves = flat_gradient(loss, args)
    closed = jax.make_jaxpr(gradient)(*leaves)
    flattener = Flattener()
    outputs = flattener.add(closed, [flattener.value(var.aval) for var in closed.jaxpr.invars])
    equations = alive(flattener.equations, outputs)
    equations = alive(with_light_loops_inside(equations, flattener.avals), outputs)
    (pair,) = find_pairs(equations, outputs)
    return pair


def smallest(loss, args):
    with pytest.raises(remat.InfeasibleBudget) as caught:
        remat.jax.value_and_grad(loss, budget=1, **GREEDY).plan_for(*args)
    return caught.value.minimum_bytes


def in_chunks(way):
    """Does any of the loops run in chunks?"""
    return bool(way.choice.chunks) or any(map(in_chunks, way.inside))


def check_all_variants(loss, args, *, most=6):
    """Variants from the whole menu, each with the gradients of the plain loops."""
    gradient, leaves = flat_gradient(loss, args)
    variants, _ = variants_of(gradient, leaves)
    expected = jax.tree.leaves(jax.jit(gradient)(*leaves))
    assert len(variants) > 4
    for number in sorted({*range(1, len(variants), max(1, len(variants) // most)), *variants.suggested}):
        program = variants[number].program
        run = emit(program, tuple(range(len(program.instructions))), variants[number].turning_point, "data")
        made = jax.jit(run)(leaves, list(program.constants.values()))
        assert_close(made, expected, rtol=1e-5)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in NESTS]
)
def test_every_way_to_run_loops_of_loops_is_exact(name):
    check_all_variants(over_layers(NESTS[name]), arguments(), most=3 if name in QUICK else 12)


@pytest.mark.parametrize("key", [jax.random.PRNGKey(3), jax.random.key(4)], ids=["raw key", "typed key"])
def test_random_keys_in_the_inner_loop(key):
    """A key that is carried from step to step: masks are those of the plain loops in every way."""
    check_all_variants(over_layers(dropped_out), (*arguments(), key), most=3)


def test_the_outer_menu_offers_what_inner_loops_may_leave():
    pair = pair_of(over_layers(one), arguments())
    menu = menu_of(pair, profile_here())

    inner = {way.choice for option in menu.options for way in option.way.inside}
    assert len(inner) > 2
    assert any(in_chunks(way) for option in menu.options for way in option.way.inside)
    held = [option.held_bytes for option in menu.options]
    assert held == sorted(held, reverse=True)
    (way,) = menu.checkpointed.way.inside
    assert not in_chunks(way)
    assert not menu.checkpointed.way.choice.chunks


@pytest.mark.parametrize("name", ["one", "attention"])
def test_checkpointed_bodies_stack_only_what_is_carried(name):
    """As ``jax.checkpoint`` does, whatever the model says of what lies there while an iteration runs again."""
    way = menu_of(pair_of(over_layers(NESTS[name]), arguments(layers=2)), profile_here()).checkpointed.way

    assert way.choice.stacked <= set(way.pair.first_carries)
    assert not any(inner.choice.stacked - set(inner.pair.first_carries) for inner in way.inside)


def test_checkpointed_rows_are_there_though_others_beat_them():
    """The bytes are those of a model, so what a user would write by hand stands in the list, whatever it says of it."""
    pair = pair_of(over_layers(one), arguments())
    menu = menu_of(pair, profile_here())
    rows, number = rows_of([menu], 3)

    assert rows[number] == (menu.checkpointed,)
    assert len(rows) <= 4


@pytest.mark.parametrize("name", ["one", pytest.param("bidirectional", marks=pytest.mark.slow), "attention"])
def test_budgets_of_checkpointed_bodies_are_kept(name):
    """``jax.checkpoint`` around both bodies, which the outer body as one op cannot reach."""
    args = arguments(layers=4, steps=96)
    theirs = remat.jax.jit(jax.value_and_grad(over_layers(NESTS[name], jax.checkpoint)))
    limit_bytes = remat.jax.measure(theirs, *args, repeats=1).peak_bytes
    plain = over_layers(NESTS[name])
    ours = remat.jax.jit(jax.value_and_grad(plain), budget=limit_bytes, **GREEDY)

    assert_close(ours(*args), jax.jit(jax.value_and_grad(plain))(*args))
    assert remat.jax.measure(ours, *args, repeats=1).peak_bytes <= limit_bytes


@pytest.mark.parametrize("layer", [attention, attention_in_two_loops])
def test_masks_are_made_in_the_chunks_that_read_them(layer):
    pair = pair_of(over_layers(layer), arguments())
    masks = [aval for aval in pair.avals if str(getattr(aval, "dtype", "")) == "bool" and len(aval.shape) > 2]
    read = [var.aval for loop in (pair.first, pair.second) for var in loop.eqn.invars]

    assert masks or layer is attention_in_two_loops  # There they are in a loop of the body.
    assert not any(str(aval.dtype) == "bool" for aval in read)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one", "deeper", "bidirectional"])
def test_the_smallest_budget_of_loops_of_loops_is_that_of_both(name):
    """Below what one ``jax.checkpoint`` alone takes, around either of the bodies, and at what both take."""
    args = arguments(layers=4, steps=96)
    loss = over_layers(NESTS[name])
    theirs = remat.jax.jit(jax.value_and_grad(over_layers(NESTS[name], jax.checkpoint)))

    assert smallest(loss, args) <= remat.jax.measure(theirs, *args, repeats=1).peak_bytes
