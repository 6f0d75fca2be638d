"""What JAX programs are made of: every transformation around a plan and inside one stays exact."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax_models import AUTO, GREEDY, OF_XLA_0_10, assert_close, convnet, following, mlp, normal, temp_bytes, transformer

import remat
import remat.jax

WIDTH, BATCH, LAYERS = 32, 256, 12


def stack(each):
    """A loss that applies ``each(x, w)`` layer by layer."""

    def loss(weights, x):
        for w in weights:
            x = each(x, w)
        return jnp.mean(jnp.square(x))

    return loss


def arguments():
    return [normal(n, WIDTH, WIDTH, scale=WIDTH**-0.5) for n in range(LAYERS)], normal(50, BATCH, WIDTH)


def planned(loss, budget="70%", **options):
    return remat.jax.value_and_grad(loss, budget=budget, **GREEDY, **options)


@jax.custom_vjp
def scaled_tanh(x):
    return jnp.tanh(x)


scaled_tanh.defvjp(lambda x: (jnp.tanh(x), jnp.tanh(x)), lambda y, g: (3.0 * g * (1 - y * y),))


@jax.custom_jvp
def smooth(x):
    return jnp.tanh(x)


smooth.defjvp(lambda primals, tangents: (smooth(primals[0]), 2.0 * tangents[0] * (1 - smooth(primals[0]) ** 2)))

INSIDE = {
    "custom_vjp": lambda x, w: scaled_tanh(x @ w),
    "custom_jvp": lambda x, w: smooth(x @ w),
    "nested_jit": jax.jit(lambda x, w: jax.jit(jnp.tanh)(x @ w)),
    "checkpoint": jax.checkpoint(lambda x, w: jnp.tanh(x @ w)),
    "cond": lambda x, w: lax.cond(x[0, 0] > 0, lambda v: jnp.tanh(v), lambda v: jnp.sin(v), x @ w),
    "while": lambda x, w: jnp.tanh(x @ w) * lax.while_loop(lambda n: n < 3, lambda n: n + 1, 0).astype(jnp.float32),
    "integers": lambda x, w: jnp.tanh(x @ w) * (jnp.argsort(x, axis=-1) % 2 == 0),
    "random": lambda x, w: jnp.where(jax.random.bernoulli(jax.random.key(7), 0.9, x.shape), jnp.tanh(x @ w), 0),
}


@pytest.mark.parametrize("name", INSIDE)
def test_inside(name):
    loss, args = stack(INSIDE[name]), arguments()
    assert_close(jax.jit(following(loss, *args))(*args), jax.jit(jax.value_and_grad(loss))(*args))


def test_checkpointed_regions_are_planned_as_a_whole():
    plain = planned(stack(lambda x, w: jnp.tanh(x @ w)))
    marked = planned(stack(INSIDE["checkpoint"]))
    jax.jit(plain).lower(*arguments())
    jax.jit(marked).lower(*arguments())

    assert len(marked.graph.ops) == len(plain.graph.ops)


def test_a_callback_runs_once_for_each_step():
    seen = []

    def each(x, w):
        x = jnp.tanh(x @ w)
        jax.debug.callback(lambda v: seen.append(float(v)), x[0, 0], ordered=True)
        return x

    ours = jax.jit(following(stack(each), *arguments()))
    expected, _ = jax.jit(jax.value_and_grad(stack(each)))(*arguments())
    jax.effects_barrier()
    plain, seen[:] = list(seen), []
    found, _ = ours(*arguments())
    jax.effects_barrier()

    assert float(found) == pytest.approx(float(expected), rel=1e-6)
    assert len(seen) == LAYERS
    assert seen == pytest.approx(plain, rel=1e-6)


def test_calls_into_python_are_never_repeated():
    runs = []

    @jax.custom_vjp
    def host_sine(x):
        return jax.pure_callback(lambda v: runs.append(1) or np.sin(v), jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    host_sine.defvjp(lambda x: (host_sine(x), x), lambda x, g: (g * jnp.cos(x),))
    jitted = jax.jit(following(stack(lambda x, w: host_sine(jnp.tanh(x @ w))), *arguments(), share="80%"))
    jax.block_until_ready(jitted(*arguments()))
    runs.clear()
    jax.block_until_ready(jitted(*arguments()))

    assert len(runs) == LAYERS


def test_argnums_aux_and_keywords():
    def loss(a, b, x, *, scale, name="x"):
        hidden = [x]
        for w in (*a, *b["w"]):
            hidden.append(jnp.tanh(hidden[-1] @ w))
        assert name == "named"
        return scale * jnp.mean(hidden[-1] ** 2), {"last": hidden[-1][0], "count": jnp.int32(len(hidden))}

    weights, x = arguments()
    args, kwargs = (weights[:6], {"w": weights[6:]}, x), {"scale": 2.0, "name": "named"}
    ours = planned(loss, argnums=(0, 1), has_aux=True)
    found = ours(*args, **kwargs)

    assert_close(found, jax.value_and_grad(loss, (0, 1), has_aux=True)(*args, **kwargs))
    assert ours.plan.recomputed > 0


def test_under_vmap():
    weights, x = arguments()
    loss = stack(lambda x, w: jnp.tanh(x @ w))
    batches = jnp.stack([x, 2 * x, -x])
    ours = following(loss, weights, x)

    found = jax.jit(jax.vmap(ours, in_axes=(None, 0)))(weights, batches)
    assert_close(found, jax.jit(jax.vmap(jax.value_and_grad(loss), in_axes=(None, 0)))(weights, batches))


def test_a_jitted_step_under_vmap():
    """The budget is one of the whole batch: called at once, and inside of another function."""
    weights, x = arguments()
    step = jax.value_and_grad(stack(lambda x, w: jnp.tanh(x @ w)))
    batches = jnp.stack([x, 2 * x, -x])
    ours = remat.jax.jit(step, budget="70%", planner="peak_greedy")
    plain = remat.jax.jit(jax.vmap(step, in_axes=(None, 0)))
    wanted = plain(weights, batches)

    assert_close(jax.vmap(ours, in_axes=(None, 0))(weights, batches), wanted)
    assert ours.plan.budget_bytes == pytest.approx(0.7 * peak_of(plain, weights, batches), rel=1e-3)
    jitted = remat.jax.jit(jax.vmap(ours, in_axes=(None, 0)))
    assert_close(jitted(weights, batches), wanted)
    assert peak_of(jitted, weights, batches) <= ours.plan.budget_bytes


def peak_of(jitted, *args):
    return remat.jax.peak.peak_of(jitted.lower(*args).compile().memory_analysis())


def test_in_a_loop_over_steps():
    loss = stack(lambda x, w: jnp.tanh(x @ w))
    weights, x = arguments()

    def train(gradient):
        def step(weights, _):
            value, gradients = gradient(weights, x)
            return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

        return jax.jit(lambda w: lax.scan(step, w, None, length=3))(weights)

    assert_close(train(following(loss, weights, x)), train(jax.value_and_grad(loss)))


def test_differentiated_again():
    """A plan is made of JAX operations and ties that have derivatives of their own."""
    loss = stack(lambda x, w: smooth(x @ w))
    weights, x = arguments()

    def penalty(gradient):
        return jax.jit(jax.grad(lambda w: sum(jnp.vdot(g, g) for g in gradient(w, x)[1])))

    ours = following(loss, weights, x, share="85%")
    assert_close(penalty(ours)(weights), penalty(jax.value_and_grad(loss))(weights), rtol=1e-4)


@pytest.mark.thorough
def test_hessian_vector_products():
    """Forward mode over a planned gradient, and a whole product within a budget."""
    loss = stack(lambda x, w: jnp.tanh(x @ w))
    weights, x = arguments()
    along = [normal(80 + n, WIDTH, WIDTH) for n in range(LAYERS)]

    def product(gradient, weights, x, along):
        return jax.jvp(lambda w: gradient(w, x), (weights,), (along,))[1]

    whole = functools.partial(product, jax.grad(loss))
    expected = jax.jit(whole)(weights, x, along)
    ours = remat.jax.grad(loss, budget="70%", **GREEDY)
    assert_close(jax.jit(functools.partial(product, ours))(weights, x, along), expected, rtol=1e-4)
    assert ours.plan.recomputed > 0
    planned_whole = remat.jax.jit(whole, budget="75%", **GREEDY)
    assert_close(planned_whole(weights, x, along), expected, rtol=1e-4)
    assert planned_whole.plan.recomputed > 0
    assert planned_whole.plan.measured_peak_bytes <= planned_whole.plan.budget_bytes


def test_closed_over_tracers():
    loss = stack(lambda x, w: jnp.tanh(x @ w))
    weights, x = arguments()

    @functools.partial(jax.jit, static_argnums=0)
    def step(gradient, weights, x, scale):
        return gradient(lambda w: loss(w, x * scale))(weights)

    assert_close(step(planned, weights, x, 2.0), step(jax.value_and_grad, weights, x, 2.0))
    assert_close(step(planned, weights, x, 3.0), step(jax.value_and_grad, weights, x, 3.0))


def test_new_shapes_are_planned_again():
    weights, x = arguments()
    ours = planned(stack(lambda x, w: jnp.tanh(x @ w)))
    jitted = jax.jit(ours)
    jitted.lower(weights, x)
    first = ours.plan
    jitted.lower(weights, jnp.concatenate([x, x]))

    assert ours.plan.baseline_peak_bytes > 1.5 * first.baseline_peak_bytes


def test_a_plan_made_from_a_trace_is_followed():
    loss = stack(lambda x, w: jnp.tanh(x @ w))
    graph = remat.jax.trace(jax.value_and_grad(loss), *arguments())
    plan = remat.plan(graph, "70%", **GREEDY)
    ours = remat.jax.value_and_grad(loss, plan=plan)

    assert_close(jax.jit(ours)(*arguments()), jax.jit(jax.value_and_grad(loss))(*arguments()))
    assert ours.plan is plan
    with pytest.raises(remat.PlanMismatch, match="plan again for this graph"):
        remat.jax.value_and_grad(stack(lambda x, w: jnp.sin(x @ w + 1.0)), plan=plan)(*arguments())


@pytest.mark.parametrize(
    "case",
    [
        functools.partial(mlp, layers=16),
        pytest.param(functools.partial(convnet, layers=16), marks=pytest.mark.slow),
        pytest.param(functools.partial(transformer, layers=6), marks=pytest.mark.slow),
        pytest.param(functools.partial(transformer, layers=16, scanned=True), marks=pytest.mark.slow),
    ],
    ids=["mlp", "convnet", "transformer", "scanned transformer"],
)
def test_plain_jit_saves_what_ours_saves(case):
    """Ties by data hold under a plain ``jax.jit`` on a CPU, where ``jax.checkpoint`` saves nothing."""
    case = case()
    plain = temp_bytes(jax.jit(jax.value_and_grad(case.loss, has_aux=case.has_aux)), *case.args)
    saved = {}
    for jit in (jax.jit, remat.jax.jit):
        ours = remat.jax.value_and_grad(case.loss, has_aux=case.has_aux, budget="60%", **AUTO)
        saved[jit] = plain - temp_bytes(jit(ours), *case.args)

    assert saved[jax.jit] > 0.3 * plain
    assert saved[jax.jit] > 0.85 * saved[remat.jax.jit]


@OF_XLA_0_10
def test_our_jit_makes_checkpoints_save_on_a_cpu():
    weights, x = arguments()
    # Wide inside, narrow at the edges: what a checkpoint is for.
    up, down = jnp.ones((WIDTH, 8 * WIDTH)) / WIDTH, jnp.ones((8 * WIDTH, WIDTH)) / WIDTH
    loss = stack(jax.checkpoint(lambda x, w: jnp.tanh(jnp.tanh(x @ w @ up) @ down)))
    plain, ours = (temp_bytes(jit(jax.value_and_grad(loss)), weights, x) for jit in (jax.jit, remat.jax.jit))

    assert ours < 0.6 * plain
    assert_close(remat.jax.jit(jax.value_and_grad(loss))(weights, x), jax.jit(jax.value_and_grad(loss))(weights, x))
