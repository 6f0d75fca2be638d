"""The lever "split" in TensorFlow: the head in slices, equal to the plain step to rounding, within its budget."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import remat
import remat.tensorflow
from remat.core.plan import load_plan_and_graph
from remat.tensorflow import GradientTape, _private
from remat.tensorflow.peak.device import current_device
from remat.tensorflow.split.split_function import Splitter
from remat.tensorflow.trace.func_graph import FunctionToPlan

LEVERS = ("recompute", "split")
WORDS, WIDTH, SAMPLES, LENGTH = 4000, 32, 4, 64


def variables(dtype="float32"):
    random = np.random.default_rng(0)
    shapes = [(WORDS, WIDTH), (WIDTH, WIDTH), (WIDTH, WORDS), (WORDS,)]
    return [tf.Variable((random.normal(size=shape) * 0.2).astype(dtype)) for shape in shapes]


def data(samples=SAMPLES):
    random = np.random.default_rng(1)
    return [tf.constant(random.integers(0, WORDS, (samples, LENGTH)), tf.int32) for _ in range(2)]


def logits_of(held, tokens):
    embedding, inner, head, bias = held
    x = tf.tanh(tf.tensordot(tf.gather(embedding, tokens), inner, 1))
    return tf.nn.bias_add(tf.tensordot(x, head, 1), bias)


def mean_loss(held, tokens, labels):
    """As TensorFlow writes it."""
    each = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits_of(held, tokens))
    return tf.reduce_mean(each)


def masked_loss(held, tokens, labels):
    """A mask and a mean of one's own, in logarithms of one's own."""
    logits = logits_of(held, tokens)
    shifted = logits - tf.stop_gradient(tf.reduce_max(logits, -1, keepdims=True))
    logarithms = shifted - tf.math.log(tf.reduce_sum(tf.exp(shifted), -1, keepdims=True))
    each = -tf.reduce_sum(tf.one_hot(labels, WORDS) * logarithms, -1)
    mask = tf.cast(labels % 5 > 0, tf.float32)
    return tf.reduce_sum(each * mask) / tf.reduce_sum(mask)


def tied_loss(held, tokens, labels):
    """One matrix for both ends, and logits in one axis of tokens."""
    x = tf.tanh(tf.reshape(tf.gather(held[0], tokens), (-1, WIDTH)) @ held[1])
    logits = tf.matmul(x, held[0], transpose_b=True) + held[3] + 0 * tf.reduce_sum(held[2])
    labels = tf.one_hot(tf.reshape(labels, [-1]), WORDS)
    return tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(labels=labels, logits=logits))


def dropped_loss(held, tokens, labels):
    """A mask drawn at random over the logits."""
    logits = logits_of(held, tokens)
    keep = tf.random.stateless_uniform(tf.shape(logits), (1, 2)) > 0.1
    logits = tf.where(keep, logits, tf.zeros_like(logits))
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))


def step_of(loss, held, tape, signature=None):
    @tf.function(input_signature=signature, jit_compile=False)
    def step(tokens, labels):
        with tape() as recorded:
            value = loss(held, tokens, labels)
        return value, [tf.convert_to_tensor(gradient) for gradient in recorded.gradient(value, held)]

    return step


def assert_near(found, expected, rtol=2e-5, atol=1e-6):
    for one, other in zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=rtol, atol=atol)


def planned(loss, held, signature=None, **options):
    """The step under a budget, with the tape that says how it was planned."""
    tapes = []

    def tape():
        tapes.append(GradientTape(planner="peak_greedy", **{"levers": LEVERS, **options}))
        return tapes[-1]

    return step_of(loss, held, tape, signature), tapes


def in_slices(loss, held, slices, samples=SAMPLES, planned_for=None, *, inner=False):
    """The step with its regions in so many slices, as written: nothing holds them in order."""
    tokens, labels = data(samples)
    size = samples if planned_for is None else None
    signature = [tf.TensorSpec((size, LENGTH), tf.int32)] * 2
    concrete = step_of(loss, held, tf.GradientTape, signature).get_concrete_function()
    known = {t.name: (planned_for, LENGTH) for t in concrete.graph.inputs[:2]} if planned_for else {}
    splitter = Splitter(FunctionToPlan(concrete.graph, known), 1, inner=inner)
    assert splitter.regions
    graph, named = _private.copy_to_change(concrete.graph)
    written = splitter.write(graph, named, slices)
    inside = {op.name for op in graph.get_operations()}
    assert written is None or set(written.stands_for) <= inside
    if written is None:
        return None

    @tf.function(autograph=False)
    def run():
        outside = tf.compat.v1.get_default_graph()
        inputs = [outside.capture(tf.convert_to_tensor(one)) for one in (tokens, labels, *concrete.captured_inputs)]
        return tf.graph_util.import_graph_def(
            graph.as_graph_def(),
            {inner.op.name + ":0": given for inner, given in zip(graph.inputs, inputs, strict=True)},
            [output.name for output in graph.outputs],
            name="slices",
        )

    return splitter, run()


@pytest.mark.parametrize(
    "loss",
    [mean_loss, *(pytest.param(one, marks=pytest.mark.thorough) for one in (masked_loss, tied_loss, dropped_loss))],
)
def test_losses_are_equal_to_rounding(loss):
    held = variables()
    expected = step_of(loss, held, tf.GradientTape)(*data())
    _, found = in_slices(loss, held, 4)
    assert_near(found, expected)


@pytest.mark.thorough
@pytest.mark.parametrize("slices", [2, 3, 7, 256, 257])
def test_slices_that_do_not_divide_the_axis(slices):
    held = variables()
    made = in_slices(mean_loss, held, slices)
    if slices > SAMPLES * LENGTH:
        assert made is None
    else:
        assert_near(made[1], step_of(mean_loss, held, tf.GradientTape)(*data()))


@pytest.mark.thorough
@pytest.mark.parametrize("samples", [1, 3, 4])
@pytest.mark.parametrize("loss", [mean_loss, masked_loss, tied_loss])
def test_batches_whose_size_is_unknown_when_they_are_traced(loss, samples):
    held = variables()
    splitter, found = in_slices(loss, held, 8, samples, planned_for=4)
    assert splitter.length == SAMPLES * LENGTH, "tokens of several samples are cut between any two"
    assert_near(found, step_of(loss, held, tf.GradientTape)(*data(samples)))


def test_the_head_keeps_a_budget_that_recomputation_does_not(tmp_path, monkeypatch):
    # A share of this step's own bytes: what other tests left behind in this process lies beside it.
    monkeypatch.setattr("remat.tensorflow.planned._resident_bytes", lambda function: 0)
    held = variables()
    tokens, labels = data()
    expected = step_of(mean_loss, held, tf.GradientTape)(tokens, labels)
    with pytest.raises(remat.InfeasibleBudget):
        planned(mean_loss, held, budget="60%", levers=("recompute",))[0](tokens, labels)
    step, tapes = planned(mean_loss, held, budget="60%")
    assert_near(step(tokens, labels), expected)
    plan = tapes[0].plan
    assert plan.peak_bytes <= 0.6 * plan.baseline_peak_bytes
    assert plan.split is not None
    assert plan.split.slices >= 2
    assert f"in {plan.split.slices} slices" in str(plan)
    assert plan.split.stands_for
    # A plan is followed by another trace of the same function, and saved with its slices.
    plan.save(tmp_path / "plan.json")
    again, others = planned(mean_loss, held, plan=load_plan_and_graph(tmp_path / "plan.json")[0])
    assert_near(again(tokens, labels), expected)
    assert others[0].plan.split == plan.split
    assert others[0].plan.schedule == plan.schedule


@pytest.mark.thorough
def test_recomputation_alone_is_the_default():
    step, tapes = planned(mean_loss, variables(), budget="200%", levers=("recompute",))
    step(*data())
    assert tapes[0].plan.split is None


@pytest.mark.thorough
def test_sums_over_slices_of_bfloat16_are_made_in_float32():
    held = variables()

    def loss(held, tokens, labels):
        logits = logits_of([tf.cast(one, tf.bfloat16) for one in held], tokens)
        each = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=tf.cast(logits, tf.float32))
        return tf.reduce_mean(each)

    exact = step_of(mean_loss, held, tf.GradientTape)(*data())[1][2]
    plain = step_of(loss, held, tf.GradientTape)(*data())[1][2]
    _, found = in_slices(loss, held, 64)
    # Sixty-four terms that were added in bfloat16 would be several times as far away.
    assert tf.norm(found[3] - exact) < 1.2 * tf.norm(plain - exact)


@pytest.mark.thorough
def test_value_and_grad_and_gradients_take_the_lever():
    held = variables()
    tokens, labels = data()
    expected = step_of(mean_loss, held, tf.GradientTape)(tokens, labels)

    def loss(tokens, labels):
        return mean_loss(held, tokens, labels)

    options = {"budget": "85%", "levers": LEVERS, "planner": "peak_greedy"}
    # Bytes that other tests left behind count as resident; tighter shares have no room for them.
    for micro_batches in (1, 2, "auto"):
        both = remat.tensorflow.value_and_grad(loss, held, micro_batches=micro_batches, **options)
        value, gradients = tf.function(lambda *args, both=both: both(*args))(tokens, labels)
        assert_near([value, [tf.convert_to_tensor(one) for one in gradients]], expected)
    assert any(option.plan is not None and option.plan.split is not None for option in both.choice.options)

    @tf.function
    def step(tokens, labels):
        value = loss(tokens, labels)
        return [tf.convert_to_tensor(one) for one in remat.tensorflow.gradients(value, held, **options)]

    assert_near(step(tokens, labels), expected[1])
    assert remat.tensorflow.last_plan().split is not None


def deep_variables(width=WIDTH, depth=3):
    """An embedding, and blocks of a scale, an inner layer with its bias, and what leads out of it."""
    random = np.random.default_rng(2)

    def matrix(*shape):
        return tf.Variable(random.normal(size=shape) * shape[0] ** -0.5, dtype=tf.float32)

    blocks = [
        (tf.Variable(tf.ones(width)), matrix(width, 4 * width), tf.Variable(tf.zeros(4 * width))) for _ in range(depth)
    ]
    return [matrix(50, width), *(one for block in blocks for one in (*block, matrix(4 * width, width)))]


def deep_loss(held, tokens, labels):
    """Inner layers between means over all tokens, which no slice knows; the head is narrow."""
    x = tf.gather(held[0], tokens % 50)
    for scale, up, bias, down in zip(*[iter(held[1:])] * 4, strict=True):
        mixed = (x - tf.reduce_mean(x, [0, 1])) * scale
        x = x + tf.tensordot(tf.nn.gelu(tf.nn.bias_add(tf.tensordot(tf.tanh(mixed), up, 1), bias)), down, 1)
    return tf.reduce_mean(tf.square(x - tf.cast(labels % 7, tf.float32)[..., None]))


@pytest.mark.parametrize("planned_for", [None, SAMPLES])
@pytest.mark.parametrize("slices", [2, pytest.param(7, marks=pytest.mark.thorough)])
def test_inner_layers_are_equal_to_rounding_in_slices(slices, planned_for):
    held = deep_variables()
    made = in_slices(deep_loss, held, slices, planned_for=planned_for, inner=True)
    assert made is not None
    splitter, found = made
    assert len(splitter.regions) == 6, "a forward and a backward part of each layer"
    assert_near(found, step_of(deep_loss, held, tf.GradientTape)(*data()))


@pytest.mark.thorough
def test_inner_layers_keep_a_budget_that_recomputation_does_not(tmp_path):
    held = deep_variables(width=64)
    tokens, labels = data(128)
    expected = step_of(deep_loss, held, tf.GradientTape)(tokens, labels)
    with pytest.raises(remat.InfeasibleBudget):
        planned(deep_loss, held, levers=("recompute",), budget="22%")[0](tokens, labels)
    step, tapes = planned(deep_loss, held, budget="22%")
    assert_near(step(tokens, labels), expected)
    plan = tapes[0].plan
    assert plan.split.inner
    assert "inner layers" in str(plan)
    device = current_device()
    if device.has_counter:  # Without oneDNN there is none on a CPU; the rest holds there, too.
        before_bytes = device.in_use_bytes
        device.reset_peak()
        assert_near(step(tokens, labels), expected)
        assert device.peak_bytes - before_bytes <= plan.budget_bytes
    plan.save(tmp_path / "plan.json")
    again, others = planned(deep_loss, held, plan=load_plan_and_graph(tmp_path / "plan.json")[0])
    assert_near(again(tokens, labels), expected)
    assert others[0].plan.split.inner


@pytest.mark.parametrize("levers", ["split", (), ("micro_batches",)])
def test_unknown_levers_are_refused(levers):
    with pytest.raises(ValueError, match=r"levers=.* is not a tuple of some of recompute, split, update"):
        GradientTape(budget="50%", levers=levers)


def test_what_does_not_go_together_with_slices_is_refused():
    with pytest.raises(ValueError, match="slices keep nothing"):
        GradientTape(checkpoints=[], levers=LEVERS)
    with pytest.raises(ValueError, match="and there is none; give budget="):
        remat.tensorflow.value_and_grad(mean_loss, levers=LEVERS)
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, (2, 3))
        with pytest.raises(remat.UnsupportedStep, match="TensorFlow 1 graph cannot be cut"):
            remat.tensorflow.gradients(tf.reduce_sum(x * x), [x], budget="50%", levers=LEVERS)


def test_the_plan_of_a_function_whose_tensors_are_in_use_has_no_slices():
    held = variables()

    @tf.function
    def step(tokens, labels):
        with GradientTape(budget="60%", levers=LEVERS) as tape:
            loss = mean_loss(held, tokens, labels)
        tape.gradient(loss, held)
        return tape.plan.peak_bytes

    with pytest.raises(remat.UnsupportedStep, match="asked for inside of the function"):
        step(*data())
