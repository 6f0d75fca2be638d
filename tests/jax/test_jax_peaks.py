"""How peaks are read before machine code is made, and which plans are looked at."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax_models import GREEDY, OF_XLA_0_10, assert_close, mlp, transformer

import remat
import remat.jax
from remat.core.simulator import simulate
from remat.fit.loop_menu import best_of
from remat.jax import _buffers, blocks, candidate
from remat.jax.candidate import FunctionCandidate
from remat.jax.peak import Compiler, Lowered, peak_of
from remat.jax.scans.menu import LoopBody
from remat.jax.scans.nested import forward_program
from remat.jax.scans.pairs import find_pairs
from remat.jax.trace.graph import graph_of_program
from remat.jax.trace.program import Flattener, alive
from remat.jax.variants import variants_of
from remat.planners.replay.residents import TooManyRuns
from remat.running import fresh_memory
from remat.running.cost_model import get_profile


def pooled(weights, x):
    """Convolutions, and the gradient of a maximum over windows, which is a scatter."""
    for w in weights:
        x = jnp.tanh(lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return jnp.mean(x**2)


def scanned(weights, x):
    """A loop, whose body has buffers of its own."""
    return jnp.mean(lax.scan(lambda c, w: (jnp.tanh(jnp.sin(c @ w) @ w.T), None), x, weights)[0] ** 2)


def step_of(kind):
    if kind == "dense":
        loss, args = mlp().loss, mlp().args
    elif kind == "scanned":
        loss, args = scanned, (jnp.full((8, 32, 32), 0.1), jnp.ones((256, 32)))
    else:
        loss, args = pooled, ([jnp.full((3, 3, 8, 8), 0.1)] * 6, jnp.ones((4, 16, 16, 8)))
    return jax.value_and_grad(loss), args


KINDS = pytest.mark.parametrize("kind", ["dense", "scanned", "pooled"])


@KINDS
def test_a_peak_is_read_before_machine_code_is_made(monkeypatch, kind):
    """It fails where a release moves the file with the assignment of buffers, or finishes what should be stopped."""
    step, args = step_of(kind)
    compiled = jax.jit(step).lower(*args).compile()
    monkeypatch.setattr(Lowered, "compiled", lambda self: pytest.fail("it was compiled to the end"))

    flat, structure = jax.tree.flatten(args)
    lowered = Lowered(lambda *own: step(*jax.tree.unflatten(structure, own)), flat, "data")
    assert lowered.peak().expected_bytes == peak_of(compiled.memory_analysis())


def test_donated_arguments_are_counted_once(monkeypatch):
    def step(weights, x):
        return weights - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(weights), jnp.sum(x)

    args = jnp.full((64, 64), 0.1), jnp.ones((256, 64))
    compiled = jax.jit(step, donate_argnums=0).lower(*args).compile()
    monkeypatch.setattr(Lowered, "compiled", lambda self: pytest.fail("it was compiled to the end"))

    assert Lowered(step, args, "data", (0,)).peak().expected_bytes == peak_of(compiled.memory_analysis())


def test_a_program_of_which_the_assignment_is_not_found_is_compiled(monkeypatch):
    monkeypatch.setattr(_buffers, "_FILES", "of another release")
    step, args = step_of("dense")
    flat, structure = jax.tree.flatten(args)
    exact_bytes = peak_of(jax.jit(step).lower(*args).compile().memory_analysis())

    assert (
        Lowered(lambda *own: step(*jax.tree.unflatten(structure, own)), flat, "data").peak().expected_bytes
        == exact_bytes
    )


@KINDS
def test_a_plan_says_what_the_compiler_says(kind):
    step, args = step_of(kind)
    ours = remat.jax.jit(step, budget="75%", **GREEDY)
    compiled = ours.lower(*args).compile()

    assert ours.plan.peak_bytes < ours.plan.baseline_peak_bytes
    assert peak_of(compiled.memory_analysis()) == ours.plan.peak_bytes <= ours.plan.budget_bytes


def test_temporary_memory_is_told_apart():
    """It is the block that a run asks for; XLA's own figure of it stands in the compiled program."""
    step, args = step_of("dense")
    memory = jax.jit(step).lower(*args).compile().memory_analysis()

    flat, structure = jax.tree.flatten(args)
    lowered = Lowered(lambda *own: step(*jax.tree.unflatten(structure, own)), flat, "data")
    assert lowered.peak().block_bytes == memory.temp_size_in_bytes > 0


def test_a_plan_is_expected_to_save_the_pages_that_the_plain_step_fetches(monkeypatch):
    monkeypatch.setattr(fresh_memory, "gives_back", lambda: True)
    monkeypatch.setattr(candidate, "usable_cache_bytes", lambda: 32 << 20)  # All that the step touches.
    case = mlp(layers=8, width=64, batch=1024)
    step = jax.value_and_grad(case.loss)
    plain_bytes = jax.jit(step).lower(*case.args).compile().memory_analysis().temp_size_in_bytes

    def plan():
        return remat.jax.jit(step, budget="75%", **GREEDY).plan_for(*case.args)

    without = plan()
    monkeypatch.setattr(fresh_memory, "KEPT_BYTES", plain_bytes - 1)
    found = plan()
    pages_s = plain_bytes / get_profile("cpu").fresh_rate
    assert found.baseline_expected_time_s == pytest.approx(without.baseline_expected_time_s + pages_s)
    assert found.expected_time_s == without.expected_time_s
    assert found.expected_overhead < 0 < without.expected_overhead
    assert found.overhead == without.overhead


def test_a_step_is_expected_to_take_longer_where_less_of_the_cache_is_there(monkeypatch):
    case = mlp(layers=8, width=64, batch=1024)
    step = jax.value_and_grad(case.loss)

    def plan(cache_bytes):
        monkeypatch.setattr(candidate, "usable_cache_bytes", lambda: cache_bytes)
        return remat.jax.jit(step, budget="75%", **GREEDY).plan_for(*case.args)

    whole, part = plan(32 << 20), plan(1 << 20)
    assert part.baseline_expected_time_s > 1.1 * whole.baseline_expected_time_s
    assert part.expected_time_s > 1.1 * whole.expected_time_s
    assert part.overhead == whole.overhead


def test_equal_programs_are_looked_at_once(monkeypatch):
    """A refusal names the smallest budget; when that is asked for, the plain step is not looked at again."""
    asked = []
    true_assigned = _buffers.assigned_memory

    def watched(lowered, options):
        asked.append(lowered.as_text())
        return true_assigned(lowered, options)

    monkeypatch.setattr(_buffers, "assigned_memory", watched)
    case = mlp(layers=7)

    def plan(budget):
        return remat.jax.jit(jax.value_and_grad(case.loss), budget=budget, **GREEDY).plan_for(*case.args)

    with pytest.raises(remat.InfeasibleBudget) as refused:
        plan(1)
    before = len(asked)
    assert plan(refused.value.minimum_bytes).peak_bytes <= refused.value.minimum_bytes
    assert len(asked) == len(set(asked)) <= before + 1


def test_a_cut_at_blocks_that_takes_too_many_runs_is_left_out(monkeypatch):
    """As where a block reads far back, like a scan by ``lax.associative_scan``."""
    asked = []

    def too_many(*_args):
        asked.append(True)
        raise TooManyRuns

    monkeypatch.setattr(blocks, "plan_with_checkpoints", too_many)
    case = mlp()
    ours = remat.jax.jit(jax.value_and_grad(case.loss), budget="60%", **GREEDY)

    assert_close(ours(*case.args), jax.jit(jax.value_and_grad(case.loss))(*case.args))
    assert asked
    assert ours.plan.measured_peak_bytes <= ours.plan.budget_bytes


def in_states(x, decay, drive, out):
    """A block whose gradient stores on its way down for its way up."""

    def combine(left, right):
        return left[0] * right[0], right[0] * left[1] + right[1]

    _, states = lax.associative_scan(combine, (jax.nn.sigmoid(x @ decay), jax.nn.softplus(x @ drive)), axis=1)
    return x + jnp.tanh(states * x) @ out


def loss_over(block):
    def loss(blocks, x):
        for own in blocks:
            x = block(x, *own)
        return jnp.mean(x**2)

    return loss


WIDTH = 8
STATES = ([(jnp.ones((WIDTH, WIDTH)),) * 3] * 3, jnp.ones((8, 16, WIDTH)))


def suggested(loss):
    """The plans that are suggested for a step with the peaks that they compile to, and the step as it is."""
    flat, structure = jax.tree.flatten(STATES)

    def step(*own):
        return jax.value_and_grad(loss)(*jax.tree.unflatten(structure, own))

    variants, _ = variants_of(step, flat)
    one = FunctionCandidate(variants, lambda plan: pytest.fail("nothing is compiled"))
    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in flat]

    def peak_bytes(plan):
        variant = one.variant_of(plan)
        return Compiler(variant.program, variant.turning_point, "barrier", shapes).peak(plan.schedule).expected_bytes

    return [(plan, peak_bytes(plan)) for plan in one.suggestions()], variants[0].graph


def test_blocks_that_read_far_back_are_tried_as_under_checkpoint():
    """Three blocks with ``lax.associative_scan``: a cut between them has no end, ``jax.checkpoint`` has."""
    found, graph = suggested(loss_over(in_states))

    (plan,) = (plan for plan, _ in found if plan.planner == "blocks")
    assert plan.peak_bytes < 0.6 * simulate(graph, graph.plain_schedule).peak_bytes
    assert plan.overhead < 0.6


@OF_XLA_0_10
def test_the_placement_of_checkpoint_takes_its_bytes():
    checkpointed = loss_over(jax.checkpoint(in_states))
    limit_bytes = Lowered(jax.value_and_grad(checkpointed), STATES, "barrier").peak().expected_bytes

    assert next(peak for plan, peak in suggested(loss_over(in_states))[0] if plan.planner == "blocks") <= limit_bytes
    as_written, as_planned = (p for plan, p in suggested(checkpointed)[0] if plan.planner == "jax.checkpoint")
    assert as_written == limit_bytes
    # A barrier around more values has a longer table of their places.
    assert as_planned <= limit_bytes + 256
    # A planner that saves nothing leaves the candidates.
    ours = remat.jax.jit(jax.value_and_grad(loss_over(in_states)), budget=limit_bytes, planner="store_all")
    plan = ours.plan_for(*STATES)
    assert plan.planner == "blocks"
    assert plan.peak_bytes <= limit_bytes


@OF_XLA_0_10
def test_regions_with_derivatives_of_their_own_run_as_they_are_written():
    """By the time that a region is written again, JAX has taken the rule: it is not recognised as the same function."""

    @jax.custom_vjp
    def rounded(x):
        return jnp.round(x * 16) / 16

    rounded.defvjp(lambda x: (rounded(x), x), lambda x, g: (g * (jnp.abs(x) < 4),))
    loss = loss_over(jax.checkpoint(lambda x, w: jnp.tanh(rounded(jnp.sin(x @ w)) @ w)))
    args = ([(jnp.full((16, 16), 0.1),)] * 6, jnp.ones((256, 16)))
    limit_bytes = Lowered(jax.value_and_grad(loss), args, "barrier").peak().expected_bytes
    ours = remat.jax.jit(jax.value_and_grad(loss), budget=limit_bytes, planner="store_all")

    assert_close(ours(*args), jax.jit(jax.value_and_grad(loss))(*args))
    assert ours.plan.planner == "jax.checkpoint"
    assert ours.plan.measured_peak_bytes <= limit_bytes
    assert 2 * limit_bytes < Lowered(jax.value_and_grad(loss), args, "data").peak().expected_bytes


def test_the_menu_of_a_loop_has_no_wide_gaps():
    """A budget between two options is used up to the lower one of them."""
    case = transformer(scanned=True, layers=4, dropout=0.0)
    closed = jax.make_jaxpr(jax.value_and_grad(case.loss))(*case.args)
    flattener = Flattener()
    outputs = flattener.add(closed, [flattener.value(var.aval) for var in closed.jaxpr.invars])
    (pair,) = find_pairs(alive(flattener.equations, outputs), outputs)
    body = forward_program(pair)
    menu = best_of(LoopBody(pair, body, graph_of_program(body, get_profile("cpu"))).cheapest_for_shares())

    held = [option.held_bytes for option in menu]
    gaps = [(before - after) / held[0] for before, after in itertools.pairwise(held)]
    assert len(held) > 12
    # One value of the body is a tenth of all that the loop could stack.
    assert max(gaps) < 0.12
