"""A region: operations of a graph whose results are dropped after the forward pass and made again for the backward.

The function runs as ever, once, in the graph that is being traced. Its outputs then pass a gate, an ``IdentityN`` with
a gradient of its own. When that gradient is asked for, the region's repeatable operations are copied into the graph
where the backward pass is being built, held back until the incoming gradients exist, and differentiated there. What
must not repeat (random draws, variables, loops, calls) is read from its first run, so dropout masks and statistics are
what they were, and gradients flow on through it.

TensorFlow itself decides when to differentiate: a tape, ``tf.gradients``, the gradient of a loop or of a function. All
of them meet the gate.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from remat.core.errors import UnsupportedStep
from remat.tensorflow import _private
from remat.tensorflow.emit import xla_ties
from remat.tensorflow.recompute import call_values
from remat.tensorflow.recompute.region import Region, is_differentiable, needed_for, pieces_of, region_of
from remat.tensorflow.trace import op_facts

_REGION = "RematRegion"
_ARRIVAL = "RematArrival"
_TIE = "RematTie"
REGION_KEY = "_remat_region"
_ARRIVED = "_remat_arrived"

_regions: weakref.WeakValueDictionary[str, Region] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def run_in_graph(function: Callable[[], Any], segmented: bool = False) -> Any:
    """Run ``function`` in the default graph, its differentiable results being recomputable.

    Args:
        function: called once.
        segmented: recompute it in pieces.

    Returns:
        Its result, with the same structure and the same values.
    """
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    result = function()
    made = graph.get_operations()[before:]
    leaves, rebuild = call_values.flatten(result)
    members = set(made)
    symbolic = [t for t in leaves if tf.is_symbolic_tensor(t) and t.graph is graph]
    outputs = {t.name: t for t in symbolic if t.op in members and is_differentiable(t)}
    if not outputs:
        return result
    region = region_of(graph, made, list(outputs.values()), segmented)
    if not region.operations or not region.differentiable:
        return result
    gated = dict(zip(outputs, _gated(region), strict=True))
    places = {id(t): gated[t.name] for t in symbolic if t.name in gated}
    return rebuild([call_values.with_mask_of(t, places[id(t)]) if id(t) in places else t for t in leaves])


def regions_of(graph: tf.Graph) -> list[Region]:
    """The regions whose forward pass is in ``graph``, in the order in which they ended."""
    return list(getattr(graph, "_remat_regions", ()))


def _gated(region: Region) -> list[tf.Tensor]:
    """The region's outputs behind its gate, and each behind a gate of its own that tells whether a gradient arrived."""
    key = _register(region, region.graph)
    passed = _private.gate([*region.outputs, *region.differentiable], _REGION, {REGION_KEY: key.encode()}, "recomputed")
    return [_private.gate([t], _ARRIVAL)[0] for t in passed[: len(region.outputs)]]


def _register(region: Region, graph: tf.Graph) -> str:
    key = str(next(_numbers))
    _regions[key] = region
    # The graph keeps it: gradients may be asked for as long as the graph is there.
    if not hasattr(graph, "_remat_regions"):
        graph._remat_regions = []
    graph._remat_regions.append(region)
    return key


def _arrival_gradient(_: tf.Operation, incoming: Any) -> tf.Tensor:
    """Mark a gradient that did come, so that it differs from the zeros that TensorFlow puts where none came."""
    return _private.marked(tf.convert_to_tensor(incoming), _ARRIVED)


def _tie_gradient(_: tf.Operation, incoming: tf.Tensor, *__: Any) -> list[Any]:
    """A tie changes no value: the gradient goes to what was tied."""
    return [None, incoming]


def _region_gradient(op: tf.Operation, *incoming: Any) -> list[Any]:
    region = _regions.get(_private.string_attribute(op, REGION_KEY) or "")
    if region is None:
        raise UnsupportedStep(
            f"the recomputed region {op.name!r} was loaded from a file, which holds no backward pass of it; build the "
            "model from its code (and load its weights) to train it"
        )
    if op.graph is not region.graph:
        region = region.in_graph(op.graph)
    arrived: dict[str, list[Any]] = {
        output.name: [gradient]
        for output, gradient in zip(region.outputs, incoming, strict=False)
        if gradient is not None and _private.is_marked(gradient, _ARRIVED)
    }
    pieces = pieces_of(region, _inner_operations(region)) if region.segmented else [region]
    for piece in reversed(pieces):
        outputs = [t for t in piece.outputs if t.name in arrived]
        if outputs:
            backward = _Backward(piece, [_together(arrived.pop(t.name)) for t in outputs])
            for source, gradient in zip(piece.differentiable, backward.gradients(outputs), strict=True):
                if gradient is not None:
                    arrived.setdefault(source.name, []).append(gradient)
    nothing: list[Any] = [None] * len(region.outputs)
    return nothing + [_together(arrived[t.name]) if t.name in arrived else None for t in region.differentiable]


def _inner_operations(region: Region) -> Iterator[list[str]]:
    """What lies between the ends of each region inside this one, its gates included."""
    for op in region.operations:
        if key := _private.string_attribute(op, REGION_KEY):
            arrivals = [reader.name for t in op.outputs for reader in t.consumers()]
            yield [*(inner.name for inner in _regions[key].operations), op.name, *arrivals]


def _together(gradients: Sequence[Any]) -> Any:
    """The sum of a tensor's gradients; rows of a table stay rows."""
    if len(gradients) == 1:
        return gradients[0]
    if all(isinstance(gradient, tf.IndexedSlices) for gradient in gradients):
        first = gradients[0]
        rows, places = (tf.concat(parts, 0) for parts in zip(*((g.values, g.indices) for g in gradients), strict=True))
        return tf.IndexedSlices(rows, places, first.dense_shape)
    return tf.add_n([tf.convert_to_tensor(gradient) for gradient in gradients])


class _Backward:
    """One backward pass through a region, in the graph that is the default now."""

    def __init__(self, region: Region, incoming: Sequence[Any]) -> None:
        self.region = region
        self.incoming = [tf.convert_to_tensor(gradient) for gradient in incoming]
        self.graph = tf.compat.v1.get_default_graph()
        self.in_xla = _private.in_xla_context(self.graph)
        self.held = [t.op for t in self.incoming if t.graph is self.graph]
        self.zero: tf.Tensor | None = None
        self.copies: dict[str, tf.Tensor] = {}
        self.ties: dict[str, tf.Tensor] = {}
        self.late: set[str] = set()

    def gradients(self, outputs: Sequence[tf.Tensor]) -> list[Any]:
        """Gradients of ``outputs``, for which ``incoming`` came, with respect to the differentiable boundary."""
        with tf.name_scope("recompute"):
            if self.in_xla:
                self.incoming = [self._written_once(t) for t in self.incoming]
            self._read_boundary()
            before = len(self.graph.get_operations())
            needed = needed_for(outputs, set(self.region.operations), self.region.read_by)
            for op in (op for op in self.region.operations if op in needed):
                self._copy(op)
            made = [self.copies[t.name] for t in outputs]
            sources = [self.copies[t.name] for t in self.region.differentiable]
            gradients = tf.gradients(made, sources, grad_ys=self.incoming)
            self._point_at_copies(before)
        return list(gradients) if self.in_xla else _all_at_once(gradients)

    def _read_boundary(self) -> None:
        for tensor in self.region.boundary:
            with self.graph.control_dependencies(self.held):
                # Gradients end here: what lies beyond is differentiated by whoever differentiates the step.
                self.copies[tensor.name] = _private.marked(tensor)

    def _copy(self, op: tf.Operation) -> None:
        inputs = [self.copies[t.name] for t in self.region.read_by(op)]
        early = not any(t.name in self.late for t in inputs)
        if self.in_xla and early:
            self._tie_one_of(inputs)
        attributes = {}
        if key := _private.string_attribute(op, REGION_KEY):
            attributes[REGION_KEY] = _register(self._inner(key), self.graph).encode()
        # What is read waits, too; and a power must not wait by itself.
        waits = early and op.type not in ("Const", *op_facts.BROKEN_BY_CONTROL_INPUTS)
        held = self.held if waits else []
        copy = _private.copy_into(self.graph, op, inputs, held, attributes)
        for source, target in zip(op.outputs, copy.outputs, strict=True):
            self.copies[source.name] = target
        if op.type != "Const":
            self.late.update(t.name for t in copy.outputs)

    def _inner(self, key: str) -> Region:
        """A region inside this one, among the copies: its backward pass reads them and no first run."""
        region = _regions[key]
        if region.graph is not self.region.graph:
            region = region.in_graph(self.region.graph)

        def mapped(tensors: Sequence[tf.Tensor]) -> tuple[tf.Tensor, ...]:
            return tuple(self.copies.get(t.name, t) for t in tensors)

        operations = tuple(self.copies[op.outputs[0].name].op for op in region.operations)
        return Region(
            self.graph,
            operations,
            mapped(region.outputs),
            mapped(region.boundary),
            mapped(region.differentiable),
            self.ties,
            region.segmented,
        )

    def _written_once(self, tensor: tf.Tensor) -> tf.Tensor:
        """Under XLA: an incoming gradient that its readers share, as they would without a compiler."""
        return _private.gate([xla_ties.written_once(tensor), tensor], _TIE)[0] if _can_trigger(tensor) else tensor

    def _tie_one_of(self, inputs: list[tf.Tensor]) -> None:
        """Under XLA control edges vanish: the copy gets one input that depends on the incoming gradients."""
        tieable = [(_elements(t), number) for number, t in enumerate(inputs) if xla_ties.may_tie(t, _elements(t))]
        triggers = [t for t in self.incoming if _can_trigger(t)]
        if not tieable or not triggers:
            return
        if self.zero is None:
            self.zero = tf.add_n([xla_ties.late_zero(t) for t in triggers])
        number = min(tieable)[1]
        tied = _private.gate([xla_ties.tie(inputs[number], self.zero), inputs[number]], _TIE)[0]
        self.ties[tied.name] = inputs[number]
        inputs[number] = tied

    def _point_at_copies(self, before: int) -> None:
        """Gradients written in Python remember the tensors of the first run; they are given the copies."""
        if self.region.graph is not self.graph:
            return
        operations = (op for op in self.region.operations if op.type != "Const")
        replaced = {t.name: self.copies[t.name] for op in operations for t in op.outputs if t.name in self.copies}
        for op in self.graph.get_operations()[before:]:
            for number, tensor in enumerate(op.inputs):
                if tensor.name in replaced:
                    _private.update_input(op, number, replaced[tensor.name])


def _all_at_once(gradients: Sequence[Any]) -> list[Any]:
    """Let gradients leave a region when all of them are there.

    Those of the weights read what was made again. With few threads TensorFlow would put them off while the regions
    before this one make theirs again, until all of it is in memory at once.
    """
    made = [one.values if isinstance(one, tf.IndexedSlices) else one for one in gradients if one is not None]
    if len(made) < 2:
        return list(gradients)
    with tf.control_dependencies(made):
        return [tf.identity(one) if isinstance(one, tf.Tensor) else one for one in gradients]


def _can_trigger(tensor: tf.Tensor) -> bool:
    return xla_ties.can_be_tied_to(tensor) and _elements(tensor) > 0


def _elements(tensor: tf.Tensor) -> float:
    if tensor.shape.rank is None or not tensor.shape.is_fully_defined():
        return math.inf
    return float(tensor.shape.num_elements())


for _name, _gradient in ((_ARRIVAL, _arrival_gradient), (_TIE, _tie_gradient), (_REGION, _region_gradient)):
    tf.RegisterGradient(_name)(_gradient)
