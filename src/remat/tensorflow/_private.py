"""Every private TensorFlow symbol that remat uses, but for two parts of it.

TensorFlow has no public way to copy an operation inside a function that is being traced, or to give an operation
another input. ``_traces.py`` runs code when a trace ends and when its function is first called, ``_processes.py`` knows
replicas and their processes. ``tests/tensorflow/test_private.py`` fails with a clear message when a release moves one
of these symbols.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, TypeVar

import tensorflow as tf
from tensorflow.compiler.xla.service.hlo_pb2 import HloProto as CompiledProgram
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.autograph.core import ag_ctx as _ag_ctx
from tensorflow.python.client import pywrap_tf_session as _pywrap_tf_session
from tensorflow.python.eager import context as _context
from tensorflow.python.eager import record as _record
from tensorflow.python.eager.polymorphic_function import polymorphic_function as _polymorphic_function
from tensorflow.python.framework import function_def_to_graph as _function_def_to_graph
from tensorflow.python.framework import ops as _ops
from tensorflow.python.framework import random_seed as _random_seed
from tensorflow.python.framework.func_graph import FuncGraph
from tensorflow.python.ops import control_flow_util as _control_flow_util
from tensorflow.python.ops import control_flow_util_v2 as _control_flow_util_v2
from tensorflow.python.ops import gradients_impl as _gradients_impl
from tensorflow.python.ops import handle_data_util as _handle_data_util
from tensorflow.python.ops import resource_variable_ops as _resource_variable_ops
from tensorflow.python.util import _pywrap_util_port

from remat.core.errors import RematError

__all__ = ["CompiledProgram", "FuncGraph"]  # Of the names that are imported here, those that others use.


_Function = TypeVar("_Function", bound=Callable[..., Any])

_COPY_MARK = "_remat_copy"
_ENABLED = _ag_ctx.ControlStatusCtx(_ag_ctx.Status.ENABLED)

# AutoGraph replaces every exception that leaves the code it converted, unless the exception says not to.
RematError.ag_pass_through = True  # type: ignore[attr-defined]


def uses_onednn() -> bool:
    """Does TensorFlow run oneDNN's kernels on the CPU? It decides when it is loaded, by the CPU and by a variable."""
    return bool(_pywrap_util_port.IsMklEnabled())


def copy_operation(
    op: tf.Operation,
    inputs: Sequence[tf.Tensor],
    control_inputs: Sequence[tf.Operation],
    name: str,
) -> tf.Operation:
    """Make a second operation like ``op`` in its graph, reading ``inputs`` and held back by ``control_inputs``."""
    copy = slice_of_operation(op.graph, op, inputs, control_inputs, name)
    for source, target in zip(op.outputs, copy.outputs, strict=True):
        target.set_shape(source.shape)
        set_handle_data_like(source, target)
    return copy


def copy_into(
    graph: tf.Graph,
    op: tf.Operation,
    inputs: Sequence[tf.Tensor],
    control_inputs: Sequence[tf.Operation],
    attributes: Mapping[str, bytes] | None = None,
) -> tf.Operation:
    """Make a second operation like ``op`` in ``graph``, which may be another than its own; tapes see it."""
    marks = {_COPY_MARK: b"1", **(attributes or {})}
    values = {
        key: value
        for key, value in op.node_def.attr.items()
        if key not in ("_class", "_output_shapes") and key not in marks
    } | {key: attr_value_pb2.AttrValue(s=value) for key, value in marks.items()}
    with graph.as_default(), graph.control_dependencies(None), graph.control_dependencies(list(control_inputs)):
        copy = graph._create_op_internal(
            op.type,
            list(inputs),
            [output.dtype for output in op.outputs],
            attrs=values,
            name=f"{op.name}/recomputed",
            compute_device=False,
        )
    if op.device:
        copy._set_device(op.device)
    for source, target in zip(op.outputs, copy.outputs, strict=True):
        target.set_shape(source.shape)
    if _record.could_possibly_record():
        _record_on_tapes(copy, list(inputs))
    return copy


def _record_on_tapes(op: tf.Operation, inputs: list[tf.Tensor]) -> None:
    """Tell active tapes of an operation that was not made by TensorFlow's own wrappers."""
    if is_custom_gradient(op):
        gradient = _ops.get_gradient_function(op)

        def backward(*incoming: Any) -> list[Any]:
            gradients = gradient(op, *incoming)
            return list(gradients) if isinstance(gradients, list | tuple) else [gradients]

        _record.record_operation(op.type, list(op.outputs), inputs, backward)
        return
    attributes: list[Any] = []
    for attribute in op.op_def.attr:
        attributes += [attribute.name, op.get_attr(attribute.name)]
    tf.__internal__.record_gradient(op.type, inputs, tuple(attributes), list(op.outputs))


def gate(
    tensors: Sequence[tf.Tensor], gradient: str, attributes: Mapping[str, bytes] | None = None, name: str | None = None
) -> list[tf.Tensor]:
    """The same tensors through an ``IdentityN`` whose gradient is the registered function named ``gradient``."""
    graph = tf.compat.v1.get_default_graph()
    marks = {key: attr_value_pb2.AttrValue(s=value) for key, value in (attributes or {}).items()}
    with _record.stop_recording(), graph._attr_scope(marks), graph.gradient_override_map({"IdentityN": gradient}):
        passed: list[tf.Tensor] = tf.identity_n(list(tensors), name=name)
    if _record.could_possibly_record():
        _record_on_tapes(passed[0].op, list(tensors))
    return passed


@contextlib.contextmanager
def replaced_gradients(replacement: Callable[..., Any]) -> Iterator[None]:
    """Put ``replacement`` wherever TensorFlow looks ``tf.gradients`` up; inside of it TensorFlow's own is used.

    ``tf.compat.v1`` may be several modules: to import it by name, as tf_keras does, makes another one, and who looked
    it up before keeps the first.
    """
    plain = (_gradients_impl.gradients, _gradients_impl.gradients_v2)
    places = [
        (module, name)
        for module_name, module in list(sys.modules.items())
        if module_name.partition(".")[0] == "tensorflow"
        for name in ("gradients", "gradients_v2")
        if getattr(module, "__dict__", {}).get(name) in plain
    ]
    before = [getattr(owner, name) for owner, name in places]
    for owner, name in places:
        setattr(owner, name, replacement)
    try:
        yield
    finally:
        for (owner, name), function in zip(places, before, strict=True):
            setattr(owner, name, function)


def eager_gate(tensor: tf.Tensor, backward: Callable[[Any], list[Any]]) -> tf.Tensor:
    """The same tensor, its gradient passing through ``backward`` on every tape."""
    with _record.stop_recording():
        passed = tf.identity(tensor)
    set_handle_data_like(tensor, passed)
    _record.record_operation("RematGate", [passed], [tensor], backward)
    return passed


def watch_variables(function: Any) -> None:
    """Active tapes watch the trainable variables of a concrete function, as they do when it is called."""
    for variable in function.graph.variables:
        _resource_variable_ops.variable_accessed(variable)


def call_function(function: Any, arguments: Sequence[tf.Tensor], captured: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Call a concrete function that returns a list, with captured tensors of our choice."""
    results = function._call_flat(list(arguments), list(captured))
    return list(results)


def marked(tensor: tf.Tensor, mark: str = _COPY_MARK) -> tf.Tensor:
    """The same tensor through an operation that carries a mark."""
    graph = tf.compat.v1.get_default_graph()
    with graph._attr_scope({mark: attr_value_pb2.AttrValue(s=b"1")}):
        passed = tf.identity(tensor)
    set_handle_data_like(tensor, passed)
    return passed


def is_marked(tensor: tf.Tensor, mark: str) -> bool:
    """Was ``tensor`` made by ``marked``?"""
    return mark in tensor.op.node_def.attr


def converted_by_autograph(function: Callable[..., Any], always: bool = False) -> Callable[..., Any]:
    """``function`` as AutoGraph converts what is called where we are called.

    Args:
        function: the user's.
        always: convert it even where nothing is being converted, as ``tf.function`` does.
    """
    if hasattr(function, "get_concrete_function"):
        return function
    autograph = tf.__internal__.autograph
    if always:
        return autograph.tf_convert(function, _ENABLED, user_requested=True)  # type: ignore[no-any-return]
    return autograph.tf_convert(function, autograph.control_status_ctx())  # type: ignore[no-any-return]


def left_alone_by_autograph(function: _Function) -> _Function:
    """Mark ``function`` so that AutoGraph calls it as it is."""
    function.autograph_info__ = None  # type: ignore[attr-defined]
    return function


def is_tf_function(function: Any) -> bool:
    """Is it what ``tf.function`` returns?"""
    return isinstance(function, _polymorphic_function.Function)


def with_python_function(function: Any, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
    """Another ``tf.function`` with the options of ``function``, of what ``change`` makes of its Python function."""
    return function._clone(change(function.python_function))


class _EagerSeeds:
    """Stands for a graph's counter of random operations and draws the seed that eager mode would draw."""

    def __add__(self, _: int) -> _EagerSeeds:
        return self

    def __mod__(self, limit: int) -> int:
        return int(_context.internal_operation_seed()) % limit


def seed_as_in_eager_mode(graph: tf.Graph) -> None:
    """Random operations of ``graph`` get the seeds, one after the other, that they would get in eager mode."""
    graph.seed = _context.global_seed()
    _random_seed._graph_to_seed_dict[graph] = _EagerSeeds()


def tape_is_recording() -> bool:
    """Does any tape of this thread record now?"""
    return bool(_record.could_possibly_record())


def string_attribute(op: tf.Operation, name: str) -> str | None:
    """An attribute of ours on an operation."""
    return op.node_def.attr[name].s.decode() if name in op.node_def.attr else None


def update_input(op: tf.Operation, index: int, tensor: tf.Tensor) -> None:
    """Make ``op`` read ``tensor`` as its input number ``index``."""
    op._update_input(index, tensor)


def is_awaited(operation: tf.Operation) -> bool:
    """Does another operation wait for it without reading it?"""
    return bool(operation._control_outputs)


def add_control_inputs(op: tf.Operation, before: Sequence[tf.Operation]) -> None:
    """Make ``op`` run after all of ``before``."""
    op._add_control_inputs(list(before))


def run_iterations_one_by_one(loop: tf.Operation) -> None:
    """No iteration of a ``While`` operation begins before the one before it has ended."""
    loop._set_attr("parallel_iterations", attr_value_pb2.AttrValue(i=1))


def set_body(loop: tf.Operation, body: FuncGraph) -> None:
    """Make a ``While`` operation run another body of the same signature."""
    function = attr_value_pb2.NameAttrList(name=_control_flow_util_v2.create_new_tf_function(body))
    loop._set_attr("body", attr_value_pb2.AttrValue(func=function))


def accept_items_of(empty: tf.Operation, dtype: tf.DType) -> None:
    """Let an ``EmptyTensorList`` operation make a list of items of this type, of its rank and any shape."""
    with empty.graph.as_default(), empty.graph.control_dependencies(None), _record.stop_recording():
        any_shape = tf.fill(empty.inputs[0].shape, tf.constant(-1, empty.inputs[0].dtype))
    empty._update_input(0, any_shape)
    empty._set_attr("element_dtype", attr_value_pb2.AttrValue(type=dtype.as_datatype_enum))


def push(items: tf.Tensor, item: tf.Tensor, more_axes: int) -> tf.Tensor:
    """The list with one more item, to which axes of length 1 are added first, in the function of the list."""
    with items.graph.as_default(), items.graph.control_dependencies(None), _record.stop_recording():
        for _ in range(more_axes):
            item = tf.expand_dims(item, 0)
        return tf.raw_ops.TensorListPushBack(input_handle=items, tensor=item)


def pop(items: tf.Tensor, like: tf.Tensor, more_axes: int) -> tuple[tf.Tensor, tf.Tensor]:
    """The list with one item less, and that item without the axes that were added, in the function of the list."""
    with items.graph.as_default(), items.graph.control_dependencies(None), _record.stop_recording():
        left, item = tf.raw_ops.TensorListPopBack(
            input_handle=items, element_shape=tf.constant(-1, tf.int32), element_dtype=like.dtype
        )
        if more_axes:
            item = tf.squeeze(item, list(range(more_axes)))
        item.set_shape(like.shape)
        return left, item


def slice_of_operation(
    graph: tf.Graph, op: tf.Operation, inputs: Sequence[tf.Tensor], control_inputs: Sequence[tf.Operation], name: str
) -> tf.Operation:
    """Make an operation like ``op`` in ``graph``, of inputs that may have other shapes."""
    # A mark of its own keeps common-subexpression elimination from folding the copy back into the original.
    attributes = {_COPY_MARK: attr_value_pb2.AttrValue(s=name.encode())} | {
        key: value for key, value in op.node_def.attr.items() if key not in ("_class", "_output_shapes")
    }
    with graph.control_dependencies(None), graph.control_dependencies(list(control_inputs)):
        copy = graph._create_op_internal(
            op.type,
            list(inputs),
            [output.dtype for output in op.outputs],
            attrs=attributes,
            name=name,
            compute_device=False,
        )
    if op.device:
        copy._set_device(op.device)
    return copy


def known_value(tensor: tf.Tensor) -> Any:
    """The value of a tensor as an array, where it follows from constants and from shapes; else None."""
    if tensor.op.type == "Const":
        return tf.get_static_value(tensor)
    return _pywrap_tf_session.TF_TryEvaluateConstant_wrapper(tensor.graph._c_graph, tensor._as_tf_output())


def wait_for_nothing(op: tf.Operation) -> None:
    """Take the control inputs of an operation away."""
    op._remove_all_control_inputs()


def copied_operation(graph: FuncGraph, op: tf.Operation, inputs: Sequence[tf.Tensor]) -> tf.Operation:
    """Make an operation like ``op``, of another function, in ``graph``; tapes do not see it."""
    with _record.stop_recording():
        return copy_into(graph, op, inputs, [])


def copied_function(function: FuncGraph, outside: tf.Graph) -> tuple[FuncGraph, Callable[[str], tf.Tensor]]:
    """A copy of a function, to be called in ``outside``, and its tensors by the names that they have in the original.

    What the original captured are inputs of the copy like others.
    """
    definition = _definition_without_inputs(function)
    read = {name.partition(":")[0].removeprefix("^") for node in definition.node for name in node.input}
    with outside.as_default():
        copy = FuncGraph(f"{function.name}_remat_{next(_numbers_of_copies)}")
    inputs: dict[str, tf.Tensor] = {}
    with copy.as_default(), _record.stop_recording():
        for number, tensor in enumerate(function.inputs):
            # A name of its own: one that begins as that of another operation would rename that one.
            inputs[tensor.name] = tf.compat.v1.placeholder(tensor.dtype, tensor.shape, name=f"remat_given_{number}")
            if tensor.dtype == tf.resource:
                set_handle_data_like(tensor, inputs[tensor.name])
        used = {name: value for name, value in inputs.items() if name.partition(":")[0] in read}
        tf.graph_util.import_graph_def(definition, input_map=used, name="")

    def named(name: str) -> tf.Tensor:
        return inputs[name] if name in inputs else copy.get_tensor_by_name(name)

    for op in function.get_operations():
        for tensor in op.outputs:
            # TensorFlow forgets the shapes of what is read from lists.
            named(tensor.name).set_shape(tensor.shape)
    copy.inputs = list(inputs.values())
    copy.outputs = [named(t.name) for t in function.outputs]
    return copy, named


def _definition_without_inputs(function: FuncGraph) -> Any:
    """A function's operations, to be imported where others stand for its inputs."""
    definition = function.as_graph_def()
    given = {t.op.name for t in function.inputs}
    nodes = [node for node in definition.node if node.name not in given]
    del definition.node[:]
    definition.node.extend(nodes)
    drop_places_outside(definition)
    return definition


_COLOCATED: Final = "_class"
_WITH: Final = b"loc:@"


def drop_places_outside(definition: Any) -> None:
    """Have no operation of a function share the device of one outside, which a copy could not be imported with.

    ``tf.gradients`` asks for that in the backward body of a loop.
    """
    here = {_WITH + node.name.encode() for node in definition.node}
    for node in definition.node:
        if _COLOCATED in node.attr:
            places = node.attr[_COLOCATED].list.s
            kept = [place for place in places if not place.startswith(_WITH) or place in here]
            del places[:]
            places.extend(kept)


_numbers_of_copies = itertools.count()


def copy_to_change(function: FuncGraph) -> tuple[FuncGraph, Callable[[str], tf.Tensor]]:
    """As ``copied_function``, in the place of the original, with what that has captured."""
    copy, named = copied_function(function, function.outer_graph)
    for outside, inside in function.captures:
        copy.replace_capture(outside, named(inside.name))
    return copy, named


def after_all(ops: Sequence[tf.Operation]) -> tf.Operation:
    """An operation that does nothing, after all of ``ops``, on the device of the last."""
    graph = ops[-1].graph
    with graph.as_default(), graph.control_dependencies(None), graph.control_dependencies(list(ops)):
        barrier: tf.Operation = tf.no_op(name="barrier")
    if ops[-1].device:
        barrier._set_device(ops[-1].device)
    return barrier


@contextlib.contextmanager
def building_freely(graph: tf.Graph) -> Iterator[None]:
    """Build operations in ``graph`` with no control inputs."""
    with graph.as_default(), graph.control_dependencies(None):
        yield


def awaiting(tensor: tf.Tensor, before: Sequence[tf.Operation]) -> tf.Tensor:
    """``tensor`` itself, in the same buffer, for readers that are to run after all of ``before``.

    The graph optimizer takes an ``Identity`` out, and hands its control inputs to one of its readers. It leaves this
    operation alone, and does not know what makes its input.
    """
    op = tensor.op
    with op.graph.control_dependencies(None), op.graph.control_dependencies(list(before)):
        late = tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=tensor.shape, name=f"{op.name}/awaiting")
    if op.device:
        late.op._set_device(op.device)
    return late


def computed(tensor: tf.Tensor) -> tf.Tensor:
    """A copy of a constant that is made at each run: the graph optimizer makes no larger constants of it.

    A ``PlaceholderWithDefault`` does not do: TensorFlow's second optimizer, which runs after grappler, sees through it.
    """
    op = tensor.op
    with op.graph.control_dependencies(None):
        return tf.raw_ops.DeepCopy(x=tensor, name=f"{op.name}/computed")


def in_xla_context(graph: tf.Graph) -> bool:
    """Is ``graph`` traced for ``tf.function(jit_compile=True)``?"""
    return bool(_control_flow_util.GraphOrParentsInXlaContext(graph))


def set_handle_data_like(source: tf.Tensor, target: tf.Tensor) -> None:
    """Copy what a resource or variant tensor is known to hold."""
    if source.dtype in (tf.resource, tf.variant):
        _handle_data_util.copy_handle_data(source, target)


def handle_shapes(tensor: tf.Tensor) -> list[tuple[tf.TensorShape, tf.DType]]:
    """The shapes and types that a resource handle is known to hold; empty where nothing is known."""
    data: Any = _handle_data_util.get_resource_handle_data(tensor)
    if not data.is_set:
        return []
    return [(tf.TensorShape(part.shape), tf.dtypes.as_dtype(part.dtype)) for part in data.shape_and_type]


def memory_limit_bytes(device_name: str) -> int:
    """Bytes that TensorFlow may allocate on a device of this process."""
    from tensorflow.python.client import device_lib

    kind, number = device_name.split(":")
    wanted = f"/device:{kind}:{number}"
    return next(int(d.memory_limit) for d in device_lib.list_local_devices() if d.name == wanted)


def is_custom_gradient(op: tf.Operation) -> bool:
    """Does ``op`` carry a gradient of its own, as the IdentityN of ``tf.custom_gradient`` does?"""
    return "_gradient_op_type" in op.node_def.attr


def is_gate_of_tensorflow(op: tf.Operation) -> bool:
    """Is that gradient one that ``tf.custom_gradient`` has named, and not one of ours?"""
    return bool(op.node_def.attr["_gradient_op_type"].s.startswith(b"CustomGradient-"))


def compiled_program(
    func_graph: FuncGraph,
    input_shapes: Mapping[str, Sequence[int]],
    change: Callable[[Callable[[str], tf.Tensor]], None],
    carried: Collection[str] = (),
    handed: Mapping[str, tf.Tensor] = MappingProxyType({}),
) -> CompiledProgram:
    """What XLA compiles ``func_graph`` to.

    Args:
        func_graph: the function; it stays as it is.
        input_shapes: real shapes of inputs traced with unknown dimensions, by tensor name.
        change: called on a copy of the function before it is compiled, with a look-up of its tensors by the names that
            they have in ``func_graph``.
        carried: where the function is the body of a loop, the names of the inputs that it does not capture. They stand
            before all others and in the order of its outputs. The program is then a loop of two iterations.
        handed: what a caller hands over for inputs, by their names: handles, whose variables the program needs.
    """
    definition = _definition_without_inputs(func_graph)
    read = {name.partition(":")[0] for node in definition.node for name in node.input}
    shapes = {t.name: tuple(input_shapes.get(t.name, t.shape)) for t in func_graph.inputs if t.dtype != tf.resource}
    resolved = {name: _outermost(outer) for name, outer in handed.items()}
    resolved |= {inner.name: _outermost(outer) for outer, inner in func_graph.captures}
    captured = {name: outer for name, outer in resolved.items() if outer is not None}
    given = [t for t in func_graph.inputs if t.name not in captured and t.name not in carried]
    handed_on = [t for t in func_graph.inputs if t.name in carried]
    outputs = list(func_graph.outputs)
    if handed_on:
        # The body of a finished loop also returns what it captured, unchanged; one that is being traced does not yet.
        outputs = [after for before, after in zip(func_graph.inputs, outputs, strict=False) if before.name in carried]

    def copied(replaced: Mapping[str, tf.Tensor]) -> list[tf.Tensor]:
        graph = tf.compat.v1.get_default_graph()

        def tensor_named(name: str) -> tf.Tensor:
            return replaced[name] if name in replaced else graph.get_tensor_by_name(name)

        used = {name: value for name, value in replaced.items() if name.partition(":")[0] in read}
        tf.graph_util.import_graph_def(definition, input_map=used, name="")
        change(tensor_named)
        return [tensor_named(t.name) for t in outputs]

    def program(*values: tf.Tensor) -> list[tf.Tensor]:
        outside = dict(zip((t.name for t in given), values, strict=True)) | captured

        def body(*carried_values: tf.Tensor) -> list[tf.Tensor]:
            graph = tf.compat.v1.get_default_graph()
            inside = {name: graph.capture(value) for name, value in outside.items()}
            return copied(inside | dict(zip((t.name for t in handed_on), carried_values, strict=True)))

        if not handed_on:
            return body()
        initial = [tf.zeros(shapes[t.name], t.dtype) for t in handed_on]
        _, *last = tf.while_loop(
            lambda number, *_: number < 2, lambda number, *rest: (number + 1, *body(*rest)), [tf.constant(0), *initial]
        )
        return list(last)

    specs = [tf.TensorSpec(shapes[t.name], t.dtype) for t in given]
    with tf.init_scope():
        compiled = tf.function(program, jit_compile=True, autograph=False)
        serialized: bytes = compiled.experimental_get_compiler_ir(*specs)(stage="optimized_hlo_proto_serialized")
    return CompiledProgram.FromString(serialized)


def _outermost(tensor: Any) -> Any:
    """What a captured tensor is outside all functions; None where some function made it."""
    while tensor is not None and tf.is_symbolic_tensor(tensor):
        outside = {inner.name: outer for outer, inner in getattr(tensor.graph, "captures", ())}
        tensor = outside.get(tensor.name)
    return tensor


def function_of(op: tf.Operation, attribute: str) -> FuncGraph:
    """The function that an attribute of ``op`` names, such as the body of a loop.

    TensorFlow's older functions, of which it still makes some itself (CTC's loss), keep no graph: one is made of what
    they are defined by.
    """
    function = op.graph._get_function(op.get_attr(attribute).name)
    if hasattr(function, "graph"):
        return function.graph
    return _function_def_to_graph.function_def_to_graph(function.definition)


def asks_for_xla(call: tf.Operation) -> bool:
    """Is the function that an operation calls compiled by XLA, whatever the function does that the call stands in?"""
    name = "_XlaMustCompile"
    return name in call.node_def.attr and bool(call.node_def.attr[name].b)
