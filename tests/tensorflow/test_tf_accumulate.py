"""``value_and_grad``: micro-batches give the full batch's value and gradients, whatever the loss divides by."""

from __future__ import annotations

import numpy as np
import pytest
import small_steps
import tensorflow as tf

import remat
from remat.micro_batches.cut import largest_size
from remat.tensorflow import _private, value_and_grad
from remat.tensorflow.micro_batches.loop import for_each_micro_batch
from remat.tensorflow.peak.device import current_device

BATCH = 10
WORDS = 7
FIXED = {"planner": "peak_greedy", "time_limit_s": 0}  # Nothing here is about the search, or about a proof.


class Model:
    """An embedding, two weights, one variable that nothing reads."""

    def __init__(self, dtype="float32"):
        random = np.random.default_rng(0)
        self.words = tf.Variable(random.normal(size=(WORDS, 5)).astype(dtype), name="words")
        self.weight = tf.Variable(random.normal(size=(5, 3)).astype(dtype), name="weight")
        self.bias = tf.Variable(np.zeros(3, dtype), name="bias")
        self.unread = tf.Variable(np.ones(2, dtype), name="unread")
        self.variables = [self.words, self.weight, self.bias, self.unread]

    def errors(self, ids, target):
        """One squared error per token, of the shape (batch, tokens)."""
        hidden = tf.tanh(tf.gather(self.words, ids) @ self.weight + self.bias)
        return tf.reduce_mean((hidden - target[:, tf.newaxis]) ** 2, -1)

    def mean(self, ids, target):
        return tf.reduce_mean(self.errors(ids, target))

    def sum(self, ids, target):
        return tf.reduce_sum(self.errors(ids, target))

    def per_token(self, ids, target):
        mask = tf.cast(ids != 0, target.dtype)
        return tf.reduce_sum(self.errors(ids, target) * mask), tf.reduce_sum(mask)


def batch(size=BATCH, dtype="float32", seed=1):
    random = np.random.default_rng(seed)
    ids = random.integers(0, WORDS, (size, 4))
    ids[: size // 3] = 0  # Whole micro-batches without a token that counts.
    return tf.constant(ids), tf.constant(random.normal(size=(size, 3)).astype(dtype))


def reference(model, name, ids, target):
    """TensorFlow's own value and gradients of the full batch."""
    with tf.GradientTape() as tape:
        value = getattr(model, name)(ids, target)
        if isinstance(value, tuple):
            value = value[0] / value[1]
    return value, tape.gradient(value, model.variables)


def assert_same(found, expected, tolerance=1e-6):
    assert found[0].dtype == expected[0].dtype
    np.testing.assert_allclose(found[0], expected[0], rtol=10 * tolerance)
    for one, other in zip(found[1], expected[1], strict=True):
        assert (one is None) == (other is None)
        if other is not None:
            dense = tf.convert_to_tensor(other).numpy()
            assert np.abs(dense).max() > 0
            np.testing.assert_allclose(
                tf.convert_to_tensor(one), dense, rtol=0, atol=10 * tolerance * np.abs(dense).max()
            )
            assert one.dtype == other.dtype


def in_eager(function):
    return function


def in_graph(function):
    return tf.function(function)


def in_xla(function):
    return tf.function(function, jit_compile=True)


def with_unknown_shapes(function, **options):
    return tf.function(
        function, input_signature=[tf.TensorSpec((None, None), tf.int64), tf.TensorSpec((None, 3))], **options
    )


def in_xla_with_unknown_shapes(function):
    return with_unknown_shapes(function, jit_compile=True)


REDUCTIONS = {"mean": "mean", "sum": "sum", "per_token": "ratio"}


CASES = [
    # Compiling takes seconds: every loss and every way once there, every number of pieces elsewhere.
    *[(loss, count, in_graph) for loss in REDUCTIONS for count in (1, 2, 3, 7)],
    *[("per_token", count, with_unknown_shapes) for count in (1, 2, 3, 7)],
    *[(loss, 3, in_eager) for loss in REDUCTIONS],
    *[(loss, 3, in_xla_with_unknown_shapes) for loss in REDUCTIONS],
    *[("per_token", 2, in_xla), ("mean", 3, in_xla)],
]


@pytest.mark.parametrize(("loss", "count", "way"), CASES)
def test_equals_the_full_batch(loss, count, way):
    model = Model()
    ids, target = batch()
    step = way(value_and_grad(getattr(model, loss), model.variables, micro_batches=count, reduction=REDUCTIONS[loss]))

    found, expected = step(ids, target), reference(model, loss, ids, target)
    assert_same(found, expected)
    # Outside of a function nobody knows which lookup a row belongs to.
    assert isinstance(found[1][0], tf.Tensor if way is in_eager else tf.IndexedSlices)


@pytest.mark.parametrize("way", [in_graph, in_xla, with_unknown_shapes])
def test_the_rows_of_an_embedding_are_those_of_the_full_batch_in_order(way):
    """Optimizers that work row by row would make another update of their sum."""
    model = Model()
    ids, target = batch(9)
    step = way(value_and_grad(model.per_token, model.variables[:1], micro_batches=6, reduction="ratio"))

    (found,), (expected, *_) = step(ids, target)[1], reference(model, "per_token", ids, target)[1]
    np.testing.assert_array_equal(found.indices, expected.indices)
    np.testing.assert_allclose(found.values, expected.values, rtol=1e-5, atol=1e-7)
    assert found.dense_shape.numpy().tolist() == [WORDS, 5]


@pytest.mark.parametrize("count", [2, 3])
def test_double_precision_stays(count):
    model = Model("float64")
    ids, target = batch(dtype="float64")
    step = tf.function(value_and_grad(model.mean, model.variables, micro_batches=count))

    assert_same(step(ids, target), reference(model, "mean", ids, target), tolerance=1e-15)


def test_half_precision_is_summed_in_single():
    # 300 micro-batches that add 1 each: a bfloat16 sum stalls at 256.
    weight = tf.Variable(tf.zeros((), tf.bfloat16))
    ones = tf.ones((300, 1), tf.bfloat16)
    step = tf.function(
        value_and_grad(lambda x: tf.reduce_sum(x * weight), [weight], micro_batches=300, reduction="sum")
    )

    (gradient,) = step(ones)[1]
    assert gradient.dtype == tf.bfloat16
    assert float(gradient) == 300.0


def test_a_batch_that_is_all_masked_gives_zero():
    model = Model()
    _, target = batch()
    step = tf.function(value_and_grad(model.per_token, model.variables[:3], micro_batches=3, reduction="ratio"))

    value, gradients = step(tf.zeros((BATCH, 4), tf.int64), target)
    assert float(value) == 0.0
    assert all(not np.any(tf.convert_to_tensor(gradient)) for gradient in gradients)


@pytest.mark.parametrize("options", [{"micro_batches": 3}, {"micro_batches": 2, "budget": "200%", **FIXED}])
def test_python_that_decides_by_a_tensor(options):
    """AutoGraph sees what the user wrote, and nothing else."""
    weight = tf.Variable(2.0)

    def loss(x):
        if tf.reduce_sum(x) > 0:
            return tf.reduce_mean(x * weight)
        return tf.reduce_mean(x * weight**2)

    value, (gradient,) = tf.function(value_and_grad(loss, [weight], **options))(tf.ones((6, 50_000)))
    # Sums of 50,000 float32 values, in an order that differs between CPUs.
    assert float(value) == pytest.approx(2.0, rel=1e-5)
    assert float(gradient) == pytest.approx(1.0, rel=1e-5)


def test_the_variables_that_the_function_reads_are_found():
    model = Model()
    ids, target = batch()
    value, gradients = value_and_grad(model.mean, micro_batches=3)(ids, target)

    assert len(gradients) == 3
    expected, by_all = reference(model, "mean", ids, target)
    assert_same((value, gradients), (expected, by_all[:3]))


@pytest.mark.parametrize("count", [1, 3])
def test_what_is_not_batched_is_passed_on_whole(count):
    weight = tf.Variable([2.0, 3.0])

    def loss(scale, data, *, shift):
        assert scale.shape == (2,)
        assert shift.shape == (4, 2)
        return tf.reduce_mean((data["x"] * weight * scale) ** 2) + tf.reduce_mean(data["more"][0]) * tf.reduce_sum(
            weight * shift
        )

    data = {"x": np.arange(8, dtype="float32").reshape(4, 2), "more": [np.ones((4, 1), "float32")]}
    arguments = (tf.constant([1.0, 0.5]), data)
    shift = tf.ones((4, 2))
    step = value_and_grad(loss, [weight], micro_batches=count, batch_argnums=-1)
    with tf.GradientTape() as tape:
        expected = loss(*arguments, shift=shift)
    assert_same(step(*arguments, shift=shift), (expected, tape.gradient(expected, [weight])))


def test_state_moves_once_per_micro_batch():
    counter = tf.Variable(0)
    weight = tf.Variable(1.0)

    def loss(x):
        counter.assign_add(1)
        return tf.reduce_mean(x * weight)

    tf.function(value_and_grad(loss, [weight], micro_batches=4))(tf.ones((9, 1)))
    assert int(counter) == 4


@pytest.mark.parametrize(("batch_size", "count"), [(10, 3), (10, 7), (9, 9), (2, 7), (1, 2), (8, 4)])
@pytest.mark.parametrize("known", [True, False])
def test_every_sample_once_in_order(batch_size, count, known):
    """The pieces are those of NumPy's array_split; a batch of fewer samples than pieces is cut into single ones."""
    sizes = [len(part) for part in np.array_split(np.arange(batch_size), count) if len(part)]

    @tf.function(input_signature=[tf.TensorSpec((batch_size if known else None,), tf.int32)])
    def cut(x):
        def body(leaves, size, carried):
            piece = tf.pad(leaves[0], [[0, batch_size - tf.shape(leaves[0])[0]]], constant_values=-1)
            number, seen = carried
            return [number + 1, tf.tensor_scatter_nd_update(seen, [[number]], [piece])]

        seen = tf.fill((len(sizes), batch_size), -2)
        return for_each_micro_batch([x], batch_size if known else tf.shape(x)[0], count, body, [0, seen])

    number, seen = cut(tf.range(batch_size))
    assert int(number) == len(sizes)
    rows = [[int(v) for v in row if v >= 0] for row in seen]
    assert [len(row) for row in rows] == sizes
    assert [n for row in rows for n in row] == list(range(batch_size))
    assert max(sizes) == largest_size(batch_size, count)


def loss_of(x):
    return tf.reduce_mean(x)


@pytest.mark.parametrize(
    ("options", "arguments", "message"),
    [
        ({"micro_batches": 0}, (), "micro_batches must be a whole number of at least 1, not 0"),
        ({"micro_batches": 2.5}, (), "at least 1, not 2.5"),
        ({"reduction": "average"}, (), "one of 'mean', 'sum', 'ratio', not 'average'"),
        ({"depth": 3}, (), "depth: an option of the planner, which needs a budget="),
    ],
)
def test_wrong_options(options, arguments, message):
    with pytest.raises(ValueError, match=message):
        value_and_grad(loss_of, **options)


@pytest.mark.parametrize(
    ("options", "arguments", "message"),
    [
        ({}, (np.ones((2, 3)),), "a batch of 2 samples cannot be split into 3 micro-batches.*at most micro_batches=2"),
        ({}, (np.ones((4, 3)), np.ones((5, 3))), "argument 0 has 4 samples and argument 1 has 5"),
        ({}, (np.ones((4, 3)), 1.0), r"argument 1 has the shape \(\), so it cannot be split"),
        ({}, (np.ones((4, 3)), tf.ragged.constant([[1.0]] * 4)), "argument 1 is a RaggedTensor.*give a dense tensor"),
        ({}, (), "there is no tensor to split"),
        ({"batch_argnums": 1}, (np.ones((4, 3)),), "names argument 1, and the function got 1 positional arguments"),
        ({"reduction": "ratio"}, (np.ones((4, 3)),), r"must return a pair \(sum, denominator\), and it returned one"),
    ],
)
def test_what_cannot_be_split(options, arguments, message):
    weight = tf.Variable(1.0)
    step = value_and_grad(
        lambda x, *_: tf.reduce_mean(tf.cast(x, tf.float32) * weight), [weight], micro_batches=3, **options
    )
    with pytest.raises(remat.UnsupportedStep, match=message):
        step(*arguments)


@pytest.mark.parametrize("returned", [lambda x: (x, x), lambda x: x])
def test_what_the_function_must_return(returned):
    weight = tf.Variable(1.0)
    step = value_and_grad(lambda x: returned(x * weight), [weight], micro_batches=2)
    with pytest.raises(remat.UnsupportedStep, match="reduction='mean'"):
        step(tf.ones((4, 2)))


def test_sizes_that_are_known_only_when_it_runs():
    weight = tf.Variable(1.0)
    specs = [tf.TensorSpec((None,)), tf.TensorSpec((None,))]
    step = tf.function(
        value_and_grad(lambda x, y: tf.reduce_mean(x * y * weight), [weight], micro_batches=3), input_signature=specs
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match="cannot be split into 3 micro-batches"):
        step(tf.ones(2), tf.ones(2))
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="argument 1 has another number of samples than argument 0"
    ):
        step(tf.ones(4), tf.ones(5))


def test_a_function_of_no_variable():
    with pytest.raises(remat.UnsupportedStep, match="reads no trainable variable"):
        value_and_grad(loss_of, micro_batches=2)(tf.ones((4, 2)))


def bodies(function, *args):
    """The bodies of the loops over micro-batches in a traced function."""
    operations = function.get_concrete_function(*args).graph.get_operations()
    return [_private.function_of(op, "body") for op in operations if op.type in ("While", "StatelessWhile")]


def test_a_budget_plans_each_iteration_and_changes_no_number():
    chain, data = small_steps.Chain(), small_steps.inputs(2 * small_steps.BATCH + 1)

    def loss(x):
        return tf.reduce_mean(chain(x) ** 2)

    plain = value_and_grad(loss, chain.weights)(data)
    step = tf.function(value_and_grad(loss, chain.weights, micro_batches=2, budget="42%", **FIXED))
    assert_same(step(data), plain)
    loops = bodies(step, data)
    assert len(loops) == 2  # One of 1025 samples, one of 1024.
    for body in loops:
        assert [op for op in body.get_operations() if "_remat_copy" in op.node_def.attr]


def test_one_micro_batch_at_a_time():
    """Neither iterations nor the two loops of unequal pieces run side by side: three pieces need less than two."""
    chain, data = small_steps.Chain(), small_steps.inputs(2 * small_steps.BATCH)
    peaks = []
    for count in (1, 2, 3):
        step = tf.function(value_and_grad(lambda x: tf.reduce_mean(chain(x) ** 2), chain.weights, micro_batches=count))
        step(data)
        tf.config.experimental.reset_memory_stats("CPU:0")
        before = current_device().in_use_bytes
        step(data)
        peaks.append(tf.config.experimental.get_memory_info("CPU:0")["peak"] - before)
    assert peaks[1] < 0.75 * peaks[0]
    assert peaks[2] < 0.95 * peaks[1]


@pytest.mark.slow
def test_a_budget_under_xla():
    chain, data = small_steps.Chain(), small_steps.inputs(2 * small_steps.BATCH)

    def loss(x):
        return tf.reduce_mean(chain(x) ** 2)

    plain = value_and_grad(loss, chain.weights)(data)
    limited = value_and_grad(loss, chain.weights, micro_batches=2, budget="42%", **FIXED)
    step = tf.function(limited, jit_compile=True)
    assert_same(step(data), plain)
    (body,) = bodies(step, data)
    assert [op for op in body.get_operations() if "_remat_copy" in op.node_def.attr]


def chain_of(batch, budget, **options):
    """The chain's loss and its function in the cheapest number of micro-batches; the rest of the loss is not split."""
    chain, data = small_steps.Chain(), small_steps.inputs(batch)

    def loss(x, *, scale):
        return tf.reduce_mean(chain(x) ** 2) * scale

    options = {"micro_batches": "auto", "budget": budget, **FIXED, **options}
    return chain, data, loss, value_and_grad(loss, chain.weights, **options)


@pytest.mark.thorough
def test_the_cheapest_number_of_micro_batches(capsys):
    chain, data, loss, limited = chain_of(2 * small_steps.BATCH, "50%")
    plain = value_and_grad(lambda x: loss(x, scale=2.0), chain.weights)(data)
    step = tf.function(lambda x, scale: limited(x, scale=scale))
    assert_same(step(data, tf.constant(2.0)), plain)
    choice = limited.choice
    assert choice is limited.joint_plan
    assert choice.chosen.plan.peak_bytes <= choice.budget_bytes
    whole = choice.options[0]
    assert whole.plan is None or whole.plan.recomputed > 0  # It does not fit as it is.
    assert choice.times_are_measured
    compared = [one for one in choice.options if one.measured_time_s is not None]
    compared = compared or [one for one in choice.options if one.plan is not None]
    assert choice.chosen.time_s <= 1.02 * min(one.time_s for one in compared)
    printed = capsys.readouterr().out
    assert printed == f"{choice}\n"
    assert sum(line.startswith("*") for line in printed.splitlines()) == 1


def test_a_batch_that_fits_is_not_split(capsys):
    chain, data, loss, limited = chain_of(small_steps.BATCH, "1GiB")
    plain = value_and_grad(lambda x: loss(x, scale=1.0), chain.weights)(data)
    assert_same(tf.function(limited)(data, scale=tf.constant(1.0)), plain)
    assert limited.choice.micro_batches == 1
    assert "the whole batch fits as it is" in capsys.readouterr().out


@pytest.mark.slow
def test_fused_batch_normalization_is_recomputed(capsys):
    weight = tf.Variable(np.random.default_rng(0).normal(size=(1, 1, 8, 8)).astype("float32"))
    data = tf.constant(np.random.default_rng(1).normal(size=(64, 32, 32, 8)).astype("float32"))

    def loss(x):
        for _ in range(4):
            x, _, _ = tf.compat.v1.nn.fused_batch_norm(
                tf.tanh(tf.nn.conv2d(x, weight, 1, "SAME")), [1.0] * 8, [0.0] * 8
            )
        return tf.reduce_mean(x**4)

    plain = value_and_grad(loss, [weight])(data)
    limited = value_and_grad(loss, [weight], micro_batches="auto", budget="80%", **FIXED)
    assert_same(tf.function(limited)(data), plain, tolerance=1e-5)
    assert limited.choice.micro_batches == 1
    assert "1 micro-batch: exact, where micro-batches would change what FusedBatchNorm" in capsys.readouterr().out


def test_auto_says_what_it_needs():
    weight = tf.Variable(1.0)

    def loss(x):
        return tf.reduce_mean(x * weight)

    with pytest.raises(ValueError, match=r"micro_batches='auto' chooses what a budget costs least with; give one"):
        value_and_grad(loss, [weight], micro_batches="auto")
    limited = value_and_grad(loss, [weight], micro_batches="auto", budget="1MB")
    with pytest.raises(remat.UnsupportedStep, match=r"called outside tf.function; put @tf.function on the step"):
        limited(tf.ones((4, 2)))
    step = tf.function(limited, input_signature=[tf.TensorSpec((None, 2))])
    with pytest.raises(
        remat.UnsupportedStep, match=r"the shape of argument 0 is not known .* leave the input_signature"
    ):
        step(tf.ones((4, 2)))
