"""Each private TensorFlow symbol that remat needs is where it was; if a release moves one, this says which."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import platform
import subprocess
import sys

import pytest
import tensorflow as tf

from remat.tensorflow import _private, _processes, _traces
from remat.tensorflow._processes import replica_numbers
from remat.tensorflow._traces import call_when_traced
from remat.tensorflow.peak.device import current_device

SYMBOLS = [
    ("tensorflow.compiler.xla.service.hlo_pb2", "HloProto"),
    ("tensorflow.core.framework.attr_value_pb2", "AttrValue"),
    ("tensorflow.python.autograph.core.ag_ctx", "ControlStatusCtx"),
    ("tensorflow.python.distribute.mirrored_run", "_call_for_each_replica"),
    ("tensorflow.python.eager.context", "global_seed"),
    ("tensorflow.python.eager.context", "internal_operation_seed"),
    ("tensorflow.python.eager.record", "could_possibly_record"),
    ("tensorflow.python.eager.record", "record_operation"),
    ("tensorflow.python.eager.record", "stop_recording"),
    ("tensorflow.python.eager.polymorphic_function.polymorphic_function", "Function"),
    ("tensorflow.python.framework.ops", "get_gradient_function"),
    ("tensorflow.python.framework.random_seed", "_graph_to_seed_dict"),
    ("tensorflow.python.ops.resource_variable_ops", "variable_accessed"),
    ("tensorflow.python.framework.ops", "add_exit_callback_to_default_func_graph"),
    ("tensorflow.python.framework.func_graph", "FuncGraph"),
    ("tensorflow.python.framework.function_def_to_graph", "function_def_to_graph"),
    ("tensorflow.python.ops.control_flow_util", "GraphOrParentsInXlaContext"),
    ("tensorflow.python.ops.control_flow_util_v2", "create_new_tf_function"),
    ("tensorflow.python.ops.gradients", "gradients"),
    ("tensorflow.python.ops.gradients_impl", "gradients"),
    ("tensorflow.python.ops.gradients_impl", "gradients_v2"),
    ("tensorflow.python.ops.handle_data_util", "copy_handle_data"),
    ("tensorflow.python.ops.handle_data_util", "get_resource_handle_data"),
    ("tensorflow.python.client.device_lib", "list_local_devices"),
    ("tensorflow.python.client.pywrap_tf_session", "TF_TryEvaluateConstant_wrapper"),
    ("tensorflow.python.util._pywrap_util_port", "IsMklEnabled"),
]
METHODS = [
    (type(_private._context.context()), "call_function", ["name", "tensor_inputs", "num_outputs"]),
    (type(_private._context.context()), "get_function_def", ["name"]),
    (tf.Graph, "_create_op_internal", ["op_type", "inputs", "dtypes", "name", "attrs", "compute_device"]),
    (tf.Graph, "_attr_scope", ["attr_map"]),
    (tf.Graph, "gradient_override_map", ["op_type_map"]),
    (_private.FuncGraph, "replace_capture", ["tensor", "placeholder"]),
    (type(_private._context.context()), "set_config_key_value", ["key", "value"]),
    (type(_private._context.context()), "get_config_key_value", ["key", "timeout_in_ms"]),
    (tf.Operation, "_update_input", ["index", "tensor"]),
    (tf.Operation, "_add_control_inputs", []),  # These are C++: they show no signature.
    (tf.Operation, "_remove_all_control_inputs", []),
    (tf.Operation, "_set_device", []),
    (tf.Operation, "_set_attr", []),
    (type(tf.function(lambda: None)), "_clone", ["python_function"]),
]
MOVED = (
    f"TensorFlow {tf.__version__} has no {{name}} any more: remat reaches it in src/remat/tensorflow/_*.py, "
    "one of which needs another way to do the same"
)


@pytest.mark.parametrize(("module", "name"), SYMBOLS, ids=lambda part: part)
def test_symbol_is_there(module, name):
    try:
        found = hasattr(importlib.import_module(module), name)
    except ImportError:
        found = False
    assert found, MOVED.format(name=f"{module}.{name}")


@pytest.mark.parametrize(("owner", "name", "parameters"), METHODS, ids=lambda part: str(part))
def test_method_takes_what_it_took(owner, name, parameters):
    method = getattr(owner, name, None)
    assert method is not None, MOVED.format(name=f"{owner.__name__}.{name}")
    for parameter in parameters:
        assert parameter in inspect.signature(method).parameters, MOVED.format(
            name=f"parameter {parameter!r} of {owner.__name__}.{name}"
        )


def test_every_private_symbol_is_listed_here():
    found = {
        f"{node.module}.{name.name}"
        for file in (_private, _processes, _traces)
        for node in ast.walk(ast.parse(inspect.getsource(file)))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tensorflow.")
        for name in node.names
    }
    known = {module for module, _ in SYMBOLS} | {f"{module}.{name}" for module, name in SYMBOLS}

    assert found
    assert found <= known


def test_a_copy_computes_the_same_and_is_marked():
    @tf.function
    def function(x):
        y = tf.tanh(x)
        copy = _private.copy_operation(y.op, [x], [y.op], "again")
        assert y.op in copy.control_inputs
        assert "_remat_copy" in copy.node_def.attr, MOVED.format(name="attrs= of Graph._create_op_internal")
        return y, copy.outputs[0]

    one, other = function(tf.constant([0.5, 1.0]))
    tf.debugging.assert_equal(one, other)


def test_an_input_and_a_control_edge_can_be_changed():
    @tf.function
    def function(x):
        one, other = tf.sin(x), tf.cos(x)
        result = tf.square(one)
        _private.update_input(result.op, 0, other)
        _private.add_control_inputs(result.op, [one.op])
        assert result.op.inputs[0] is other
        assert one.op in result.op.control_inputs
        return result

    assert float(function(tf.constant(0.0))) == 1.0


def test_the_end_of_a_trace_is_seen_with_its_outputs():
    seen = []

    @tf.function
    def function(x):
        graph = tf.compat.v1.get_default_graph()
        call_when_traced(lambda succeeded: seen.append((succeeded, [t.name for t in graph.outputs])))
        return tf.tanh(x, name="result")

    function(tf.constant(1.0))
    assert [succeeded for succeeded, _ in seen] == [True]
    assert seen[0][1], "the outputs of a function are not known when its exit callbacks run"


def test_a_failed_trace_is_seen_as_such():
    seen = []

    @tf.function
    def function(x):
        call_when_traced(seen.append)
        raise KeyError(x.name)

    with pytest.raises(KeyError):
        function(tf.constant(1.0))
    assert seen == [False]


def test_a_trace_inside_of_a_handled_error_is_no_failure():
    seen = []

    def body(x):
        try:
            raise KeyError("handled")
        except KeyError:
            call_when_traced(seen.append)
        return x

    tf.function(body, autograph=False)(tf.constant(1.0))
    assert seen == [True]


def test_a_function_that_is_entered_again_ends_when_its_own_trace_does():
    """Each replica of a strategy enters it once more, and its outputs are not known yet when that one leaves it."""
    seen = []

    @tf.function(autograph=False)
    def function(x):
        graph = tf.compat.v1.get_default_graph()
        for _ in range(2):
            with graph.as_default():
                call_when_traced(lambda succeeded: seen.append((succeeded, len(graph.outputs))))
        assert not seen, MOVED.format(name="old_scope_exit_callbacks of a scope")
        return x

    function(tf.constant(1.0))
    assert seen == [(True, 1)] * 2


def test_the_numbers_of_a_replica():
    context = tf.distribute.OneDeviceStrategy("CPU:0").run(tf.distribute.get_replica_context)
    assert replica_numbers(context) == (0, 0)


@pytest.mark.parametrize("jit", [False, True])
def test_xla_is_recognised(jit):
    seen = []

    @tf.function(jit_compile=jit)
    def function(x):
        seen.append(_private.in_xla_context(tf.compat.v1.get_default_graph()))
        return x + 1.0

    function(tf.constant(1.0))
    assert seen == [jit]


def test_shape_of_a_variable_behind_its_handle():
    variable = tf.Variable(tf.zeros([3, 5]))
    graph = tf.function(lambda: variable + 1.0).get_concrete_function().graph

    assert _private.handle_shapes(graph.inputs[0]) == [(tf.TensorShape([3, 5]), tf.float32)]


def test_memory_of_the_device_is_known():
    assert _private.memory_limit_bytes(current_device().name) > 0


@pytest.mark.parametrize("is_on", [True, False])
def test_whether_onednn_is_on_is_asked_of_tensorflow(is_on):
    """A counter that works is no proof of it."""
    found = subprocess.run(
        [
            sys.executable,
            "-c",
            "import remat.tensorflow.probe\n"
            "from remat.tensorflow.peak.device import Device\n"
            "Device.has_counter = property(lambda self: True)\n"
            "print(remat.tensorflow.probe.probe().onednn)",
        ],
        env={**os.environ, "TF_ENABLE_ONEDNN_OPTS": str(int(is_on)), "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert found.stdout.strip() == str(is_on and platform.machine() == "x86_64")
