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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from remat.errors import UnsupportedStep
from remat.tensorflow import _private, op_facts, structure, xla_ties

_REGION = "RematRegion"
_ARRIVAL = "RematArrival"
_TIE = "RematTie"
_KEY = "_remat_region"
_ARRIVED = "_remat_arrived"

# A copy of one of these would need the gradient of a function that TensorFlow attached to the original.
_CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})


@dataclass(frozen=True, eq=False)
class Region:
    """What the backward pass of one call needs.

    Attributes:
        graph: where the forward pass runs.
        operations: the repeatable operations that the outputs need, in program order.
        outputs: the tensors that the gate takes in, differentiable.
        boundary: what the operations read from outside of them, differentiable or not.
        differentiable: the tensors of ``boundary`` that the gate takes in after the outputs.
        ties: for tensors that ``operations`` read tied, by name, what was tied; such operations are copies themselves.
    """

    graph: tf.Graph
    operations: tuple[tf.Operation, ...]
    outputs: tuple[tf.Tensor, ...]
    boundary: tuple[tf.Tensor, ...]
    differentiable: tuple[tf.Tensor, ...]
    ties: Mapping[str, tf.Tensor] = field(default_factory=dict)


_regions: weakref.WeakValueDictionary[str, Region] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def run_in_graph(function: Callable[[], Any]) -> Any:
    """Run ``function`` in the default graph, its differentiable results being recomputable.

    Args:
        function: called once.

    Returns:
        Its result, with the same structure and the same values.
    """
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    result = function()
    made = graph.get_operations()[before:]
    leaves, rebuild = structure.flatten(result)
    members = set(made)
    symbolic = [t for t in leaves if tf.is_symbolic_tensor(t) and t.graph is graph]
    outputs = {t.name: t for t in symbolic if t.op in members and is_differentiable(t)}
    if not outputs:
        return result
    region = _region_of(graph, made, list(outputs.values()))
    if not region.operations or not region.differentiable:
        return result
    gated = dict(zip(outputs, _gated(region), strict=True))
    places = {id(t): gated[t.name] for t in symbolic if t.name in gated}
    return rebuild([structure.with_mask_of(t, places[id(t)]) if id(t) in places else t for t in leaves])


def is_differentiable(tensor: tf.Tensor) -> bool:
    """Can ``tensor`` carry a gradient?"""
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)


def may_repeat(op: tf.Operation) -> bool:
    """May ``op`` run again in a backward pass, perhaps in another graph?"""
    return op.type == "Const" or (op_facts.may_repeat(op) and op.type not in _CALLS)


def _region_of(graph: tf.Graph, made: Sequence[tf.Operation], outputs: Sequence[tf.Tensor]) -> Region:
    # Small tensors from outside come in as constants; they are inputs all the same, and gradients leave through them.
    inputs = {t.op for t in getattr(graph, "inputs", ()) if tf.is_symbolic_tensor(t)}
    members = {op for op in made if may_repeat(op) and op not in inputs}
    needed: set[tf.Operation] = set()
    stack = [t.op for t in outputs]
    while stack:
        op = stack.pop()
        if op in members and op not in needed:
            needed.add(op)
            stack += [t.op for t in op.inputs]
    operations = tuple(op for op in made if op in needed)
    read = {t.name: t for op in operations for t in op.inputs if t.op not in needed}
    read |= {t.name: t for t in outputs if t.op not in needed}
    boundary = tuple(read.values())
    return Region(graph, operations, tuple(outputs), boundary, tuple(t for t in boundary if is_differentiable(t)))


def _gated(region: Region) -> list[tf.Tensor]:
    """The region's outputs behind its gate, and each behind a gate of its own that tells whether a gradient arrived."""
    key = _register(region, region.graph)
    passed = _private.gate([*region.outputs, *region.differentiable], _REGION, {_KEY: key.encode()}, "recomputed")
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
    region = _regions.get(_private.string_attribute(op, _KEY) or "")
    if region is None:
        raise UnsupportedStep(
            f"the recomputed region {op.name!r} was loaded from a file, which holds no backward pass of it; build the "
            "model from its code (and load its weights) to train it"
        )
    if op.graph is not region.graph:
        region = _moved(region, op.graph)
    arrived = {
        number: gradient
        for number, gradient in enumerate(incoming[: len(region.outputs)])
        if gradient is not None and _private.is_marked(gradient, _ARRIVED)
    }
    nothing: list[Any] = [None] * len(region.outputs)
    if not arrived:
        return nothing + [None] * len(region.differentiable)
    backward = _Backward(region, list(arrived.values()))
    return nothing + backward.gradients([region.outputs[number] for number in arrived])


def _moved(region: Region, graph: tf.Graph) -> Region:
    """The region in another copy of its graph, as TensorFlow makes one of a loop's body."""

    def same(tensors: Sequence[tf.Tensor]) -> tuple[tf.Tensor, ...]:
        return tuple(graph.get_tensor_by_name(t.name) for t in tensors)

    operations = tuple(graph.get_operation_by_name(op.name) for op in region.operations)
    ties = {name: graph.get_tensor_by_name(t.name) for name, t in region.ties.items()}
    return Region(graph, operations, same(region.outputs), same(region.boundary), same(region.differentiable), ties)


class _Backward:
    """One backward pass through a region, in the graph that is the default now."""

    def __init__(self, region: Region, incoming: Sequence[tf.Tensor]) -> None:
        self.region = region
        self.incoming = list(incoming)
        self.graph = tf.compat.v1.get_default_graph()
        self.in_xla = _private.in_xla_context(self.graph)
        self.held = [t.op for t in incoming if t.graph is self.graph]
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
            for op in self._needed(outputs):
                self._copy(op)
            made = [self.copies[t.name] for t in outputs]
            sources = [self.copies[t.name] for t in self.region.differentiable]
            gradients = tf.gradients(made, sources, grad_ys=self.incoming)
            self._point_at_copies(before)
        return list(gradients)

    def _needed(self, outputs: Sequence[tf.Tensor]) -> list[tf.Operation]:
        members = set(self.region.operations)
        needed: set[tf.Operation] = set()
        stack = [t.op for t in outputs]
        while stack:
            op = stack.pop()
            if op in members and op not in needed:
                needed.add(op)
                stack += [self.region.ties.get(t.name, t).op for t in op.inputs]
        return [op for op in self.region.operations if op in needed]

    def _read_boundary(self) -> None:
        for tensor in self.region.boundary:
            with self.graph.control_dependencies(self.held):
                # Gradients end here: what lies beyond is differentiated by whoever differentiates the step.
                self.copies[tensor.name] = _private.marked(tensor)

    def _copy(self, op: tf.Operation) -> None:
        inputs = [self.copies[self.region.ties.get(t.name, t).name] for t in op.inputs]
        early = not any(t.name in self.late for t in inputs)
        if self.in_xla and early:
            self._tie_one_of(inputs)
        attributes = {}
        if key := _private.string_attribute(op, _KEY):
            attributes[_KEY] = _register(self._inner(key), self.graph).encode()
        held = self.held if early and op.type != "Const" else []
        copy = _private.copy_into(self.graph, op, inputs, held, attributes)
        for source, target in zip(op.outputs, copy.outputs, strict=True):
            self.copies[source.name] = target
        if op.type != "Const":
            self.late.update(t.name for t in copy.outputs)

    def _inner(self, key: str) -> Region:
        """A region inside this one, among the copies: its backward pass reads them and no first run."""
        region = _regions[key]
        if region.graph is not self.region.graph:
            region = _moved(region, self.region.graph)

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


def _can_trigger(tensor: tf.Tensor) -> bool:
    return xla_ties.can_be_tied_to(tensor) and _elements(tensor) > 0


def _elements(tensor: tf.Tensor) -> float:
    if tensor.shape.rank is None or not tensor.shape.is_fully_defined():
        return math.inf
    return float(tensor.shape.num_elements())


for _name, _gradient in ((_ARRIVAL, _arrival_gradient), (_TIE, _tie_gradient), (_REGION, _region_gradient)):
    tf.RegisterGradient(_name)(_gradient)
