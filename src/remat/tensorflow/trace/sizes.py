"""Sizes of a traced function's tensors for the batch that will really run.

Inside ``fit`` the batch dimension of a trace is None. The sizes are found by TensorFlow's own shape
inference, on a copy of the function whose inputs have their real shapes; the function itself stays dynamic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tensorflow as tf

from remat.core.errors import UnsupportedStep
from remat.tensorflow import _private


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
        unknown = [t for t in graph.inputs if t.dtype not in _OPAQUE and not t.shape.is_fully_defined()]
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


_OPAQUE = frozenset({tf.resource, tf.variant, tf.string})


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
