"""What TensorFlow's graph optimizer leaves of a schedule: it rewrites the function once more after remat did."""

from __future__ import annotations

import itertools

import pytest
import tensorflow as tf
from small_steps import BATCH, WIDTH, Chain, inputs
from tensorflow.python.eager import context

from remat.core.plan import plan_for_schedule
from remat.tensorflow import GradientTape, recompute
from remat.tensorflow.peak.device import current_device
from remat.tensorflow.trace import op_facts

TENSOR_BYTES = BATCH * WIDTH * 4


def gelu(x, weight):
    """Products of three factors, one of them a constant; their gradients are, too."""
    y = x @ weight
    return 0.5 * y * tf.math.erfc(y * -0.7)


def residual(x, weight):
    """Sums of more than two."""
    y = tf.tanh(x @ weight)
    return x + (y + (tf.sigmoid(y) + 0.1))


def root_mean_square_normed(x, weight):
    """Its gradient multiplies by the exponent; operands exchanged, that is a product of what the forward pass made."""
    y = x @ weight
    return x + y * tf.math.rsqrt(tf.reduce_mean(tf.pow(y, 2.0), -1, keepdims=True) + 1e-6) * weight[0]


def pooled(x, weight):
    """The largest of a monotonic function's values."""
    y = tf.nn.relu(tf.reshape(x @ weight, [BATCH // 64, 8, 8, WIDTH]))
    pool = tf.nn.max_pool2d(y, 1, 1, "VALID")
    return tf.reshape(y * pool, [BATCH, WIDTH])


def cubed(x, weight):
    """A power of three, as in the tanh form of a Gelu, and its gradient, a power of two."""
    y = x @ weight
    cube = tf.pow(y, 3.0)
    return tf.tanh(0.8 * (y + 0.04 * cube)) * tf.sigmoid(cube)


def gelu_of_tanh(x, weight):
    """A power that one product reads: of a constant, the power's base and its square, any two may be multiplied."""
    return of_tanh(x @ weight)


def of_tanh(y):
    return y * (1 + tf.tanh(0.8 * (y + 0.04 * tf.pow(y, 3.0))))


def hard_swish(x, weight):
    """A division by a constant, whose reciprocal may go to any factor."""
    y = x @ weight
    return y * tf.nn.relu6(y + 3.0) / 6.0


def scaled_by_a_cube(x, weight):
    """A power of a small tensor, which nothing holds in its place."""
    y = x @ weight
    return y * tf.pow(tf.reduce_mean(y, -1, keepdims=True), 3.0)


LAYERS = [gelu, residual, root_mean_square_normed, pooled, cubed, gelu_of_tanh, hard_swish, scaled_by_a_cube]
AGAIN = ("Add", "AddV2", "Mul", "Pow", "RealDiv", "Relu", "Relu6")
SPAN = 6


@pytest.fixture(params=LAYERS, ids=lambda layer: layer.__name__)
def optimized(request, monkeypatch):
    """As if memory were short everywhere: each operation waits for the one before it."""
    return optimized_step(request.param, monkeypatch, 1)


@pytest.fixture(params=LAYERS, ids=lambda layer: layer.__name__)
def optimized_in_spans(request, monkeypatch):
    """Operations that need not wait for one another stand together."""
    return optimized_step(request.param, monkeypatch, SPAN)


def optimized_step(layer, monkeypatch, span):
    """A step in which much runs just before its reader: its rewriting, and its graph as the executor gets it."""
    monkeypatch.setattr(
        "remat.tensorflow.emit.emit._Emitter._span_starts",
        lambda emitter: frozenset(range(0, len(emitter.plan.schedule), span)),
    )
    weights = Chain().weights

    def trace(**limit):
        @tf.function(autograph=False)
        def function(x):
            with GradientTape(**limit) as tape:
                for weight in weights:
                    x = layer(x, weight)
                loss = tf.reduce_mean(tf.square(x))
            function.tape = tape
            return tape.gradient(loss, weights)

        function.get_concrete_function(inputs())
        return function

    graph = trace(budget="100%").tape._rewritten.step.graph
    function = trace(plan=plan_for_schedule(graph, again_before_every_reader(graph), planner="by hand"))
    return function.tape._rewritten, optimized_graph(function)


def optimized_graph(function):
    """A function's graph as the executor gets it: of those made ready meanwhile, that with most of its operations."""
    own = {op.name for op in function.get_concrete_function(inputs()).graph.get_operations()}
    return max(optimized_graphs(function), key=lambda graph: len(own & {node.name for node in graph.node}))


def optimized_graphs(function):
    """The same, with those of all functions that are made ready meanwhile."""
    context.enable_run_metadata()
    try:
        function(inputs())
        return [graph.post_optimization_graph for graph in context.export_run_metadata().function_graphs]
    finally:
        context.disable_run_metadata()


def again_before_every_reader(graph):
    """Cheap operations a second time where their result is read later: pairs without a control edge between them."""
    schedule = []
    for index, op in enumerate(graph.ops):
        makers = sorted({graph.producer[t] for t in op.inputs} - {None, *schedule[-1:]})
        schedule += [maker for maker in makers if graph.ops[maker].kind in AGAIN]
        schedule.append(index)
    return schedule


def test_no_large_constant_is_made():
    """The gradient of a mean begins with one number in a whole tensor: as a constant it would never be freed."""
    weights, x, device = Chain().weights, inputs(), current_device()

    @tf.function(autograph=False)
    def function(x):
        with GradientTape(budget="100%") as tape:
            y = x
            for weight in weights:
                y = tf.tanh(y @ weight)
            loss = tf.reduce_mean(y)
        return tape.gradient(loss, weights)

    before = device.in_use_bytes
    for gradient in function(x):
        assert float(tf.reduce_max(tf.abs(gradient))) > 0
    del gradient
    assert device.in_use_bytes - before < TENSOR_BYTES


def test_the_schedule_of_large_tensors_survives(optimized):
    """Each operation that makes one still waits for the one before it; those that were merged away are left out."""
    written, graph = optimized
    parents = {node.name: [name.lstrip("^").partition(":")[0] for name in node.input] for node in graph.node}
    order = [op.name for _, op in scheduled(written) if op.name in parents]
    assert len(order) > len(written.copies) > 10
    for before, after in itertools.pairwise(order):
        assert is_ancestor(before, after, parents), f"{after} no longer waits for {before}"


def test_a_span_waits_for_the_span_before_it(optimized_in_spans):
    """Whatever the graph optimizer makes of an operation: a power becomes two products, and products are regrouped."""
    written, graph = optimized_in_spans
    parents = {}
    for node in graph.node:  # Rising: what is made of constants alone is a product of two numbers that was exchanged.
        made_of = [name.lstrip("^").partition(":")[0] for name in node.input]
        if node.op != "Const" and (not made_of or not parents.keys().isdisjoint(made_of)):
            parents[node.name] = made_of
    spans = [[] for _ in range(len(written.plan.schedule) // SPAN + 1)]
    for position, op in scheduled(written):
        if op.name in parents:
            spans[position // SPAN].append(op.name)
    spans = [names for names in spans if names]
    assert len(spans) > 5
    for earlier, later in itertools.pairwise(spans):
        for before, after in itertools.product(earlier, later):
            assert is_ancestor(before, after, parents), f"{after} no longer waits for {before}"


def test_a_span_waits_for_whoever_reads_a_shape_in_the_span_before_it(monkeypatch):
    """Gradients of convolutions read shapes, and hold what has them until they have: the function as it is written."""

    def convolved(x, weight):
        y = tf.tanh(tf.reshape(x, [BATCH // 64, 8, 8, WIDTH]))
        return tf.reshape(tf.nn.conv2d(y, weight[None, None], 1, "SAME"), [BATCH, WIDTH])

    written, _ = optimized_step(convolved, monkeypatch, SPAN)
    operations, parents = as_written(written)
    first = {}
    for position, op in scheduled(written):
        first.setdefault(op.name, position)
    made = [
        (op.name, max(first[source.op.name] for source in op.inputs if source.op.name in first))
        for op in operations
        if op.type == "ShapeN" and any(source.op.name in first for source in op.inputs)
    ]
    assert len(made) > 2
    for reader, position in made:
        later = [name for name, at in first.items() if at // SPAN == position // SPAN + 1]
        assert later
        assert all(is_ancestor(reader, name, parents) for name in later)


def test_what_is_held_by_nothing_does_not_end_the_order(monkeypatch):
    """A bias' gradient may run early, also where it is all that its span has: the next span waits for the one before.

    As in a dense layer of three axes, whose products read another tensor than the bias' gradient, by another shape.
    """

    def dense(x, weight):
        y = tf.nn.bias_add(tf.reshape(x @ weight, [BATCH // 8, 8, WIDTH]), weight[0])
        return tf.reshape(y, [BATCH, WIDTH])

    written, _ = optimized_step(dense, monkeypatch, 1)
    operations, parents = as_written(written)
    products = [op.name for _, op in as_scheduled(written) if op.type == "MatMul"]
    assert any(op.type == "BiasAddGrad" for op in operations)
    assert len(products) > 8
    for before, after in itertools.pairwise(products):
        assert is_ancestor(before, after, parents), f"{after} does not wait for {before}"


def test_who_reads_a_shape_behind_a_check_is_waited_for_behind_what_is_checked(monkeypatch):
    """As the loss of a label for each pixel does. What is checked may be held in a later span than what has the shape.

    A barrier that waits for the reader in the earlier span is one that waits for itself: TensorFlow refuses the graph.
    """

    def checked(x, weight):
        y = tf.tanh(x @ weight)
        z = tf.exp(tf.sin(y))
        same = tf.reduce_all(tf.equal(tf.raw_ops.Shape(input=z), [BATCH, WIDTH]))
        with tf.control_dependencies([tf.raw_ops.Assert(condition=same, data=["another shape"])]):
            rows = tf.raw_ops.Shape(input=y, name="behind_a_check")[0]
        return z / tf.cast(rows, tf.float32)

    written, _ = optimized_step(checked, monkeypatch, 1)  # Runs it.
    operations, parents = as_written(written)
    order = [op.name for _, op in scheduled(written)]
    readers = [op.name for op in operations if op.name.startswith("behind_a_check")]
    assert len(readers) > 2
    for number, reader in enumerate(readers):
        later = order[order.index("Exp" if not number else f"Exp_{number}") + 1 :]
        assert later
        assert all(is_ancestor(reader, name, parents) for name in later if not is_ancestor(name, reader, parents))


@pytest.mark.parametrize("layer", [cubed, scaled_by_a_cube], ids=lambda layer: layer.__name__)
def test_powers_become_products_as_in_the_plain_step(layer, monkeypatch):
    """A power takes ten times a product's time, and one with control inputs ends the optimizer's work altogether."""
    written, graph = optimized_step(layer, monkeypatch, 1)
    assert sum(op.type == "Pow" for op in written.copies) > 2
    assert sum(op.type == "Pow" for op in written.step.operations if op is not None) > 2
    assert not [node.name for node in graph.node if node.op == "Pow"]


def test_powers_that_a_region_makes_again_become_products():
    weights = Chain().weights

    @tf.function(autograph=False)
    def function(x):
        with tf.GradientTape() as tape:
            for weight in weights:
                x = recompute(of_tanh)(x @ weight)
            loss = tf.reduce_mean(tf.square(x))
        return tape.gradient(loss, weights)

    graph = optimized_graph(function)
    assert [node.name for node in graph.node if "recompute/" in node.name and node.op == "Tanh"]
    assert not [node.name for node in graph.node if node.op == "Pow"]


def as_written(written):
    """The operations of the rewritten function, and by name those that each of them waits for."""
    operations = written.step.operations[0].graph.get_operations()
    return operations, {
        op.name: [one.name for one in (*(t.op for t in op.inputs), *op.control_inputs)] for op in operations
    }


def as_scheduled(written):
    """Each position of the schedule, and the operation that runs there."""
    copies = iter(written.copies)
    seen = set()
    for position, index in enumerate(written.plan.schedule):
        yield position, next(copies) if index in seen else written.step.operations[index]
        seen.add(index)


def scheduled(written):
    """Those that make a large tensor."""
    for position, operation in as_scheduled(written):
        index = written.plan.schedule[position]
        made = [written.step.graph.tensors[t] for t in written.step.graph.ops[index].outputs]
        if any(t.size_bytes >= TENSOR_BYTES and t.alias_of is None for t in made):
            assert operation.type not in op_facts.MERGED_BY_ONEDNN
            yield position, operation


def is_ancestor(before, after, parents):
    seen, stack = set(), [after]
    while stack:
        for name in parents.get(stack.pop(), ()):
            if name == before:
                return True
            if name not in seen:
                seen.add(name)
                stack.append(name)
    return False
