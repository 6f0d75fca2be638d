"""``recompute``: the numbers of the plain function, less memory under a plain ``jax.jit``, whatever surrounds it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax_models import OF_XLA_0_10, assert_close, normal, temp_bytes

import remat
import remat.jax
from remat.jax import _private, recompute

WIDTH, BATCH, LAYERS = 32, 256, 6


def block(x, w):
    """Wide inside, narrow at the edges: what recomputation is for."""
    return jnp.tanh(jnp.sin(x @ w["up"]) @ w["down"])


def arguments():
    weights = [
        {"up": normal(n, WIDTH, 8 * WIDTH, scale=0.2), "down": normal(n + 50, 8 * WIDTH, WIDTH, scale=0.05)}
        for n in range(LAYERS)
    ]
    return weights, normal(99, BATCH, WIDTH)


def stack(each):
    def loss(weights, x):
        for w in weights:
            x = each(x, w)
        return jnp.mean(jnp.square(x))

    return loss


def scanned(each, **options):
    def loss(weights, x):
        weights = jax.tree.map(lambda *leaves: jnp.stack(leaves), *weights)
        return jnp.mean(lax.scan(lambda c, w: (each(c, w), None), x, weights, **options)[0] ** 2)

    return loss


def inside(wrap, block=block):
    """Ways to use a recomputed function, each as a loss."""
    one = wrap(block)
    pair = wrap(lambda x, w: one(jnp.cos(one(x, w)), w))

    def closing_over(x, w):
        return wrap(lambda x: block(x, w))(x)

    def with_key(x, w):
        def dropped(x, w, key, count, keep=None):
            mask = jax.random.bernoulli(key, 0.9, x.shape)
            return jnp.where(mask, block(x, w), 0), count + 1, keep

        return wrap(dropped)(x, w, jax.random.key(3, impl="rbg"), jnp.int32(1), keep=None)[0]

    def with_flags(x, w):
        def repeated(x, w, times, flag, act=jnp.tanh, name=""):
            assert name == "named"
            for _ in range(times):
                x = block(x, w)
            return act(x) if flag else x

        return wrap(repeated)(x, w, 1, True, act=jnp.sin, name="named")

    def with_aux(x, w):
        y, aux = wrap(lambda x, w: (block(x, w), {"norm": jnp.sum(x**2), "first": x[0]}))(x, w)
        return y + 1e-3 * aux["norm"] / x.size

    def branching(x, w):
        return lax.cond(x[0, 0] > 0, lambda x: one(x, w), lambda x: jnp.cos(x), x)

    return {
        "plain": stack(one),
        "nested": stack(pair),
        "closed over": stack(closing_over),
        "keys, integers, None": stack(with_key),
        "flags, names, functions": stack(with_flags),
        "aux": stack(with_aux),
        "inner jit": stack(jax.jit(one)),
        "branches": stack(branching),
        "scan": scanned(one),
        "unrolled scan": scanned(one, unroll=True),
        "vmap": lambda weights, x: jnp.mean(jax.vmap(lambda row: stack(one)(weights, row[None]))(x)),
        "policy": stack(wrap(block)),
    }


def wrapped(name):
    if name == "policy":
        return lambda f: recompute(f, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
    return recompute


SAVES = ("plain", "nested", "closed over", "keys, integers, None", "inner jit", "unrolled scan")
if _private.HAS_OWN_CALLS:
    SAVES += ("vmap",)


QUICK = ("plain", "keys, integers, None", "flags, names, functions")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in inside(recompute)]
)
def test_gradients_and_memory_under_a_plain_jit(name):
    plain, ours = inside(lambda f: f)[name], inside(wrapped(name))[name]
    args = arguments()

    assert_close(jax.jit(jax.value_and_grad(ours))(*args), jax.jit(jax.value_and_grad(plain))(*args))
    if name in SAVES:
        gradient = jax.grad(ours)
        assert temp_bytes(jax.jit(gradient), *args) < 0.5 * temp_bytes(jax.jit(jax.grad(plain)), *args)


@OF_XLA_0_10
def test_jax_checkpoint_saves_nothing_here_and_ours_does_under_either_jit():
    args = arguments()
    plain, theirs, ours = (jax.grad(stack(wrap(block))) for wrap in (lambda f: f, jax.checkpoint, recompute))
    whole = temp_bytes(jax.jit(plain), *args)

    assert temp_bytes(jax.jit(theirs), *args) > 0.95 * whole
    assert temp_bytes(jax.jit(ours), *args) < 0.35 * whole
    assert temp_bytes(remat.jax.jit(ours), *args) < 0.35 * whole


def test_a_nested_call_is_recomputed_by_itself():
    """The outer call's second computation keeps nothing inside of the inner ones either."""

    def gradient(inner, outer):
        one = inner(block)
        pair = outer(lambda x, a, b: one(one(x, a), b))

        def loss(weights, x):
            for a, b in zip(weights[::2], weights[1::2], strict=True):
                x = pair(x, a, b)
            return jnp.mean(x**2)

        return jax.jit(jax.grad(loss))

    args = arguments()
    assert_close(gradient(recompute, recompute)(*args), gradient(id_, id_)(*args))
    both, outer = (temp_bytes(gradient(inner, recompute), *args) for inner in (recompute, id_))
    assert both < 0.75 * outer


def test_a_trace_made_for_one_jit_is_not_used_by_the_other():
    """Inner functions are traced once for all; the ties of one compiler are lost on the other."""
    args = arguments()
    inner = jax.jit(recompute(block))
    saved = [temp_bytes(jit(jax.grad(stack(inner))), *args) for jit in (remat.jax.jit, jax.jit, remat.jax.jit)]

    assert max(saved) < 1.2 * min(saved)


def test_called_on_arrays_and_without_a_gradient():
    args = arguments()
    assert_close(jax.value_and_grad(stack(recompute(block)))(*args), jax.value_and_grad(stack(block))(*args))
    assert_close(recompute(block)(args[1], args[0][0]), block(args[1], args[0][0]), rtol=0)


@pytest.mark.slow
def test_forward_mode_and_higher_derivatives():
    weights, x = arguments()
    weights = weights[:2]

    def of(each):
        return lambda s: stack(each)(weights, x * s)

    ours, plain = of(recompute(block)), of(block)
    if _private.HAS_OWN_CALLS:
        assert_close(jax.jvp(ours, (1.1,), (1.0,)), jax.jvp(plain, (1.1,), (1.0,)))
        assert_close(jax.linearize(ours, 1.1)[1](1.0), jax.linearize(plain, 1.1)[1](1.0))
        assert_close(jax.jit(jax.hessian(ours))(1.1), jax.jit(jax.hessian(plain))(1.1), rtol=1e-4)
    else:
        with pytest.raises(TypeError, match="forward-mode"):
            jax.jvp(ours, (1.1,), (1.0,))
    assert_close(jax.jit(jax.grad(jax.grad(ours)))(1.1), jax.jit(jax.grad(jax.grad(plain)))(1.1), rtol=1e-4)


@pytest.mark.slow
def test_a_gradient_under_vmap():
    weights, x = arguments()
    batches = jnp.stack([x, -x])
    gradients = [jax.vmap(jax.grad(stack(wrap(block))), in_axes=(None, 0)) for wrap in (recompute, lambda f: f)]

    assert_close(jax.jit(gradients[0])(weights, batches), jax.jit(gradients[1])(weights, batches))
    ours, plain = (temp_bytes(jax.jit(gradient), weights, batches) for gradient in gradients)
    assert ours < 0.5 * plain


@pytest.mark.xfail(
    jax.__version_info__ < (0, 10, 2),
    reason="jax.vjp takes no symbolic zeros before JAX 0.10.2: what only unread results need is computed, with zeros",
    strict=True,
)
def test_arguments_that_no_gradient_is_asked_of_cost_nothing():
    """Only the first argument is differentiated; an output that nobody reads brings no gradient in."""

    def both(x, w):
        return block(x, w), jnp.sort(jnp.sin(x @ w["up"]), axis=0)

    weights, x = arguments()
    ours, plain = (
        lambda x, wrap=wrap: stack(lambda x, w: wrap(both)(x, w)[0])(weights, x) for wrap in (recompute, id_)
    )
    lowered = jax.jit(jax.grad(ours)).lower(x)

    assert "sort" not in lowered.compile().as_text()
    assert_close(jax.jit(jax.grad(ours))(x), jax.jit(jax.grad(plain))(x))


def id_(f):
    return f


def test_what_must_run_once_does():
    runs = []

    @jax.custom_vjp
    def host_sine(x):
        return jax.pure_callback(lambda v: runs.append(1) or np.sin(v), jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    host_sine.defvjp(lambda x: (host_sine(x), x), lambda x, g: (g * jnp.cos(x),))
    ours, plain = (jax.jit(jax.grad(stack(wrap(lambda x, w: host_sine(block(x, w)))))) for wrap in (recompute, id_))
    args = arguments()
    assert_close(ours(*args), plain(*args))
    runs.clear()
    jax.block_until_ready(ours(*args))

    assert len(runs) == LAYERS


@pytest.mark.slow
def test_collectives_run_once():
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
    spec = jax.sharding.PartitionSpec

    def each(x, w):
        return lax.psum(jnp.sin(x @ w["up"]) @ w["down"], "data") * jnp.tanh(x)

    def gradient(wrap):
        def loss(weights, x):
            return lax.psum(stack(wrap(each))(weights, x), "data")

        in_specs = (spec(), spec("data"))
        return jax.jit(jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=in_specs, out_specs=spec()))

    args = arguments()
    assert_close(gradient(recompute)(*args), gradient(id_)(*args))
    sent = [gradient(wrap).lower(*args).as_text().count("all_reduce") for wrap in (id_, recompute, jax.checkpoint)]
    assert sent[0] == sent[1] < sent[2]


def test_under_a_plan_the_regions_dissolve():
    args = arguments()
    plain, ours = (remat.jax.trace(jax.value_and_grad(stack(wrap(block))), *args) for wrap in (id_, recompute))
    assert ours.fingerprint == plain.fingerprint


def test_switched_off(monkeypatch):
    args = arguments()
    whole = temp_bytes(jax.jit(jax.grad(stack(block))), *args)
    for off in (recompute(block, enabled=False), recompute(enabled=lambda: False)(block)):
        assert temp_bytes(jax.jit(jax.grad(stack(off))), *args) == whole
    monkeypatch.setenv("REMAT_RECOMPUTE", "0")
    assert temp_bytes(jax.jit(jax.grad(stack(recompute(block)))), *args) == whole


def test_static_arguments():
    def each(x, w, table):
        assert isinstance(table, jax.Array)
        return block(x, w) * float(np.asarray(table)[0])  # Needs its value.

    weights, x = arguments()
    table = jnp.array([2.0, 3.0])
    for ours in (recompute(each, static_argnums=2), recompute(each, static_argnums=(-1,))):
        assert_close(ours(x, weights[0], table), 2 * block(x, weights[0]))
    assert_close(recompute(each, static_argnames="table")(x, weights[0], table=table), 2 * block(x, weights[0]))
    with pytest.raises(ValueError, match="static_argnums names argument 5, but 3 positional arguments were given"):
        recompute(each, static_argnums=5)(x, weights[0], table)


def test_what_is_refused():
    from jax.experimental import io_callback

    def each(x, w):
        io_callback(lambda v: None, None, x[0, 0])
        return block(x, w)

    with pytest.raises(remat.UnsupportedStep, match=r"'each' has effects that must happen once \(IOEffect\)"):
        jax.grad(stack(recompute(each)))(*arguments())
    with pytest.raises(TypeError, match="recompute takes a function, not float"):
        recompute(3.0)
