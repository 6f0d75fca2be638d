"""Steps of several calls of ``shard_map``, as where each layer is one: taken apart and planned, with equal numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax_models import GREEDY, assert_close, mlp, normal
from test_jax_sharding import collectives, sharded

import remat.jax
from remat.jax.peak import peak_of, shape_of
from remat.jax.sharding import Layouts
from remat.jax.trace.program import program_of, trace_jaxpr
from remat.jax.variants import variants_of_jaxpr

WIDTH, LAYERS = 32, 3


@pytest.fixture
def devices():
    assert len(jax.devices()) >= 4, "tests/jax/conftest.py asks for several host devices before JAX starts"
    return np.array(jax.devices()[:4]).reshape(2, 2)


def layered(mesh, *, check_vma=True, is_scaled=True):
    """A step of tensor parallelism, each layer a ``shard_map``.

    Where it is scaled, a number that differs over the data crosses the calls.
    """

    def layer(x, up, down):
        scale = 1 + 1e-3 * jnp.mean(x) if is_scaled else 1
        return x + scale * jax.lax.psum(jax.nn.silu(jnp.tanh(x) @ up) @ down, "model")

    specs = PartitionSpec("data"), PartitionSpec(None, "model"), PartitionSpec("model")
    mapped = jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=check_vma)

    def loss(params, x):
        for up, down in params:
            x = mapped(x, up, down)
        return jnp.mean(x**2)

    def step(params, x):
        value, gradients = jax.value_and_grad(loss)(params, x)
        return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    def place(array, *axes):
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*axes)))

    params = [
        (
            place(0.1 * normal(2 * n, WIDTH, 4 * WIDTH), None, "model"),
            place(0.1 * normal(2 * n + 1, 4 * WIDTH, WIDTH), "model", None),
        )
        for n in range(LAYERS)
    ]
    return step, (params, place(normal(99, 1024, WIDTH), "data", None))


def planned_and_plain(step, args, budget):
    """The step under a budget, checked against the plain one: numbers, bytes, and what is sent."""
    plain = remat.jax.jit(step)
    ours = remat.jax.jit(step, budget=budget, **GREEDY)
    wanted = plain(*args)
    if jax.__version_info__ < (0, 11):
        for found, expected in zip(jax.tree.leaves(ours(*args)), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_array_equal(found, expected)
    assert_close(ours(*args), wanted)  # XLA of JAX 0.11 fuses other kernels, which rounds once more or less.
    baseline, held = (peak_of(one.lower(*args).compile().memory_analysis()) for one in (plain, ours))
    assert ours.plan.baseline_peak_bytes == baseline
    assert held == ours.plan.peak_bytes <= ours.plan.budget_bytes < baseline
    assert collectives(ours, *args) == collectives(plain, *args) > 0
    return ours


@pytest.mark.parametrize("check_vma", [True, False])
def test_layers_under_shard_map_are_planned(devices, check_vma):
    step, args = layered(Mesh(devices, ("data", "model")), check_vma=check_vma)
    ours = planned_and_plain(step, args, "65%")

    again = [op.kind for number, op in enumerate(ours.graph.ops) if ours.plan.schedule.count(number) > 1]
    assert len(again) == ours.plan.recomputed > 0
    assert not any("psum" in kind for kind in again)


def test_layers_over_explicit_axes_are_planned(devices):
    """Here the types of values say how they lie on the devices, so that nothing is to ask for it."""
    mesh = Mesh(devices, ("data", "model"), axis_types=(AxisType.Explicit, AxisType.Explicit))
    step, args = layered(mesh, is_scaled=False)
    assert planned_and_plain(step, args, "70%").plan.recomputed > 0


def test_the_gradient_of_what_shard_map_returns_is_planned(devices):
    mesh = Mesh(devices.reshape(4), ("data",))
    case = mlp(batch=2048)
    specs = PartitionSpec(), PartitionSpec("data")
    loss = jax.shard_map(
        lambda params, x: jax.lax.pmean(case.loss(params, x), "data"),
        mesh=mesh,
        in_specs=specs,
        out_specs=PartitionSpec(),
    )
    assert planned_and_plain(jax.value_and_grad(loss), sharded(case, mesh), "75%").plan.recomputed > 0


@pytest.mark.slow
def test_a_pipeline_is_planned(devices):
    """Four stages that hand micro-batches on; what they send goes once, and a plan makes the rest again."""
    mesh, stages, pieces = Mesh(devices.reshape(4), ("stage",)), 4, 4
    ring = [(n, (n + 1) % stages) for n in range(stages)]

    def run(weights, xs):
        number = jax.lax.axis_index("stage")
        state, made = jnp.zeros_like(xs[0] * weights[0, 0, 0, 0]), []
        for tick in range(pieces + stages - 1):
            x = jnp.where(number == 0, xs[min(tick, pieces - 1)], state)
            for weight in weights[0]:
                x = x + jnp.tanh(x @ weight)
            made.append(x)
            state = jax.lax.ppermute(x, "stage", ring)
        last = jnp.stack(made[stages - 1 :])
        return jax.lax.psum(jnp.where(number == stages - 1, last, 0.0), "stage")

    specs = PartitionSpec("stage"), PartitionSpec()
    mapped = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())
    step = jax.value_and_grad(lambda weights, xs: jnp.mean(mapped(weights, xs) ** 2))
    weights = jax.device_put(0.1 * normal(1, stages, 3, WIDTH, WIDTH), NamedSharding(mesh, specs[0]))
    xs = jax.device_put(normal(2, pieces, 256, WIDTH), NamedSharding(mesh, specs[1]))
    assert planned_and_plain(step, (weights, xs), "65%").plan.recomputed > 0


def test_values_may_lie_otherwise_from_call_to_call(devices):
    """The devices send one another what the second call reads in another layout, no more than in the plain step."""
    mesh = Mesh(devices, ("data", "model"))
    one, other = PartitionSpec("data", "model"), PartitionSpec("model", "data")
    first = jax.shard_map(lambda x: (jax.nn.silu(x), jnp.cos(x)), mesh=mesh, in_specs=one, out_specs=one)
    second = jax.shard_map(lambda y, z: jnp.tanh(y) * z, mesh=mesh, in_specs=other, out_specs=other)

    def step(x):
        values, pull = jax.vjp(lambda x: (second(*first(x)), first(x)), x)
        return pull(values)

    x = jax.device_put(normal(1, 256, 256), NamedSharding(mesh, one))
    plain, ours = remat.jax.jit(step), remat.jax.jit(step, budget="100%", **GREEDY)
    np.testing.assert_array_equal(ours(x)[0], plain(x)[0])
    assert collectives(ours, x) == collectives(plain, x) > 0


def test_a_map_inside_of_a_map_stays_whole(devices):
    mesh = Mesh(devices, ("data", "model"))
    spec = PartitionSpec("model")

    def outer(x):
        return jax.shard_map(jnp.tanh, in_specs=spec, out_specs=spec, axis_names={"model"})(jnp.sin(x))

    own = PartitionSpec("data")
    mapped = jax.shard_map(outer, mesh=mesh, in_specs=own, out_specs=own, axis_names={"data"})
    closed = jax.make_jaxpr(jax.jit(lambda x: mapped(mapped(x))))(jnp.ones((8, 8)))

    kinds = [one.root.primitive.name for one in program_of(closed, takes_maps_apart=True).instructions]
    assert kinds == ["shard_map", "shard_map"]


def looped(mesh, *, check_vma=True, is_remade=True):
    """A step of tensor parallelism, each block a ``shard_map`` with a loop over its layers.

    Where it is remade, each layer sums over the devices; else all devices do the same.
    """

    def block(x, up, down):
        def layer(x, weights):
            added = jax.nn.silu(jnp.tanh(x) @ weights[0]) @ weights[1]
            return x + (jax.lax.psum(added, "model") if is_remade else added), None

        return jax.lax.scan(layer, x, (up, down))[0]

    own = PartitionSpec("data")
    split = (PartitionSpec(None, None, "model"), PartitionSpec(None, "model")) if is_remade else (PartitionSpec(),) * 2
    mapped = jax.shard_map(block, mesh=mesh, in_specs=(own, *split), out_specs=own, check_vma=check_vma)

    def loss(params, x):
        for up, down in params:
            x = mapped(x, up, down)
        return jnp.mean(x**2)

    def place(array, spec):
        return jax.device_put(array, NamedSharding(mesh, spec))

    params = [
        (
            place(0.1 * normal(2 * n, 4, WIDTH, 4 * WIDTH), split[0]),
            place(0.1 * normal(2 * n + 1, 4, 4 * WIDTH, WIDTH), split[1]),
        )
        for n in range(LAYERS)
    ]
    return jax.value_and_grad(loss), (params, place(normal(99, 1024, WIDTH), own))


@pytest.mark.parametrize(("check_vma", "is_remade"), [(True, True), (False, True), (True, False)])
def test_loops_inside_of_several_calls_are_planned(devices, check_vma, is_remade):
    """The forward loop in one call leaves less to its backward loop in another, and each sum is sent once."""
    step, args = looped(Mesh(devices, ("data", "model")), check_vma=check_vma, is_remade=is_remade)
    roomy, tight = (planned_and_plain(step, args, budget) for budget in ("60%", "40%"))

    baseline = roomy.plan.baseline_peak_bytes
    assert 0.4 * baseline < roomy.plan.peak_bytes  # Some blocks leave more than others.
    assert tight.plan.peak_bytes < roomy.plan.peak_bytes


@pytest.mark.parametrize("check_vma", [True, False])
def test_what_lies_outside_of_rewritten_loops_lies_as_before(devices, check_vma, monkeypatch):
    """The plain program is compiled to see how it lies; the others, which differ inside of maps alone, are not."""
    step, args = looped(Mesh(devices, ("data", "model")), check_vma=check_vma)
    flat, tree = jax.tree.flatten(args)
    shapes = [shape_of(leaf) for leaf in flat]
    closed, _ = trace_jaxpr(lambda *leaves: step(*jax.tree.unflatten(tree, leaves)), flat)
    variants = variants_of_jaxpr(
        closed, lambda run: pytest.fail("nothing is asked of the compiler"), tie="barrier", maps=True
    )
    assert len(variants) > 2
    layouts = Layouts(shapes, "barrier")
    layouts.of(variants[0].program)

    program = variants[len(variants) - 1].program
    compiled = layouts._compiled(program)
    monkeypatch.setattr(Layouts, "_compiled", lambda *_: pytest.fail("it is compiled once more"))
    found = layouts.of(program)

    outside = {n for n, instruction in enumerate(program.instructions) if not instruction.is_mapped}
    assert found.collectives == compiled.collectives & outside
    assert found.shardings.keys() == compiled.shardings.keys()
    for value, sharding in found.shardings.items():
        shape = program.avals[value].shape
        assert sharding.shard_shape(shape) == compiled.shardings[value].shard_shape(shape)


def test_a_refusal_says_that_maps_inside_of_maps_are_not_planned(devices):
    mesh = Mesh(devices, ("data", "model"))

    def over(axis, function, **options):
        own = PartitionSpec(axis)
        # With check_vma JAX 0.10 cannot compile the gradient of a map inside of another one.
        return jax.shard_map(function, in_specs=own, out_specs=own, axis_names={axis}, check_vma=False, **options)

    inner = over("model", lambda x: jnp.sin(x) * jnp.cos(x))
    mapped = over("data", lambda x: inner(x), mesh=mesh)
    step = remat.jax.jit(jax.grad(lambda x: jnp.sum(mapped(mapped(x)))), budget=1, **GREEDY)

    with pytest.raises(remat.InfeasibleBudget, match="A shard_map inside of another one is not planned") as refused:
        step.plan_for(jax.device_put(jnp.ones((64, 64)), NamedSharding(mesh, PartitionSpec("data"))))
    assert f"{refused.value.minimum_bytes} bytes" in str(refused.value)
