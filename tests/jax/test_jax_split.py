"""The lever "split" in JAX: the head in slices, equal to the plain step to rounding, memory as the compiler says."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import jaxpr_as_fun

import remat
import remat.jax
from remat.core.plan import load_plan_and_graph
from remat.jax.peak import compiler_options, peak_of
from remat.jax.split.products import of_matrices
from remat.jax.split.split_jaxpr import SCOPE, Splitter
from remat.jax.trace.program import trace_jaxpr

LEVERS = ("recompute", "split")
WORDS, WIDTH = 4000, 16


def parameters(dtype=jnp.float32):
    random = np.random.default_rng(0)

    def matrix(*shape):
        return jnp.asarray(random.normal(size=shape) * 0.2, dtype)

    return {"embedding": matrix(WORDS, WIDTH), "inner": matrix(WIDTH, WIDTH), "head": matrix(WIDTH, WORDS)}


def data(samples=4, length=64):
    random = np.random.default_rng(1)
    tokens, labels = (jnp.asarray(random.integers(0, WORDS, (samples, length)), jnp.int32) for _ in range(2))
    return tokens, labels.at[0, :5].set(-100)


def logits_of(params, tokens):
    x = jnp.tanh(params["embedding"][tokens] @ params["inner"])
    return x @ params["head"]


def mean_loss(params, tokens, labels):
    """As optax writes it."""
    logits = logits_of(params, tokens)
    return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(labels, 0)).mean()


def masked_loss(params, tokens, labels):
    """A mask and a mean of one's own."""
    logarithms = jax.nn.log_softmax(logits_of(params, tokens).astype(jnp.float32))
    each = -jnp.take_along_axis(logarithms, jnp.maximum(labels, 0)[..., None], -1)[..., 0]
    return (each * (labels >= 0)).sum() / (labels >= 0).sum()


def tied_loss(params, tokens, labels):
    """One-hot labels, and one matrix for both ends."""
    logits = jnp.tanh(params["embedding"][tokens] @ params["inner"]) @ params["embedding"].T
    return -(jax.nn.one_hot(labels, WORDS) * jax.nn.log_softmax(logits)).sum(-1).mean()


def penalised_loss(params, tokens, labels):
    """With a second loss on the logits' normaliser, an accuracy beside it, and logits in one axis of tokens."""
    logits = logits_of(params, tokens).reshape(-1, WORDS)
    flat = jnp.maximum(labels.reshape(-1), 0)
    normaliser = jax.nn.logsumexp(logits, -1)
    each = normaliser - jnp.take_along_axis(logits, flat[:, None], -1)[:, 0]
    return each.mean() + 1e-3 * jnp.square(normaliser).mean(), (jnp.argmax(logits, -1) == flat).mean()


def dropped_loss(params, tokens, labels):
    """A mask drawn at random over what the head reads, and over the logits."""
    keep = jax.random.bernoulli(jax.random.key(3), 0.9, (*tokens.shape, WORDS))
    logits = jnp.where(keep, logits_of(params, tokens), 0.0)
    return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(labels, 0)).mean()


def assert_near(found, expected, rtol=2e-5, atol=1e-7):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(np.asarray(one, np.float32), np.asarray(other, np.float32), rtol=rtol, atol=atol)


def planned(function, budget="55%", levers=LEVERS, **options):
    return remat.jax.jit(function, budget=budget, levers=levers, planner="peak_greedy", **options)


def compiled_peak(function, *args):
    return peak_of(jax.jit(function).lower(*args).compile().memory_analysis())


@pytest.mark.parametrize(
    "loss",
    [mean_loss, masked_loss, tied_loss, penalised_loss],
)
@pytest.mark.thorough
def test_losses_are_equal_to_rounding(loss):
    args = (parameters(), *data())
    function = jax.value_and_grad(loss, has_aux=loss is penalised_loss)
    step = planned(function, "50%")
    found = step(*args)
    assert step.plan.split is not None
    assert step.plan.measured_peak_bytes <= 0.5 * compiled_peak(function, *args)
    assert_near(found, jax.jit(function)(*args))


@pytest.mark.thorough
def test_random_numbers_are_drawn_once_and_whole():
    args = (parameters(), *data())
    function = jax.value_and_grad(dropped_loss)
    closed, _ = trace_jaxpr(function, args)
    splitter = Splitter(closed, 1)
    made = splitter.split(4)
    assert_near(jax.jit(jax.extend.core.jaxpr_as_fun(made))(*jax.tree.leaves(args)), jax.tree.leaves(function(*args)))
    loops = [eqn for eqn in made.jaxpr.eqns if eqn.primitive.name == "scan"]
    assert loops
    assert not any("random" in str(loop.params["jaxpr"]) for loop in loops)


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["fill", "clip"])
def test_labels_out_of_range_count_as_in_the_plain_step(mode):
    def loss(params, tokens, labels):
        logarithms = jax.nn.log_softmax(logits_of(params, tokens))
        return jnp.nansum(jnp.take_along_axis(logarithms, labels[..., None], -1, mode=mode))

    tokens, labels = data()
    args = (parameters(), tokens, labels.at[1, :7].set(WORDS + 5))
    function = jax.value_and_grad(loss)
    closed, _ = trace_jaxpr(function, args)
    made = Splitter(closed, 1).split(4)
    assert_near(
        jax.jit(jax.extend.core.jaxpr_as_fun(made))(*jax.tree.leaves(args)), jax.tree.leaves(function(*args)), atol=1e-5
    )


@pytest.mark.thorough
@pytest.mark.parametrize("slices", [2, 3, 5, 64])
def test_slices_that_do_not_divide_the_axis(slices):
    args = (parameters(), *data(length=63))
    function = jax.value_and_grad(mean_loss)
    closed, _ = trace_jaxpr(function, args)
    splitter = Splitter(closed, 1)
    made = splitter.split(slices)
    if slices == 64:
        assert made is None
        return
    assert_near(jax.jit(jax.extend.core.jaxpr_as_fun(made))(*jax.tree.leaves(args)), jax.tree.leaves(function(*args)))


def test_the_gradient_of_the_head_is_summed_up_as_it_is_wanted():
    """A product and its transposition are one in XLA, but not with a sum over slices between the two."""
    params, batch = parameters(), data()
    gradient = jax.value_and_grad(mean_loss)
    closed, _ = trace_jaxpr(gradient, (params, *batch))
    assert transposed_to(closed.jaxpr, (WIDTH, WORDS)) == 1
    split = Splitter(closed, 0).split(4)
    assert transposed_to(split.jaxpr, (WIDTH, WORDS)) == 0
    found = jaxpr_as_fun(split)(*jax.tree.leaves((params, *batch)))
    for one, other in zip(found, jax.tree.leaves(gradient(params, *batch)), strict=True):
        assert_near(one, other)


def transposed_to(jaxpr, shape):
    """How many transpositions stand in a program, loops left out, that make something of a shape."""
    made = [one.outvars[0].aval.shape for one in jaxpr.eqns if one.primitive.name == "transpose"]
    return made.count(shape)


@pytest.mark.thorough
def test_five_steps_of_an_optimizer_in_one_function():
    optimizer = optax.adamw(1e-3)

    def update(params, state, tokens, labels):
        loss, gradients = jax.value_and_grad(mean_loss)(params, tokens, labels)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    outcomes = []
    levers = (*LEVERS, "update")
    for step in (jax.jit(update), planned(update, "60%", levers, donate_argnums=(0, 1))):
        params = parameters()
        state = optimizer.init(params)
        for _ in range(5):
            params, state, loss = step(params, state, *data())
        outcomes.append((params, loss))
    assert step.plan.split is not None
    assert step.plan.update is not None
    assert_near(outcomes[1], outcomes[0], rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
def test_the_smallest_peak_is_far_below_that_of_recomputation():
    args = (parameters(), *data())
    function = jax.value_and_grad(mean_loss)
    smallest = {}
    for levers in (("recompute",), LEVERS):
        with pytest.raises(remat.InfeasibleBudget) as caught:
            planned(function, 1000, levers)(*args)
        smallest[levers] = caught.value.minimum_bytes
    assert smallest[LEVERS] < 0.65 * smallest["recompute",]
    step = planned(function, smallest[LEVERS])
    step(*args)
    assert step.plan.measured_peak_bytes <= smallest[LEVERS]


@pytest.mark.thorough
def test_sums_over_slices_of_bfloat16_are_made_in_float32():
    args = (parameters(jnp.bfloat16), *data())
    function = jax.value_and_grad(masked_loss)
    exact = function(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), args[0]), *args[1:])
    step = planned(function, "70%")
    found, plain = step(*args), jax.jit(function)(*args)
    assert step.plan.split is not None
    for one, usual, true in zip(*map(jax.tree.leaves, (found, plain, exact)), strict=True):
        assert one.dtype == usual.dtype
        error, usual_error = (float(jnp.linalg.norm(each.astype(jnp.float32) - true)) for each in (one, usual))
        assert error <= 1.1 * usual_error + 1e-6


@pytest.mark.parametrize("entry", ["value_and_grad", pytest.param("grad", marks=pytest.mark.thorough)])
def test_the_plan_says_what_was_split_and_is_replayed_without_jax(entry, tmp_path):
    args = (parameters(), *data())
    make = getattr(remat.jax, entry)
    gradient = make(mean_loss, budget="55%", levers=("split",))
    found = gradient(*args)
    plan = gradient.plan
    assert_near(found, getattr(jax, entry)(mean_loss)(*args))
    assert plan.recomputed == 0
    assert plan.measured_peak_bytes <= 0.55 * compiled_peak(getattr(jax, entry)(mean_loss), *args)
    assert f"in {plan.split.slices} slices" in str(plan)
    plan.save(tmp_path / "plan.json", gradient.graph)
    loaded, graph = load_plan_and_graph(tmp_path / "plan.json")
    assert loaded.split == plan.split
    assert remat.simulate(graph, loaded.schedule).peak_bytes == plan.traced_peak_bytes
    assert {graph.ops[op].kind for op, _ in plan.split.stands_for} == {"scan"}
    assert all(SCOPE in graph.ops[op].name for op, _ in plan.split.stands_for)

    followed = make(mean_loss, plan=loaded)
    assert_near(followed(*args), found, rtol=0, atol=0)
    assert followed.plan.split == plan.split


@pytest.mark.thorough
def test_recomputation_alone_is_the_default():
    args = (parameters(), *data())
    with pytest.raises(remat.InfeasibleBudget):
        planned(jax.value_and_grad(mean_loss), "45%", ("recompute",))(*args)
    step = remat.jax.jit(jax.value_and_grad(mean_loss), budget="100%")
    step(*args)
    assert step.plan.split is None


@pytest.mark.thorough
def test_inside_of_another_trace_whose_values_it_captures():
    params, tokens, labels = parameters(), *data()

    @jax.jit
    def outer(params, tokens, scale):
        gradient = remat.jax.grad(
            lambda params, tokens: mean_loss(params, tokens, labels) * scale,
            budget="60%",
            levers=LEVERS,
            planner="peak_greedy",
        )
        found = gradient(params, tokens)
        assert gradient.plan.split is not None
        return found

    expected = jax.grad(lambda params: mean_loss(params, tokens, labels) * 3.0)(params)
    assert_near(outer(params, tokens, 3.0), expected, atol=1e-6)


@pytest.mark.thorough
def test_a_plan_of_another_function_is_refused():
    args = (parameters(), *data())
    step = planned(jax.value_and_grad(mean_loss))
    step(*args)
    with pytest.raises(remat.PlanMismatch):
        remat.jax.jit(jax.value_and_grad(tied_loss), plan=step.plan)(*args)


def test_the_gradient_of_the_logits_is_made_once_for_both_of_its_products():
    args = (parameters(), *data())
    function = jax.value_and_grad(masked_loss)
    flat, structure = jax.tree.flatten(args)
    closed, _ = trace_jaxpr(lambda *leaves: jax.tree.leaves(function(*jax.tree.unflatten(structure, leaves))), flat)
    compiled = jax.jit(jaxpr_as_fun(Splitter(closed, 1).split(2))).lower(*flat).compile(compiler_options("barrier"))
    # Three values of half the logits' size; with one for each product and each reshaped there were five.
    assert peak_of(compiled.memory_analysis()) <= 0.45 * compiled_peak(function, *args)


@pytest.mark.parametrize(
    ("left", "right", "summed"),
    [
        ((2, 3, 5), (5, 7), ((2,), (0,))),
        ((2, 3, 5), (2, 3, 7), ((0, 1), (0, 1))),
        ((5, 2, 3), (7, 2, 3), ((1, 2), (1, 2))),
        ((4, 5), (2, 3, 5), ((1,), (2,))),
    ],
)
def test_products_over_several_axes_are_products_of_matrices(left, right, summed):
    random = np.random.default_rng(0)
    operands = [jnp.asarray(random.normal(size=shape), jnp.float32) for shape in (left, right)]

    def product(*both):
        return jax.lax.dot_general(*both, (summed, ((), ())))

    (eqn,) = jax.make_jaxpr(product)(*operands).eqns
    (found,) = of_matrices(eqn, operands)
    np.testing.assert_allclose(found, product(*operands), rtol=1e-6, atol=1e-6)
    written = jax.make_jaxpr(lambda *both: of_matrices(eqn, both))(*operands)
    (one,) = [each for each in written.eqns if each.primitive.name == "dot_general"]
    assert [len(var.aval.shape) for var in one.invars] == [2, 2]


@pytest.mark.parametrize(
    ("left", "right", "summed", "batches"),
    [
        ((2, 3, 5), (3, 2, 7), ((0, 1), (1, 0)), ((), ())),  # Not in the same order.
        ((2, 5, 3), (5, 7), ((1,), (0,)), ((), ())),  # The free axes are apart.
        ((2, 3, 5), (2, 5, 7), ((2,), (1,)), ((0,), (0,))),
        ((3, 5), (5, 7), ((1,), (0,)), ((), ())),
    ],
)
def test_other_products_stay_as_they_are(left, right, summed, batches):
    operands = [jnp.ones(shape) for shape in (left, right)]
    (eqn,) = jax.make_jaxpr(lambda *both: jax.lax.dot_general(*both, (summed, batches)))(*operands).eqns
    assert of_matrices(eqn, operands) is None


def deep_loss(params, x, y):
    """Three blocks whose inner layer is four times as wide as what they read."""
    for up, bias, down in params:
        centred = x - x.mean(-1, keepdims=True)
        normalised = centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-6)
        x = x + jax.nn.gelu(normalised @ up + bias) @ down
    return jnp.square(x - y).mean()


def deep_arguments(width=32, tokens=4096):
    random = np.random.default_rng(0)

    def matrix(*shape):
        return jnp.asarray(random.normal(size=shape) * shape[0] ** -0.5, jnp.float32)

    params = [(matrix(width, 4 * width), jnp.zeros(4 * width), matrix(4 * width, width)) for _ in range(3)]
    return params, matrix(tokens, width), matrix(tokens, width)


@pytest.mark.parametrize("slices", [2, pytest.param(7, marks=pytest.mark.thorough)])
def test_inner_layers_are_equal_to_rounding_in_slices(slices):
    arguments = deep_arguments(tokens=64)
    function = jax.value_and_grad(deep_loss)
    flat, structure = jax.tree.flatten(arguments)
    closed, _ = trace_jaxpr(lambda *leaves: function(*jax.tree.unflatten(structure, leaves)), flat)
    splitter = Splitter(closed, 1, inner=True)
    assert len(splitter.regions) == 6, "a forward and a backward part of each layer"
    found = jax.jit(jaxpr_as_fun(splitter.split(slices)))(*flat)
    assert_near(found, jax.tree.leaves(function(*arguments)), atol=1e-6)


@pytest.mark.thorough
def test_inner_layers_keep_a_budget_that_recomputation_does_not(tmp_path):
    arguments = deep_arguments()
    function = jax.value_and_grad(deep_loss)
    with pytest.raises(remat.InfeasibleBudget):
        planned(function, "35%", ("recompute",)).plan_for(*arguments)
    step = planned(function, "35%")
    assert_near(step(*arguments), function(*arguments), atol=1e-6)
    plan = step.plan
    assert plan.split.inner
    assert "inner layers" in str(plan)
    assert peak_of(step.lower(*arguments).compile().memory_analysis()) <= plan.budget_bytes
    plan.save(tmp_path / "plan.json")
    again = remat.jax.jit(function, plan=load_plan_and_graph(tmp_path / "plan.json")[0])
    assert_near(again(*arguments), function(*arguments), atol=1e-6)
    assert again.plan.split.inner


@pytest.mark.parametrize("levers", ["split", (), ("micro_batches",)])
def test_unknown_levers_are_refused(levers):
    with pytest.raises(ValueError, match="levers="):
        remat.jax.jit(mean_loss, budget="50%", levers=levers)


@pytest.mark.thorough
@pytest.mark.parametrize("samples", [4, 5])
def test_micro_batches_run_in_slices(samples):
    arguments = (parameters(), *data(samples))
    expected = jax.value_and_grad(mean_loss)(*arguments)
    planned_in_pieces = remat.jax.value_and_grad(mean_loss, micro_batches=2, budget="45%", levers=LEVERS)
    assert_near(planned_in_pieces(*arguments), expected)
    plan = planned_in_pieces.plan
    assert plan.split is not None
    assert plan.split.slices > 1
    program = planned_in_pieces.lower(*arguments).compile(compiler_options=compiler_options("barrier"))
    assert peak_of(program.memory_analysis()) <= plan.peak_bytes <= plan.budget_bytes


def test_what_does_not_go_together_with_slices_is_refused():
    with pytest.raises(ValueError, match="checkpoints="):
        remat.jax.jit(mean_loss, budget="50%", levers=LEVERS, checkpoints=["x"])
    devices = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("d",))
    over_devices = jax.sharding.NamedSharding(devices, jax.sharding.PartitionSpec("d"))
    tokens, labels = (jax.device_put(one, over_devices) for one in data())
    with pytest.raises(remat.UnsupportedStep, match="several devices"):
        planned(jax.value_and_grad(mean_loss))(parameters(), tokens, labels)
