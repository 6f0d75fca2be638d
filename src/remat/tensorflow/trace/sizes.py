"""Sizes of a traced function's tensors for the batch that will really run, those in the lists of its loops included.

Inside ``fit`` the batch dimension of a trace is None. The sizes are found by TensorFlow's own shape inference, on a
copy of the function whose inputs have their real shapes; the function itself stays dynamic.

A loop is one op of the graph and is never repeated. Its lists (what the forward loop keeps for the backward loop,
tensor arrays) stand behind ``variant`` handles that have no size of their own: it follows from the loop's body.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

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

    def value(self, tensor: tf.Tensor) -> Any:
        """The tensor's value as an array, where it follows from constants and shapes; else None."""
        if self._resolved is not None:
            tensor = self._resolved.get_tensor_by_name(tensor.name)
        return _private.known_value(tensor)

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
    _private.drop_places_outside(definition)
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
READS = {"TensorListGetItem": 0, "TensorListPopBack": 1}
"""Kinds of operations that read an item of a list, and which of their outputs is the item."""

LIST_OPERATIONS = frozenset({"EmptyTensorList", "TensorListReserve", "TensorListResize", *_APPENDS, *READS})
"""Kinds of operations on lists that copy no item."""


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
        bodies: those that loops of that function would get, where they are not to keep their own.

    Attributes:
        sizes: sizes of the tensors of the loop's body.
    """

    def __init__(
        self, op: tf.Operation, outside: Sizes, bodies: Mapping[tf.Operation, _private.FuncGraph] | None = None
    ) -> None:
        self.op = op
        self._bodies = bodies or {}
        self.body = self._bodies[op] if op in self._bodies else _private.function_of(op, "body")
        self._outside = outside
        self._owners: dict[str, int] = {}
        self._loops: dict[tf.Operation, Loop] = {}
        given = zip(self.body.inputs, op.inputs, strict=True)
        known = {inner.name: shape for inner, outer in given if (shape := outside.shape(outer)) is not None}
        self.sizes = Sizes(self.body, known)
        if items := self._shapes_of_items_read():
            self.sizes = Sizes(self.body, known | items)

    def _shapes_of_items_read(self) -> dict[str, tuple[int, ...]]:
        """Shapes that TensorFlow does not find, of what the body reads from lists that come into the loop."""
        found = {}
        for op in self.body.get_operations():
            if op.type in READS and self.sizes.shape(item := op.outputs[READS[op.type]]) is None:
                number = self._input_behind(op.inputs[0])
                shape = None if number is None else self._shape_of_items(self.op.inputs[number])
                if shape is not None:
                    found[item.name] = shape
        return found

    def _shape_of_items(self, items: tf.Tensor) -> tuple[int, ...] | None:
        """The shape of one item of a list outside the loop."""
        while items.op.type in _PASSED_ON:
            items = items.op.inputs[0]
        if items.op.type == "TensorListFromTensor":
            shape = self._outside.shape(items.op.inputs[0])
            return None if shape is None else shape[1:]
        if items.op.type not in LOOPS:
            return None
        return self._beside(items.op).item_shape(items.value_index)

    def item_shape(self, number: int) -> tuple[int, ...] | None:
        """The shape of what one iteration adds to the list behind an output."""
        items = self.appended(number)
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
        read_from = [self._list_read(item) for item in self.appended(number)]
        if read_from and None not in read_from:
            return read_from[0]
        return self._input_behind(tensor)

    def _input_behind(self, tensor: tf.Tensor) -> int | None:
        while tensor.op.type in _PASSED_ON | _APPENDS.keys():
            tensor = tensor.op.inputs[0]
        return next((n for n, given in enumerate(self.body.inputs) if given is tensor), None)

    def _list_read(self, item: tf.Tensor) -> int | None:
        """Number of the input list that an item was read from, None for a value made in the body."""
        item = self._behind_identities(item)
        return self._input_behind(item.op.inputs[0]) if item.op.type == "TensorListGetItem" else None

    @functools.cached_property
    def carried(self) -> frozenset[str]:
        """Names of the inputs of the body that the iteration before makes anew; no lists among them."""
        return frozenset(
            given.name
            for number, given in enumerate(self.body.inputs)
            if given.dtype not in HANDLES and not self.hands_through(number)
        )

    def hands_through(self, number: int) -> bool:
        """Does each iteration hand on, as output of that number, what it was given?"""
        return self._behind_identities(self.body.outputs[number]) is self.body.inputs[number]

    def items_added(self, number: int) -> int:
        """How many blocks the loop adds to the list behind an output, if any."""
        kept = [self._behind_identities(item) for item in self.appended(number)]
        first = [n for n, given in enumerate(self.body.inputs) if any(given is item for item in kept)]
        # The first item is then what the caller gave the loop, which lies there anyway.
        given = any(self.op.inputs[n].op.type in ("Const", "Placeholder") for n in first)
        return self.iterations() - given

    def grown_bytes(self, number: int) -> int:
        """Bytes that the loop adds to the list behind an output; a value kept in two lists counts in the first."""
        added = self.added_bytes(number)
        return added * self.items_added(number) if added else 0

    def added_bytes(self, number: int) -> int:
        """As ``grown_bytes``, in one iteration."""
        return sum(self.bytes_if_kept(item) for item in self._items(number) if self._owner(item) == number)

    def bytes_if_kept(self, tensor: tf.Tensor) -> int:
        """Bytes that a tensor of the body takes in a list; none for what lies elsewhere anyway."""
        return 0 if self._is_shared(tensor) or self._list_read(tensor) is not None else self._bytes_in_body(tensor)

    def given_back_bytes(self, number: int) -> int:
        """Bytes that one iteration frees of the list behind an input, where it takes items out of it."""
        return sum(self._popped_bytes(op) for op in self._reads if self._input_behind(op.inputs[0]) == number)

    def items_read(self) -> dict[str, int]:
        """What an iteration reads from the lists that it is given: bytes that no list holds once it was read, by name.

        An item that stays in its list has none, nor has what the forward loop keeps anyway.
        """
        found = {}
        for op in self._reads:
            number = self._input_behind(op.inputs[0])
            if number is None:
                continue
            item = op.outputs[READS[op.type]]
            if op.type == "TensorListPopBack":
                found[item.name] = self._popped_bytes(op)
            else:
                found[item.name] = self._bytes_in_body(item) if self._only_sets(number) else 0
        return found

    @functools.cached_property
    def _reads(self) -> list[tf.Operation]:
        return [op for op in self.body.get_operations() if op.type in READS]

    def _popped_bytes(self, op: tf.Operation) -> int:
        number = self._input_behind(op.inputs[0])
        if op.type != "TensorListPopBack" or number is None:
            return 0
        filled = self._behind_identities(self.op.inputs[number])
        if filled.op.type in LOOPS:
            return self._beside(filled.op).added_bytes(filled.value_index)
        return self._bytes_in_body(op.outputs[READS[op.type]])

    def _beside(self, op: tf.Operation) -> Loop:
        """Another loop of the same function."""
        if op not in self._loops:
            self._loops[op] = Loop(op, self._outside, self._bodies)
        return self._loops[op]

    @staticmethod
    def _behind_identities(tensor: tf.Tensor) -> tf.Tensor:
        while tensor.op.type == "Identity":
            tensor = tensor.op.inputs[0]
        return tensor

    def _items(self, number: int) -> list[tf.Tensor]:
        """The values that one iteration adds to the list behind an output."""
        return [] if self._only_sets(number) else [self._value_kept(item) for item in self.appended(number)]

    def appended(self, number: int) -> list[tf.Tensor]:
        """The tensors of the body that one iteration puts into the list behind an output, as they are put there."""
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
        if self.known_iterations is None:
            warnings.warn(f"{self.assumed}; give tf.while_loop maximum_iterations", stacklevel=2)
            return 1
        return self.known_iterations

    @functools.cached_property
    def known_iterations(self) -> int | None:
        """How often the loop runs, at most; None where the trace does not tell."""
        condition = _private.function_of(self.op, "cond")
        found = (self._iterations_by(op, condition) for op in condition.get_operations())
        return min((count for count in found if count is not None), default=None)

    @property
    def assumed(self) -> str:
        """What is assumed where the number of iterations is not known."""
        return (
            f"the number of iterations of the loop {self.op.name!r} is not known while it is traced, so what it keeps "
            "for the backward pass is counted for one iteration only"
        )

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
            forward = self._beside(tensor.op)  # A backward loop counts its forward loop.
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
