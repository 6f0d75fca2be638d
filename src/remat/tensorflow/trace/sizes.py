"""Sizes of a traced function's tensors for the batch that will really run, those in the lists of its loops included.

Inside ``fit`` the batch dimension of a trace is None. The sizes are found by TensorFlow's own shape inference, on a
copy of the function whose inputs have their real shapes; the function itself stays dynamic.

A loop is one op of the graph and is never repeated. Its lists (what the forward loop keeps for the backward loop,
tensor arrays) stand behind ``variant`` handles that have no size of their own: it follows from the loop's body.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence

import tensorflow as tf

from remat.core.errors import UnsupportedStep
from remat.tensorflow import _private

HANDLES = frozenset({tf.resource, tf.variant, tf.string})
"""Types whose tensors stand for something that lies elsewhere."""


class Sizes:
    """Shapes and bytes of the tensors of one function.

    Args:
        graph: the traced function.
        known_shapes: real shapes of inputs whose traced shape is not fully known, by tensor name; also of further
            tensors whose shape TensorFlow does not find.

    Raises:
        UnsupportedStep: where an input's shape stays unknown.
    """

    def __init__(self, graph: _private.FuncGraph, known_shapes: Mapping[str, Sequence[int]]) -> None:
        self._known = {name: tuple(shape) for name, shape in known_shapes.items()}
        self._resolved: tf.Graph | None = None
        unknown = [t for t in graph.inputs if t.dtype not in HANDLES and not t.shape.is_fully_defined()]
        missing = [t for t in unknown if t.name not in known_shapes]
        if missing:
            listed = ", ".join(f"{t.op.name} {t.shape}" for t in missing[:3])
            raise UnsupportedStep(
                f"the shape of {listed} is not known while the function is traced, so no number of bytes can be "
                "promised; give batch_size=, or call the function with arguments of a fixed shape"
            )
        if unknown:
            self._resolved = _with_known_shapes(graph, known_shapes)

    def shape(self, tensor: tf.Tensor) -> tuple[int, ...] | None:
        """The tensor's shape, or None where it depends on values (``tf.boolean_mask``)."""
        shape = tensor.shape
        if not shape.is_fully_defined() and tensor.name in self._known:
            return self._known[tensor.name]
        if not shape.is_fully_defined() and self._resolved is not None:
            shape = self._resolved.get_tensor_by_name(tensor.name).shape
        return tuple(shape) if shape.is_fully_defined() else None

    def bytes(self, tensor: tf.Tensor) -> int | None:
        """The tensor's bytes, None where its shape depends on values; 0 for handles."""
        if tensor.dtype in (tf.resource, tf.variant):
            return 0
        shape = self.shape(tensor)
        return None if shape is None else shape_bytes(shape, tensor.dtype)


def shape_bytes(shape: Sequence[int], dtype: tf.DType) -> int:
    """Bytes of a dense tensor; strings count their 24-byte headers only."""
    count = 1
    for dimension in shape:
        count *= int(dimension)
    return count * (24 if dtype == tf.string else dtype.base_dtype.size)


def handle_bytes(handle: tf.Tensor) -> int:
    """Bytes of the variable behind a resource handle, 0 where it is unknown (a table, an iterator)."""
    return sum(shape_bytes(shape, dtype) for shape, dtype in _private.handle_shapes(handle) if shape.is_fully_defined())


def _with_known_shapes(graph: _private.FuncGraph, known_shapes: Mapping[str, Sequence[int]]) -> tf.Graph:
    definition = graph.as_graph_def()
    for node in definition.node:
        node.attr.pop("_output_shapes", None)
        if node.op in ("StatelessWhile", "While"):
            # Recorded while the batch dimension was unknown. Without them a loop's results have its inputs' shapes.
            node.attr.pop("output_shapes", None)
    replaced_tensors = {t.name: t for t in graph.inputs}
    replaced_tensors |= {name: graph.get_tensor_by_name(name) for name in known_shapes}
    resolved = tf.Graph()
    with resolved.as_default():
        replaced = {}
        for number, (name, tensor) in enumerate(replaced_tensors.items()):
            shape = known_shapes.get(name, tensor.shape)
            placeholder = tf.raw_ops.Placeholder(dtype=tensor.dtype, shape=shape, name=f"remat_known_{number}")
            _private.set_handle_data_like(tensor, placeholder)
            replaced[name] = placeholder
        tf.graph_util.import_graph_def(definition, input_map=replaced, name="")
    return resolved


def batch_sizes(graph: _private.FuncGraph, batch_size: int | None) -> dict[str, tuple[int, ...]]:
    """``known_shapes`` for inputs whose unknown dimensions are all the batch's; empty without a batch size."""
    if batch_size is None:
        return {}
    return {
        t.name: tuple(batch_size if dimension is None else dimension for dimension in t.shape)
        for t in graph.inputs
        if t.shape.rank is not None and not t.shape.is_fully_defined()
    }


LOOPS = frozenset({"StatelessWhile", "While"})
_PASSED_ON = frozenset({"Identity", "TensorListPopBack", "TensorListResize"})
_APPENDS = {"TensorListPushBack": 1, "TensorListSetItem": 2}  # The number of the input that is appended.
_READS = {"TensorListGetItem": 0, "TensorListPopBack": 1}  # The number of the output that is the item.


def sizes_with_loops(func_graph: _private.FuncGraph, input_shapes: Mapping[str, Sequence[int]]) -> Sizes:
    """The sizes of a function's tensors, those that come out of its loops' lists included.

    TensorFlow forgets the shape of a list's items where the list leaves a loop.

    Args:
        func_graph: the traced function.
        input_shapes: real shapes of inputs traced with unknown dimensions, by tensor name.

    Raises:
        UnsupportedStep: where an input's shape stays unknown.
    """
    known = dict(input_shapes)
    sizes = Sizes(func_graph, known)
    stacked = [op.outputs[0] for op in func_graph.get_operations() if op.type == "TensorListStack"]
    while found := {t.name: shape for t in stacked if (shape := _stacked_shape(t, sizes)) is not None}:
        known |= found
        sizes = Sizes(func_graph, known)
    return sizes


def _stacked_shape(stacked: tf.Tensor, sizes: Sizes) -> tuple[int, ...] | None:
    """The shape of a stacked list that a loop has filled; None where it is known already, or cannot be known yet."""
    filled = stacked.op.inputs[0]
    if sizes.shape(stacked) is not None or filled.op.type not in LOOPS:
        return None
    if any(sizes.bytes(t) is None for t in filled.op.inputs):
        return None  # It reads what comes out of another loop, whose turn is first.
    loop = Loop(filled.op, sizes)
    item = loop.item_shape(filled.value_index)
    return None if item is None else (loop.iterations(), *item)


class Loop:
    """One ``While`` operation.

    Args:
        op: the operation.
        outside: sizes of the tensors of the function that the loop stands in.

    Attributes:
        sizes: sizes of the tensors of the loop's body.
    """

    def __init__(self, op: tf.Operation, outside: Sizes) -> None:
        self.op = op
        self.body = _private.function_of(op, "body")
        self._outside = outside
        self._owners: dict[str, int] = {}
        given = zip(self.body.inputs, op.inputs, strict=True)
        known = {inner.name: shape for inner, outer in given if (shape := outside.shape(outer)) is not None}
        self.sizes = Sizes(self.body, known)
        if items := self._shapes_of_items_read():
            self.sizes = Sizes(self.body, known | items)

    def _shapes_of_items_read(self) -> dict[str, tuple[int, ...]]:
        """Shapes that TensorFlow does not find, of what the body reads from lists that come into the loop."""
        found = {}
        loops: dict[tf.Operation, Loop] = {}
        for op in self.body.get_operations():
            if op.type in _READS and self.sizes.shape(item := op.outputs[_READS[op.type]]) is None:
                number = self._input_behind(op.inputs[0])
                shape = None if number is None else self._shape_of_items(self.op.inputs[number], loops)
                if shape is not None:
                    found[item.name] = shape
        return found

    def _shape_of_items(self, items: tf.Tensor, loops: dict[tf.Operation, Loop]) -> tuple[int, ...] | None:
        """The shape of one item of a list outside the loop."""
        while items.op.type in _PASSED_ON:
            items = items.op.inputs[0]
        if items.op.type == "TensorListFromTensor":
            shape = self._outside.shape(items.op.inputs[0])
            return None if shape is None else shape[1:]
        if items.op.type not in LOOPS:
            return None
        if items.op not in loops:
            loops[items.op] = Loop(items.op, self._outside)
        return loops[items.op].item_shape(items.value_index)

    def item_shape(self, number: int) -> tuple[int, ...] | None:
        """The shape of what one iteration adds to the list behind an output."""
        items = self._appended(number)
        return self.sizes.shape(items[0]) if items else None

    def _bytes_in_body(self, tensor: tf.Tensor) -> int:
        return self.sizes.bytes(tensor) or 0

    def list_source(self, number: int) -> int | None:
        """Number of the input whose list the output hands on; None where the output is no list.

        What is read from one list and kept in another is one block: the output then hands on the list that was read.
        """
        tensor = self.body.outputs[number]
        if tensor.dtype != tf.variant:
            return None
        read_from = [self._list_read(item) for item in self._appended(number)]
        if read_from and None not in read_from:
            return read_from[0]
        return self._input_behind(tensor)

    def _input_behind(self, tensor: tf.Tensor) -> int | None:
        while tensor.op.type in _PASSED_ON | _APPENDS.keys():
            tensor = tensor.op.inputs[0]
        return next((n for n, given in enumerate(self.body.inputs) if given is tensor), None)

    def _list_read(self, item: tf.Tensor) -> int | None:
        """Number of the input list that an item was read from, None for a value made in the body."""
        while item.op.type == "Identity":
            item = item.op.inputs[0]
        return self._input_behind(item.op.inputs[0]) if item.op.type == "TensorListGetItem" else None

    def grown_bytes(self, number: int) -> int:
        """Bytes that the loop adds to the list behind an output; a value kept in two lists counts in the first."""
        added = [item for item in self._items(number) if self._owner(item) == number and self._list_read(item) is None]
        bytes_ = sum(self._bytes_in_body(item) for item in added if not self._is_shared(item))
        return bytes_ * self.iterations() if bytes_ else 0

    def _items(self, number: int) -> list[tf.Tensor]:
        """The values that one iteration adds to the list behind an output."""
        return [] if self._only_sets(number) else [self._value_kept(item) for item in self._appended(number)]

    def _appended(self, number: int) -> list[tf.Tensor]:
        tensor = self.body.outputs[number]
        items = []
        while tensor.dtype == tf.variant and tensor.op.type in _PASSED_ON | _APPENDS.keys():
            if tensor.op.type in _APPENDS:
                items.append(tensor.op.inputs[_APPENDS[tensor.op.type]])
            tensor = tensor.op.inputs[0]
        return items

    def _only_sets(self, number: int) -> bool:
        """Did the list come into the loop with all its items, so that setting one replaces another?"""
        tensor = self.body.outputs[number]
        source = self._input_behind(tensor)
        while tensor.op.type == "Identity":
            tensor = tensor.op.inputs[0]
        sets = tensor.op.type == "TensorListSetItem"
        return sets and source is not None and self.op.inputs[source].op.type != "TensorListReserve"

    def _value_kept(self, item: tf.Tensor) -> tf.Tensor:
        """The value behind an item: what came in from the iteration before is what that iteration handed out."""
        for _ in range(2):
            while item.op.type == "Identity":
                item = item.op.inputs[0]
            number = next((n for n, given in enumerate(self.body.inputs) if given is item), None)
            if number is not None:
                item = self.body.outputs[number]
        return item

    def _owner(self, item: tf.Tensor) -> int:
        if not self._owners:
            # What is kept for the backward loop outlives the forward loop's own arrays.
            lists = sorted(
                range(len(self.body.outputs)), key=lambda n: self.body.outputs[n].op.type != "TensorListPushBack"
            )
            for number in lists:
                for kept in self._items(number):
                    self._owners.setdefault(kept.name, number)
        return self._owners[item.name]

    def iterations(self) -> int:
        """How often the loop runs, at most; 1 with a warning where the trace does not tell."""
        condition = _private.function_of(self.op, "cond")
        found = [
            count for op in condition.get_operations() if (count := self._iterations_by(op, condition)) is not None
        ]
        if found:
            return min(found)
        warnings.warn(
            f"the number of iterations of the loop {self.op.name!r} is not known while it is traced, so what it keeps "
            "for the backward pass is counted for one iteration only; give tf.while_loop maximum_iterations",
            stacklevel=2,
        )
        return 1

    def _is_shared(self, item: tf.Tensor) -> bool:
        # What the loop only reads (a variable, an outer tensor) is kept by handle, once.
        while item.op.type in ("Identity", "ReadVariableOp"):
            item = item.op.inputs[0]
        if item.op.type != "Placeholder":
            return bool(item.op.type == "Const")
        number = next((n for n, given in enumerate(self.body.inputs) if given is item), None)
        return number is not None and self.body.outputs[number] is item

    def _iterations_by(self, op: tf.Operation, condition: _private.FuncGraph) -> int | None:
        if op.type != "Less":
            return None
        counter = next((n for n, given in enumerate(condition.inputs) if given is op.inputs[0]), None)
        limit = self._value(op.inputs[1], condition)
        if counter is None or limit is None:
            return None
        start = tf.get_static_value(self.op.inputs[counter])
        step = self._step(counter)
        if start is None or step is None or step <= 0:
            return None
        return max(0, math.ceil((float(limit) - float(start)) / step))

    def _value(self, tensor: tf.Tensor, condition: _private.FuncGraph) -> float | None:
        for number, given in enumerate(condition.inputs):
            if given is tensor:
                tensor = self.op.inputs[number]
        if tensor.op.type in LOOPS and tensor.value_index == 0:
            forward = Loop(tensor.op, self._outside)  # A backward loop counts its forward loop.
            return float(forward.iterations())
        value = tf.get_static_value(tensor)
        return None if value is None else float(value)

    def _step(self, counter: int) -> float | None:
        tensor = self.body.outputs[counter]
        while tensor.op.type == "Identity":
            tensor = tensor.op.inputs[0]
        if tensor.op.type not in ("Add", "AddV2"):
            return None
        known = [tf.get_static_value(t) for t in tensor.op.inputs if t is not self.body.inputs[counter]]
        return float(known[0]) if len(known) == 1 and known[0] is not None else None
