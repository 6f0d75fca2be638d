"""What ``jax.jit`` can do beside being called, on ``remat.jax.jit`` and ``remat.jax.value_and_grad``."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax_models import GREEDY, OF_XLA_0_10, assert_close, normal

import remat
import remat.jax

WIDTH, BATCH, LAYERS = 32, 512, 12


def loss(weights, x, *, depth=LAYERS, scale=1.0):
    for w in weights[:depth]:
        x = jnp.tanh(x @ w)
    return jnp.mean(jnp.square(x)) * scale


def arguments():
    return [normal(n, WIDTH, WIDTH, scale=WIDTH**-0.5) for n in range(LAYERS)], normal(50, BATCH, WIDTH)


def shapes_of(tree):
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), tree)


def step(weights, x, *, depth=LAYERS, scale=1.0):
    value, gradients = jax.value_and_grad(functools.partial(loss, depth=depth))(weights, x, scale=scale)
    return value, jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)


PLAIN = {"jit": step, "value_and_grad": jax.value_and_grad(loss)}
OURS = {
    "jit": lambda **options: remat.jax.jit(step, **options),
    "value_and_grad": lambda **options: remat.jax.value_and_grad(loss, **options),
}
LIMITED = {"jit": {"budget": "70%", **GREEDY}, "value_and_grad": {"budget": "70%", **GREEDY}}


@pytest.mark.parametrize("name", OURS)
def test_everything_works_on_shapes(name):
    ours, args = OURS[name](**LIMITED[name]), arguments()
    shapes = ours.eval_shape(*shapes_of(args))
    assert ours.plan is None, "only shapes were asked for"
    plan = ours.plan_for(*shapes_of(args))
    assert plan.recomputed > 0
    compiled = ours.lower(*shapes_of(args)).compile()

    found, expected = compiled(*args), jax.jit(PLAIN[name])(*args)
    assert_close(found, expected)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), shapes) == jax.tree.map(lambda a: (a.shape, a.dtype), expected)
    assert ours.trace(*shapes_of(args)).jaxpr.eqns
    memory = compiled.memory_analysis()
    used = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    assert used == plan.peak_bytes <= plan.budget_bytes
    with pytest.raises(TypeError, match=r"was called with jax.ShapeDtypeStruct.*plan_for, lower"):
        ours(*shapes_of(args))


@pytest.mark.parametrize("name", ["value_and_grad", pytest.param("jit", marks=pytest.mark.slow)])
def test_a_plan_for_known_shapes_is_not_the_newest_one(name):
    ours, (weights, x) = OURS[name](**LIMITED[name]), arguments()
    first = ours.plan_for(weights, x)
    other = ours.plan_for(weights, jnp.concatenate([x, x]))

    assert other.baseline_peak_bytes > first.baseline_peak_bytes
    assert ours.plan_for(weights, x) == first


@pytest.mark.parametrize("name", ["value_and_grad", pytest.param("jit", marks=pytest.mark.slow)])
def test_static_arguments_and_keywords(name):
    ours, args = OURS[name](static_argnames="depth", **LIMITED[name]), arguments()
    plan = ours.plan_for(*args, depth=11, scale=2.0)
    found = ours(*args, depth=11, scale=2.0)

    assert_close(found, PLAIN[name](*args, depth=11, scale=2.0))
    assert ours.plan == plan
    assert_close(
        ours.lower(*args, depth=10, scale=1.0).compile()(*args, scale=3.0), PLAIN[name](*args, depth=10, scale=3.0)
    )


def test_static_arguments_by_name_or_position():
    def function(x, power, sign):
        assert isinstance(power, int)
        return jnp.sum(jnp.tanh(x) ** power) * sign

    for options in ({"static_argnames": "power"}, {"static_argnums": 1}, {"static_argnums": -2}):
        ours = remat.jax.jit(function, budget="100%", **options)
        assert float(ours(jnp.ones(3), 2, 2.0)) == pytest.approx(float(function(jnp.ones(3), 2, 2.0)))
        assert float(ours(jnp.ones(3), sign=2.0, power=3)) == pytest.approx(float(function(jnp.ones(3), 3, 2.0)))


@OF_XLA_0_10
def test_donated_by_name():
    weights, x = arguments()
    ours = remat.jax.jit(step, budget="90%", donate_argnames="weights", **GREEDY)
    by_number = remat.jax.jit(step, budget="90%", donate_argnums=0, **GREEDY)
    assert ours.plan_for(weights, x).schedule == by_number.plan_for(weights, x).schedule
    assert (
        ours.plan.peak_bytes
        == by_number.plan.peak_bytes
        < remat.jax.jit(step, budget="90%", **GREEDY).plan_for(weights, x).peak_bytes
    )
    expected = jax.jit(step)(weights, x)
    found = ours(jax.tree.map(jnp.copy, weights), x)

    assert_close(found, expected)


def test_decorators_with_arguments():
    @remat.jax.jit(budget="70%", static_argnames="depth", **GREEDY)
    def own_step(weights, x, depth=LAYERS):
        return step(weights, x, depth=depth)

    @remat.jax.value_and_grad(budget="70%", **GREEDY)
    def own_loss(weights, x):
        return loss(weights, x)

    @remat.jax.grad(budget="70%", **GREEDY)
    def own_gradient(weights, x):
        return loss(weights, x)

    args = arguments()
    value, gradients = jax.value_and_grad(loss)(*args)
    assert_close(own_step(*args), step(*args))
    assert_close(own_loss(*args), (value, gradients))
    assert_close(own_gradient.lower(*shapes_of(args)).compile()(*args), gradients)
    assert own_gradient.plan_for(*args).recomputed > 0
    assert own_step.__name__ == "own_step"


@pytest.mark.parametrize("name", OURS)
def test_a_cleared_cache_traces_again(name):
    calls = []

    def noted(weights, x):
        calls.append(1)
        return loss(weights, x)

    make = {"jit": lambda f: remat.jax.jit(jax.value_and_grad(f)), "value_and_grad": remat.jax.value_and_grad}[name]
    ours = make(noted)
    ours(*arguments())
    ours(*arguments())
    once = len(calls)
    ours.clear_cache()
    ours(*arguments())

    assert once > 0
    assert len(calls) == 2 * once


@pytest.mark.parametrize("name", OURS)
def test_nothing_to_plan(name):
    with pytest.raises(ValueError, match=r"plan_for has nothing to plan: give remat.jax.* a budget="):
        OURS[name]().plan_for(*arguments())


def test_under_vmap_the_whole_batch_is_planned():
    weights, x = arguments()
    batches = jnp.stack([x, 2 * x, -x, x / 2])
    mapped = jax.vmap(jax.value_and_grad(loss), in_axes=(None, 0))
    ours = remat.jax.value_and_grad(loss, budget="60%", **GREEDY)
    over_batches = remat.jax.jit(jax.vmap(ours, in_axes=(None, 0)))
    whole = remat.jax.measure(remat.jax.jit(mapped), weights, batches, repeats=1).peak_bytes

    assert_close(over_batches(weights, batches), jax.jit(mapped)(weights, batches))
    assert ours.plan.baseline_peak_bytes == whole
    assert remat.jax.measure(over_batches, weights, batches, repeats=1).peak_bytes <= 0.6 * whole


def named(weights, x):
    for number, w in enumerate(weights):
        x = checkpoint_name(jnp.tanh(x @ w), f"layer_{number}") * 1.5
    return jnp.mean(jnp.square(x))


def test_names_are_hints_beside_a_budget(caplog):
    """What is named is kept where the budget allows it, and computed again where it does not."""
    args = arguments()
    few, all_layers = ("layer_1", "layer_2"), tuple(f"layer_{number}" for number in range(LAYERS))
    again = {}
    for share, names in (("75%", few), ("45%", all_layers)):
        ours = remat.jax.value_and_grad(named, budget=share, checkpoints=names, **GREEDY)
        assert_close(ours(*args), jax.value_and_grad(named)(*args))
        assert ours.plan.recomputed > 0
        assert ours.plan.peak_bytes <= ours.plan.budget_bytes
        kinds = [op.kind for op in ours.graph.ops]
        assert kinds.count("name") == len(names)
        runs = [kinds[number] for number in ours.plan.schedule]
        again[share] = runs.count("name") - len(names)
        assert ("cannot be kept together with the checkpoints" in caplog.text) == (share == "45%")
    assert again["75%"] == 0
    assert again["45%"] > 0


def test_offloading_is_refused_by_name():
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["hidden"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    @functools.partial(jax.checkpoint, policy=policy)
    def block(x, w):
        return jnp.sin(checkpoint_name(jnp.tanh(x @ w), "hidden"))

    def offloading(weights, x):
        for w in weights:
            x = block(x, w)
        return jnp.mean(x)

    for make in (remat.jax.value_and_grad(offloading, budget="70%"), remat.jax.jit(jax.grad(offloading), budget="70%")):
        with pytest.raises(remat.UnsupportedStep, match="offloads 'hidden' to the host"):
            make.lower(*arguments())


def test_a_refusal_under_a_plain_jit_names_ours():
    """On a CPU only ``remat.jax.jit`` keeps all recomputations apart, so its smallest peak is smaller."""
    weights, x = arguments()
    weights = weights[:4]
    ours = remat.jax.value_and_grad(loss, budget=1000, **GREEDY)
    with pytest.raises(remat.InfeasibleBudget, match=r"compile with remat.jax.jit in place of jax.jit"):
        jax.jit(ours).lower(weights, x)
    with pytest.raises(remat.InfeasibleBudget) as caught:
        remat.jax.jit(ours).lower(weights, x)
    assert "in place of jax.jit" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("jit", [jax.jit, remat.jax.jit], ids=["jax.jit", "remat.jax.jit"])
def test_the_example_of_the_readme_keeps_its_budget(jit):
    """Sixteen layers within 70 %, whichever ``jit`` compiles them."""
    weights = [jax.random.normal(key, (64, 64)) / 8 for key in jax.random.split(jax.random.key(0), 16)]
    x = jnp.ones((1024, 64))

    def plain_loss(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    gradients = remat.jax.value_and_grad(plain_loss, budget="70%")
    plain = remat.jax.measure(jit(jax.value_and_grad(plain_loss)), weights, x, repeats=1).peak_bytes
    ours = remat.jax.measure(jit(gradients), weights, x, repeats=1).peak_bytes

    assert ours == gradients.plan.peak_bytes <= 0.7 * plain


def test_methods():
    """What stands in a class is bound to its objects, as a function is."""

    class Model:
        scale = 2.0

        @functools.partial(remat.jax.jit, static_argnums=0, budget="70%", **GREEDY)
        def step(self, weights, x):
            return jax.value_and_grad(lambda own: self.scale * chain(own, x))(weights)

    weights, x = [normal(n, 16, 16, scale=0.2) for n in range(6)], normal(9, 256, 16)

    def chain(own, x):
        for w in own:
            x = jnp.tanh(jnp.sin(x @ w) + x)
        return jnp.mean(x**2)

    assert_close(Model().step(weights, x), jax.value_and_grad(lambda own: 2.0 * chain(own, x))(weights))
    assert Model.step.plan.recomputed > 0
