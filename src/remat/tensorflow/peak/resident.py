"""Device memory in use that a function does not know of: other models, data sets, optimizer slots of others."""

from __future__ import annotations

import gc
from collections.abc import Collection, Mapping, Sequence

import tensorflow as tf

from remat.tensorflow import _private
from remat.tensorflow.peak.device import current_device
from remat.tensorflow.trace.sizes import Sizes, handle_bytes, shape_bytes

_HANDLES = (tf.resource, tf.variant, tf.string)


def resident_elsewhere_bytes(
    graph: _private.FuncGraph, input_shapes: Mapping[str, Sequence[int]], carried: Collection[str] = ()
) -> int:
    """Bytes in use on the device now that are no input of ``graph``, by the device's own counter.

    Args:
        graph: the function.
        input_shapes: real shapes of inputs traced with unknown dimensions, by tensor name.
        carried: names of inputs that do not exist yet while the function is traced; see ``carried_inputs``.
    """
    # What a trace that failed left behind, such as one whose budget was refused, sits in cycles.
    gc.collect()
    device = current_device()
    counted = device.allocator.counted
    known = 0
    for tensor in graph.inputs:
        if tensor.dtype == tf.resource:
            known += counted(handle_bytes(tensor))
        elif tensor.dtype not in (tf.variant, tf.string) and tensor.name not in carried:
            shape = input_shapes.get(tensor.name, tensor.shape if tensor.shape.is_fully_defined() else ())
            known += counted(shape_bytes(shape, tensor.dtype))
    return max(0, device.in_use_bytes - known)


def carried_inputs(body: _private.FuncGraph) -> frozenset[str]:
    """Names of what a loop hands from one iteration to the next: the inputs of its body that it does not capture."""
    captured = {inside.name for _, inside in body.captures}
    return frozenset(
        tensor.name for tensor in body.inputs if tensor.name not in captured and tensor.dtype not in _HANDLES
    )


def appended_bytes(body: _private.FuncGraph, input_shapes: Mapping[str, Sequence[int]]) -> int:
    """Bytes that one iteration of a loop appends to the lists that it hands on.

    Args:
        body: of the loop.
        input_shapes: real shapes of inputs traced with unknown dimensions, by tensor name.
    """
    items = [
        op.inputs[2]
        for op in body.get_operations()
        if op.type == "TensorListSetItem" and op.inputs[0].op.type == "Placeholder"
    ]
    if not items:
        return 0
    sizes, counted = Sizes(body, input_shapes), current_device().allocator.counted
    return sum(counted(sizes.bytes(item) or 0) for item in items)
