"""What the traced graph says of each kind of operation, against what is known of TensorFlow."""

from __future__ import annotations

import pytest
import tensorflow as tf

import remat
from remat.running.cost_model import get_profile
from remat.tensorflow import trace
from remat.tensorflow.peak.allocator import AllocatorModel
from remat.tensorflow.trace.func_graph import trace_func_graph

MIB = 1 << 20
X = tf.TensorSpec([512, 512], tf.float32)  # 1 MiB


def traced(fn, *specs, **options):
    concrete = tf.function(fn).get_concrete_function(*specs)
    return trace_func_graph(concrete.graph, profile=get_profile("cpu"), **options).graph


def op_of(graph, kind):
    (index,) = [number for number, op in enumerate(graph.ops) if op.kind == kind]
    return graph.ops[index]


def kinds(graph):
    return [op.kind for op in graph.ops]


def test_order_is_fixed_and_sizes_are_bytes():
    graph = traced(lambda x: tf.matmul(x, x), X)

    assert not graph.free_order
    matmul = op_of(graph, "MatMul")
    result = graph.tensors[matmul.outputs[0]]
    assert (result.size_bytes, result.shape, result.dtype) == (MIB, (512, 512), "float32")
    assert matmul.time_s >= 2 * 512**3 / 1e13


@pytest.mark.parametrize(
    "view",
    [
        lambda y: tf.reshape(y, [-1]),
        tf.identity,
        tf.stop_gradient,
        lambda y: tf.expand_dims(y, 0),
        lambda y: tf.squeeze(tf.expand_dims(y, 0)),
        lambda y: tf.ensure_shape(y, [512, 512]),
    ],
)
def test_views_share_the_storage_of_their_source(view):
    graph = traced(lambda x: tf.tanh(view(tf.matmul(x, x))), X)

    made = op_of(graph, "MatMul").outputs[0]
    (read,) = op_of(graph, "Tanh").inputs
    assert read != made
    assert graph.roots[read] == made
    # The batch, and the product, whose place tanh takes; and a few bytes of constants.
    assert 2 * MIB <= remat.simulate(graph, graph.plain_schedule).peak_bytes < 2.01 * MIB


def test_element_wise_ops_work_in_place_in_both_operands():
    graph = traced(lambda x: tf.matmul(x, x) * tf.matmul(x, x + 1.0), X)

    product = op_of(graph, "Mul")
    assert product.in_place == tuple((source, product.outputs[0]) for source in product.inputs)
    assert op_of(graph, "AddV2").in_place[0][0] in graph.inputs
    assert all(not op.in_place for op in graph.ops if op.kind == "MatMul")


def test_broadcast_operand_is_not_taken_over():
    graph = traced(lambda x: tf.matmul(x, x) * tf.reduce_sum(tf.matmul(x, x), axis=1, keepdims=True), X)

    product = op_of(graph, "Mul")
    assert len(product.in_place) == 1
    assert graph.tensors[product.in_place[0][0]].size_bytes == MIB


def test_shapes_are_read_without_holding_the_tensor():
    spec = tf.TensorSpec([None, 512], tf.float32)
    concrete = tf.function(
        lambda x: tf.shape(tf.matmul(x, x, transpose_a=True) @ tf.transpose(x))
    ).get_concrete_function(spec)
    graph = trace_func_graph(
        concrete.graph, profile=get_profile("cpu"), input_shapes={concrete.graph.inputs[0].name: (512, 512)}
    ).graph

    shape = op_of(graph, "Shape")
    assert shape.inputs == ()
    assert [graph.ops[number].kind for number in shape.after] == ["MatMul"]


def test_identity_over_a_list_is_bypassed():
    graph = traced(lambda x: tf.add_n(tf.identity_n([tf.tanh(x), tf.sin(x)])), X)

    assert "IdentityN" not in kinds(graph)
    assert [graph.ops[graph.producer[t]].kind for t in op_of(graph, "AddN").inputs] == ["Tanh", "Sin"]


def test_identity_of_a_custom_gradient_stays():
    @tf.custom_gradient
    def custom(y):
        return tf.tanh(y), lambda dy: dy

    assert "IdentityN" in kinds(traced(lambda x: tf.sin(custom(x)), X))


def test_control_dependencies_are_kept():
    state = tf.Variable(0.0)

    def fn(x):
        state.assign_add(1.0)
        return x * state

    graph = traced(fn, X)
    # Automatic control dependencies read the variable after the write.
    read = max(number for number, op in enumerate(graph.ops) if op.kind == "ReadVariableOp")
    assert "AssignAddVariableOp" in {graph.ops[number].kind for number in graph.ops[read].after}


def test_variables_constants_and_arguments_are_pinned():
    weight = tf.Variable(tf.zeros([512, 512]))
    constant = tf.random.stateless_normal([512, 256], seed=[1, 1]).numpy()
    graph = traced(lambda x: x @ weight @ tf.constant(constant), X)

    assert graph.pinned_bytes == MIB + MIB + MIB // 2


def test_every_tensor_has_its_size_whatever_the_device_counts():
    graph = traced(lambda x: tf.reduce_sum(x @ x, axis=0), X, allocator=AllocatorModel(min_counted_bytes=4096))

    assert graph.tensors[op_of(graph, "Sum").outputs[0]].size_bytes == 2048
    assert graph.tensors[op_of(graph, "MatMul").outputs[0]].size_bytes == MIB


@pytest.mark.parametrize(
    ("fn", "kind"),
    [
        (lambda x: tf.random.normal([512, 512]) * x, "RandomStandardNormal"),
        (lambda x: tf.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y @ y), (0, x))[1], "While"),
        (lambda x: tf.cond(tf.reduce_sum(x) > 0, lambda: tf.sin(x), lambda: x), "If"),
        (lambda x: tf.numpy_function(lambda a: a, [x], tf.float32), "PyFunc"),
        (lambda x: tf.strings.as_string(x), "AsString"),
    ],
)
def test_what_must_run_once_is_never_recomputed(fn, kind):
    graph = traced(lambda x: tf.identity(fn(x)), X)

    ops = [op for op in graph.ops if op.kind in (kind, f"Stateless{kind}")]
    assert ops
    assert not any(op.recomputable for op in ops)


def test_stateless_random_numbers_may_be_drawn_again():
    graph = traced(lambda x: tf.random.stateless_normal([512, 512], seed=tf.cast(x[0, :2], tf.int32)) * x, X)

    assert op_of(graph, "StatelessRandomNormalV2").recomputable


def test_writes_run_once_and_outputs_stay():
    state = tf.Variable(tf.zeros([512, 512]))

    def fn(x):
        state.assign_add(x)
        return tf.tanh(x)

    graph = traced(fn, X)
    assert not op_of(graph, "AssignAddVariableOp").recomputable
    (output,) = graph.outputs
    (maker,) = [op for op in graph.ops if output in op.outputs]
    assert not maker.recomputable


def test_what_nobody_needs_is_left_out():
    def fn(x):
        tf.matmul(x, x)
        return tf.tanh(x)

    assert "MatMul" not in kinds(traced(fn, X))


def test_unknown_shape_is_refused_by_name():
    with pytest.raises(remat.UnsupportedStep, match=r"the shape of x \(None, 512\)"):
        trace(lambda x: tf.tanh(x), tf.TensorSpec([None, 512], name="x"))


def test_sizes_follow_the_real_shape_while_the_function_stays_dynamic():
    concrete = tf.function(lambda x: tf.tanh(tf.reshape(x @ tf.ones([512, 512]), [-1, 256]))).get_concrete_function(
        tf.TensorSpec([None, 512])
    )
    (name,) = [t.name for t in concrete.graph.inputs]
    graph = trace_func_graph(concrete.graph, profile=get_profile("cpu"), input_shapes={name: (1024, 512)}).graph

    assert graph.tensors[op_of(graph, "Tanh").outputs[0]].shape == (2048, 256)
    assert concrete.graph.inputs[0].shape.as_list() == [None, 512]


def test_size_that_depends_on_values_is_bounded_by_what_it_picks_from():
    graph = traced(lambda x: tf.boolean_mask(x, x[:, 0] > 0), X)

    picked = graph.tensors[op_of(graph, "GatherV2").outputs[0]]
    assert picked.shape is None
    assert picked.size_bytes >= MIB


def test_tensorflow_1_loop_is_refused():
    def fn(x):
        tf.compat.v1.disable_control_flow_v2()
        try:
            return tf.compat.v1.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, tf.sin(y)), (0, x))[1]
        finally:
            tf.compat.v1.enable_control_flow_v2()

    graph = tf.Graph()
    with graph.as_default():
        fn(tf.compat.v1.placeholder(tf.float32, [4, 4]))
    from remat.tensorflow.trace.which_run import in_topological_order

    with pytest.raises(remat.UnsupportedStep, match="TensorFlow 1 while loop"):
        in_topological_order(graph.get_operations())


def test_trace_runs_nothing():
    calls = tf.Variable(0)

    def step(x):
        calls.assign_add(1)
        return tf.tanh(x)

    graph = trace(step, X)

    assert "Tanh" in kinds(graph)
    assert calls.numpy() == 0
