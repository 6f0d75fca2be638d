"""Micro-batches give the gradient of the whole batch: denominators, ragged parts, half precision, budgets."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_models import GREEDY, assert_close, convnet, normal

import remat
import remat.jax

WIDTH, LAYERS = 32, 12


def weights(dtype=jnp.float32):
    return [normal(n, WIDTH, WIDTH, scale=WIDTH**-0.5, dtype=dtype) for n in range(LAYERS)]


def hidden(params, x):
    for w in params:
        x = jnp.tanh(x @ w)
    return x


def mean_loss(params, x, y):
    return jnp.mean((hidden(params, x) - y) ** 2)


def sum_loss(params, x, y):
    return jnp.sum((hidden(params, x) - y) ** 2)


def masked_ratio(params, x, y, mask):
    """A sum over the valid tokens and their number."""
    error = jnp.mean((hidden(params, x) - y) ** 2, -1)
    return jnp.sum(error * mask), jnp.sum(mask)


def masked_mean(params, x, y, mask):
    total, count = masked_ratio(params, x, y, mask)
    return total / count


def batch(samples=96):
    return normal(50, samples, WIDTH), normal(51, samples, WIDTH)


def mask_of(samples, empty_until=0):
    valid = np.random.default_rng(9).random(samples) < 0.6
    valid[:empty_until] = False
    return jnp.asarray(valid, jnp.float32)


@pytest.mark.parametrize("samples", [96, 97, 3, 1], ids=lambda n: f"{n}samples")
@pytest.mark.parametrize("loss", [mean_loss, sum_loss])
def test_value_and_gradients_are_those_of_the_batch(loss, samples):
    args = (weights(), *batch(samples))
    reduction = "sum" if loss is sum_loss else "mean"
    ours = remat.jax.value_and_grad(loss, micro_batches=4, reduction=reduction)

    assert_close(jax.jit(ours)(*args), jax.jit(jax.value_and_grad(loss))(*args))


@pytest.mark.parametrize("empty_until", [0, 30], ids=["some masked", "a part without tokens"])
def test_tokens_count_by_their_true_number(empty_until):
    args = (weights(), *batch(97), mask_of(97, empty_until))
    ours = remat.jax.value_and_grad(masked_ratio, micro_batches=4, reduction="ratio")
    expected = jax.jit(jax.value_and_grad(masked_mean))(*args)

    assert_close(jax.jit(ours)(*args), expected)
    whole = remat.jax.value_and_grad(masked_ratio, reduction="ratio")
    assert_close(jax.jit(whole)(*args), expected)
    # What averaging the parts' own means would give is something else.
    means = remat.jax.value_and_grad(masked_mean, micro_batches=4)(*args)
    assert empty_until or abs(float(means[0]) - float(expected[0])) > 1e-4


def test_half_precision_accumulates_in_single():
    params = weights(jnp.bfloat16)
    x, y = (part.astype(jnp.bfloat16) for part in batch(512))

    def scaled(params, x, y):
        return jnp.mean(jnp.square(hidden(params, x) - y).astype(jnp.float32))

    found = jax.jit(remat.jax.value_and_grad(scaled, micro_batches=256))(params, x, y)
    expected = jax.jit(jax.value_and_grad(scaled))(*jax.tree.map(lambda a: a.astype(jnp.float32), (params, x, y)))
    assert {leaf.dtype for leaf in jax.tree.leaves(found[1])} == {jnp.dtype(jnp.bfloat16)}
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        scale = float(jnp.abs(other).max())
        assert float(jnp.abs(one.astype(jnp.float32) - other).max()) < 0.03 * scale


@pytest.mark.thorough
@pytest.mark.parametrize("samples", [1024, 1000], ids=["even", "ragged"])
def test_a_budget_below_what_parts_alone_need(samples):
    args = (weights(), *batch(samples))
    plain = jax.jit(jax.value_and_grad(mean_loss))
    parts = jax.jit(remat.jax.value_and_grad(mean_loss, micro_batches=3))
    alone = remat.jax.measure(parts, *args, repeats=1).peak_bytes
    assert alone < 0.7 * remat.jax.measure(plain, *args, repeats=1).peak_bytes
    ours = remat.jax.value_and_grad(mean_loss, micro_batches=3, budget=int(0.85 * alone), **GREEDY)
    jitted = jax.jit(ours)

    assert_close(jitted(*args), plain(*args))
    assert ours.plan.recomputed > 0
    assert remat.jax.measure(jitted, *args, repeats=1).peak_bytes == ours.plan.peak_bytes <= ours.plan.budget_bytes


def test_auxiliary_results_come_as_those_of_the_batch():
    def loss(params, x, y):
        last = hidden(params, x)
        return jnp.mean((last - y) ** 2), {"scores": last[:, 0], "size": jnp.mean(jnp.abs(last))}

    args = (weights(), *batch(97))
    ours = remat.jax.value_and_grad(loss, has_aux=True, micro_batches=4)

    assert_close(jax.jit(ours)(*args), jax.jit(jax.value_and_grad(loss, has_aux=True))(*args))


def test_several_argnums_pytrees_and_named_batches():
    def loss(a, data, b, scale):
        return jnp.mean((hidden(a, data["x"]) * b - data["y"]) ** 2) * scale

    x, y = batch(33)
    args = (weights(), {"x": x, "y": y}, jnp.ones(WIDTH), 0.5)
    ours = remat.jax.value_and_grad(loss, (0, 2), micro_batches=2, batch_argnums=1)

    assert_close(ours(*args), jax.value_and_grad(loss, (0, 2))(*args))


def test_grad_with_micro_batches():
    args = (weights(), *batch(50))
    assert_close(remat.jax.grad(mean_loss, micro_batches=3)(*args), jax.grad(mean_loss)(*args))


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"micro_batches": 0}, ValueError, "micro_batches must be a whole number of at least 1, not 0"),
        ({"micro_batches": True}, ValueError, "not True"),
        (
            {"micro_batches": 2, "reduction": "max"},
            ValueError,
            "reduction must be one of 'mean', 'sum', 'ratio', not 'max'",
        ),
        ({"micro_batches": 2, "batch_argnums": (0, 1)}, ValueError, "argument 0 is in argnums and in batch_argnums"),
        ({"micro_batches": 2, "batch_argnums": 7}, ValueError, "names argument 7, and the function got 3 positional"),
        ({"micro_batches": 2, "batch_argnums": ()}, ValueError, "there is no tensor to split"),
    ],
)
def test_bad_options(options, kind, message):
    with pytest.raises(kind, match=message):
        remat.jax.value_and_grad(mean_loss, **options)(weights(), *batch(8))


def test_batches_that_do_not_agree():
    with pytest.raises(remat.UnsupportedStep, match=r"argument 1 has 8 samples and argument 2 has 9"):
        remat.jax.value_and_grad(mean_loss, micro_batches=2)(weights(), batch(8)[0], batch(9)[1])
    scaled = functools.partial(lambda params, x, scale: jnp.mean(hidden(params, x)) * scale)
    with pytest.raises(remat.UnsupportedStep, match=r"argument 2 has the shape \(\), so it cannot be split"):
        remat.jax.value_and_grad(scaled, micro_batches=2)(weights(), batch(8)[0], 2.0)


def test_running_statistics_are_refused():
    case = convnet()
    ours = remat.jax.value_and_grad(case.loss, has_aux=True, micro_batches=2, batch_argnums=(2, 3))
    with pytest.raises(remat.UnsupportedStep, match="running statistics of a normalisation are such a result"):
        ours(*case.args)


def test_a_denominator_that_is_trained_is_refused():
    def loss(params, x):
        last = hidden(params, x)
        return jnp.sum(last), jnp.sum(last**2)

    with pytest.raises(remat.UnsupportedStep, match="the denominator depends on argument 0, which is differentiated"):
        remat.jax.value_and_grad(loss, micro_batches=2, reduction="ratio")(weights(), batch(8)[0])
