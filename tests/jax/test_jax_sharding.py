"""Steps over several devices: bytes are those of one device, numbers are exact, collectives are never repeated."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax_models import GREEDY, OF_XLA_0_10, assert_close, mlp, normal

import remat
import remat.jax
from remat.jax.peak import Lowered, peak_of
from remat.jax.sharding import arrays_sent
from remat.jax.trace import op_facts

DEVICES = 4
COLLECTIVE = re.compile(
    r" (?:all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(([^)]*)\)"
)


@pytest.fixture
def mesh():
    assert len(jax.devices()) >= DEVICES, "tests/jax/conftest.py asks for several host devices before JAX starts"
    return Mesh(jax.devices()[:DEVICES], ("data",))


def step_of(loss):
    def step(params, x):
        value, gradients = jax.value_and_grad(loss)(params, x)
        return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    return step


def sharded(case, mesh):
    params, x = case.args
    replicated = NamedSharding(mesh, PartitionSpec())
    return jax.device_put(params, replicated), jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))


def collectives(jitted, *args):
    """Arrays that are sent; the compiler combines some into one collective."""
    text = jitted.lower(*args).compile().as_text()
    return sum(len(operands.split(",")) for operands in COLLECTIVE.findall(text))


def test_data_parallel_step(mesh):
    case = mlp(batch=2048)
    step, args = step_of(case.loss), sharded(mlp(batch=2048), mesh)
    plain = jax.jit(step)
    ours = remat.jax.jit(step, budget="75%", **GREEDY)

    assert_close(ours(*args), plain(*args))
    assert ours.plan.recomputed > 0
    # Bytes of one device: a quarter of the activations.
    whole = remat.jax.measure(plain, *case.args, repeats=1).peak_bytes
    assert ours.plan.baseline_peak_bytes < 0.6 * whole
    assert remat.jax.measure(ours, *args, repeats=1).peak_bytes == ours.plan.peak_bytes <= ours.plan.budget_bytes
    assert 0 < collectives(ours, *args) == collectives(plain, *args)


@pytest.mark.slow
def test_tensor_parallel_layers_repeat_no_collective(mesh):
    """Every second product sums over the devices: to make its result again would send everything again."""
    case = mlp(layers=12, batch=1024)
    params, x = case.args
    columns, rows = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((None, "data"), ("data", None)))
    placed = [
        {
            "w": jax.device_put(layer["w"], rows if number % 2 else columns),
            "b": jax.device_put(layer["b"], NamedSharding(mesh, PartitionSpec())),
        }
        for number, layer in enumerate(params)
    ]
    args = placed, jax.device_put(x, NamedSharding(mesh, PartitionSpec()))
    step = step_of(case.loss)
    plain = jax.jit(step)
    ours = remat.jax.jit(step, budget="93%", **GREEDY)

    assert_close(ours(*args), plain(*args))
    assert ours.plan.recomputed > 0
    assert 0 < collectives(ours, *args) == collectives(plain, *args)


def blocks_in_parts(mesh):
    """Residual blocks as large models have them: batches over one axis of the mesh, hidden units over the other."""
    width, batch = 32, 2048
    params = [
        {"up": normal(n, width, 4 * width, scale=0.2), "down": normal(50 + n, 4 * width, width, scale=0.1)}
        for n in range(6)
    ]

    def loss(params, x):
        for p in params:
            x = x + jax.nn.gelu(jnp.tanh(x) @ p["up"]) @ p["down"]
        return jnp.mean(jnp.square(x))

    def place(array, *axes):
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*axes)))

    placed = [{"up": place(p["up"], None, "model"), "down": place(p["down"], "model", None)} for p in params]
    return loss, (placed, place(normal(99, batch, width), "data"))


@pytest.mark.parametrize(
    "budget",
    [pytest.param("70%", marks=pytest.mark.slow), "50%", pytest.param("minimum", marks=pytest.mark.slow)],
)
def test_units_over_a_model_axis(budget):
    """Every device keeps the budget, with as many collectives as the plain step."""
    mesh = Mesh(np.array(jax.devices()[:DEVICES]).reshape(2, 2), ("data", "model"))
    loss, args = blocks_in_parts(mesh)
    step = step_of(loss)
    plain = jax.jit(step)
    if budget == "minimum":
        with pytest.raises(remat.InfeasibleBudget) as caught:
            remat.jax.jit(step, budget=1000, **GREEDY).lower(*args)
        budget = caught.value.minimum_bytes
    ours = remat.jax.jit(step, budget=budget, **GREEDY)

    assert_close(ours(*args), plain(*args))
    assert ours.plan.recomputed > 0
    assert remat.jax.measure(ours, *args, repeats=1).peak_bytes == ours.plan.peak_bytes <= ours.plan.budget_bytes
    assert ours.plan.baseline_peak_bytes == pytest.approx(
        remat.jax.measure(plain, *args, repeats=1).peak_bytes, rel=0.02
    )
    assert 0 < collectives(ours, *args) == collectives(plain, *args)
    # What the planner counts for a device: half of the batch, half of the units.
    made = [ours.graph.tensors[value] for op in ours.graph.ops for value in op.outputs]
    assert {t.size_bytes for t in made if t.shape == (2048, 128)} - {0} == {2048 * 128 * 4 // DEVICES}


def scanned_case(mesh, *, split_layers):
    """Wide products inside a scan over the layers: of each pair the second one sums over the devices, if split."""
    layers, width = 8, 32
    up = jnp.stack([normal(n, width, 4 * width, scale=0.2) for n in range(layers)])
    down = jnp.stack([normal(n + 50, 4 * width, width, scale=0.1) for n in range(layers)])

    def loss(params, x):
        def each(x, layer):
            return x + jnp.tanh(jnp.tanh(jnp.sin(x @ layer[0])) @ layer[1]), None

        return jnp.mean(jnp.square(jax.lax.scan(each, x, params)[0]))

    def place(array, *axes):
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*axes)))

    x = normal(99, 1024, width)
    if split_layers:
        return loss, ((place(up, None, None, "data"), place(down, None, "data", None)), place(x))
    return loss, ((place(up), place(down)), place(x, "data"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("split_layers", "budget"),
    [(False, "60%"), (True, "80%")],
    ids=["data parallel", "tensor parallel"],
)
def test_loops_are_planned_inside(mesh, split_layers, budget):
    """What the loop of the backward part makes again comes from no other device."""
    loss, args = scanned_case(mesh, split_layers=split_layers)
    step = step_of(loss)
    plain = jax.jit(step)
    ours = remat.jax.jit(step, budget=budget, **GREEDY)

    assert_close(ours(*args), plain(*args))
    assert ours.plan.peak_bytes <= ours.plan.budget_bytes < ours.plan.baseline_peak_bytes
    assert remat.jax.measure(ours, *args, repeats=1).peak_bytes == ours.plan.peak_bytes
    assert 0 < collectives(ours, *args) <= collectives(plain, *args)


@pytest.mark.slow
def test_inside_shard_map(mesh):
    """Collectives that the function names itself run once; the budget is one of the trace there."""
    case = mlp(batch=1024)
    params, x = sharded(case, mesh)

    def loss(params, x):
        return jax.lax.pmean(case.loss(params, x), "data")

    def mapped(gradient):
        in_specs, out_specs = (PartitionSpec(), PartitionSpec("data")), PartitionSpec()
        return jax.jit(jax.shard_map(gradient, mesh=mesh, in_specs=in_specs, out_specs=out_specs))

    ours = remat.jax.value_and_grad(loss, budget="75%", **GREEDY)
    assert_close(mapped(ours)(params, x), mapped(jax.value_and_grad(loss))(params, x))
    assert ours.plan.recomputed > 0


def mapped_step(mesh, loss, *, check_vma=True):
    """A step of data parallelism that names its own collectives, as a user of ``shard_map`` writes it."""

    def step(params, x):
        value, gradients = jax.value_and_grad(loss)(params, x)
        gradients = jax.tree.map(lambda g: jax.lax.pmean(g, "data"), gradients)
        return jax.lax.pmean(value, "data"), jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    specs = PartitionSpec(), PartitionSpec("data")
    return jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=check_vma)


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_step_under_shard_map_is_planned_inside(mesh, check_vma):
    case = mlp(batch=2048)
    step, args = mapped_step(mesh, case.loss, check_vma=check_vma), sharded(case, mesh)
    plain = remat.jax.jit(step)
    ours = remat.jax.jit(step, budget="70%", **GREEDY)

    wanted = plain(*args)
    for found, expected in zip(jax.tree.leaves(ours(*args)), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(found, expected)
    assert ours.plan.recomputed > 0
    # Bytes of one device, as the compiler says them.
    baseline, held = (peak_of(one.lower(*args).compile().memory_analysis()) for one in (plain, ours))
    assert ours.plan.baseline_peak_bytes == baseline
    assert held == ours.plan.peak_bytes <= ours.plan.budget_bytes == int(0.7 * baseline)
    assert collectives(ours, *args) == collectives(plain, *args) > 0


def scanned_tensor_parallel_step(mesh, *, check_vma):
    """A step of a stack of layers under ``lax.scan``, the units of each over the devices, all inside of one map."""
    width, hidden, layers, rows = 32, 128, 8, 256
    params = {"in": normal(0, layers, width, hidden) / 8, "out": normal(1, layers, hidden, width) / 8}

    def layer(h, params):
        return h + jax.lax.psum(jnp.tanh(jnp.sin(h @ params["in"])) @ params["out"], "data"), None

    def step(params, x):
        def loss(params):
            return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    own = {"in": PartitionSpec(None, None, "data"), "out": PartitionSpec(None, "data", None)}
    specs, out_specs = (own, PartitionSpec()), (PartitionSpec(), own)
    mapped = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=check_vma)
    return mapped, (params, normal(2, rows, width))


@pytest.mark.parametrize("check_vma", [True, False])
def test_loops_under_shard_map_are_planned_inside(mesh, check_vma):
    """What is stacked for the backward loop is chosen, and each collective runs as often as in the plain step."""
    step, args = scanned_tensor_parallel_step(mesh, check_vma=check_vma)
    plain = remat.jax.jit(step)
    ours = remat.jax.jit(step, budget="60%")

    assert_close(ours(*args), plain(*args))
    baseline, held = (peak_of(one.lower(*args).compile().memory_analysis()) for one in (plain, ours))
    assert ours.plan.baseline_peak_bytes == baseline
    assert held == ours.plan.peak_bytes <= ours.plan.budget_bytes == int(0.6 * baseline)
    assert collectives(ours, *args) == collectives(plain, *args) > 0


def test_a_peak_over_devices_is_read_before_machine_code_is_made(mesh, monkeypatch, capfd):
    """To the byte, and XLA says nothing of it."""
    case = mlp(batch=256)
    of_map = mapped_step(mesh, case.loss), sharded(case, mesh), True
    of_numbers = (lambda params, x: case.loss(params, x)), sharded(case, mesh), False
    for step, args, is_mapped in (of_map, of_numbers):
        exact_bytes = peak_of(jax.jit(step).lower(*args).compile().memory_analysis())
        flat, structure = jax.tree.flatten(args)
        with monkeypatch.context() as patched:
            patched.setattr(Lowered, "compiled", lambda self: pytest.fail("it was compiled to the end"))
            lowered = Lowered(
                lambda *own, step=step, structure=structure: jax.tree.leaves(step(*jax.tree.unflatten(structure, own))),
                flat,
                "data",
                over_devices=True,
            )
            assert lowered.peak().expected_bytes == exact_bytes
            memory, text = lowered.memory_and_text()
        assert memory.peak_bytes == exact_bytes
        assert arrays_sent(text) > 0, is_mapped
    assert "RET_CHECK" not in capfd.readouterr().err


def test_gradients_of_a_planned_shard_map(mesh):
    """What varies over the devices, and what does not, is the same to JAX with a plan as without."""
    case = mlp(batch=1024)
    step, args = mapped_step(mesh, case.loss), sharded(case, mesh)
    ours = remat.jax.jit(step, budget="75%", **GREEDY)

    gradients = [jax.jit(jax.grad(lambda params, x, one=one: one(params, x)[0]))(*args) for one in (ours, step)]
    assert_close(*gradients)


@pytest.mark.parametrize("name", ["psum", "all_gather", "ppermute"])
def test_named_collectives_are_not_repeatable(mesh, name):
    run = {
        "psum": lambda x: jax.lax.psum(x, "data"),
        "all_gather": lambda x: jax.lax.all_gather(x, "data"),
        "ppermute": lambda x: jax.lax.ppermute(x, "data", [(0, 1)]),
    }[name]
    spec = PartitionSpec("data")
    closed = jax.make_jaxpr(jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))(jnp.ones(4))
    assert [op_facts.may_repeat(eqn) for eqn in closed.jaxpr.eqns] == [False]


@pytest.mark.parametrize("jit", [lambda function: function, remat.jax.jit], ids=["on arrays", "in remat.jax.jit"])
def test_gradients_over_explicit_axes(jit, capfd):
    """As ``jax.make_mesh`` makes them: how a value lies is a part of its type, and known while it is traced."""
    case = mlp(batch=2048)
    args = sharded(case, jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Explicit,)))
    ours = remat.jax.value_and_grad(case.loss, budget="75%", **GREEDY)
    plain = jax.jit(jax.value_and_grad(case.loss))

    assert_close(jit(ours)(*args), plain(*args))
    assert ours.plan.recomputed > 0
    assert ours.plan.peak_bytes <= ours.plan.budget_bytes
    assert ours.plan.baseline_peak_bytes == peak_of(plain.lower(*args).compile().memory_analysis())
    assert "INTERNAL" not in capfd.readouterr().err


@OF_XLA_0_10
def test_a_plain_jit_over_explicit_axes_on_a_cpu():
    """A tie by data begins with a slice of one element, which JAX does not take of what lies over explicit axes."""
    case = mlp(batch=2048)
    args = sharded(case, jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Explicit,)))
    with pytest.raises(remat.InfeasibleBudget, match=r"remat\.jax\.jit"):
        jax.jit(remat.jax.value_and_grad(case.loss, budget="60%", **GREEDY))(*args)
