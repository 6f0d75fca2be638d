"""A plan -> the function that is being traced, rewritten in place: copies of operations, and the order memory needs.

Operations that wait for one another leave cores idle: two small ones side by side finish sooner than one after the
other, each cut into pieces for all cores. Only where memory is short does an order matter. So a schedule is cut into
spans: between two barriers operations run as soon as their inputs are there, and even if all of them run at once, and
nothing is freed before the last has ended, they hold less than the schedule's own peak.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

import tensorflow as tf

from remat.core.plan import Plan
from remat.tensorflow import _private
from remat.tensorflow.emit import xla_ties
from remat.tensorflow.peak.spans import span_starts
from remat.tensorflow.trace import op_facts
from remat.tensorflow.trace.func_graph import TracedStep
from remat.tensorflow.trace.sizes import LOOPS

_Cover: TypeAlias = Callable[[tf.Tensor], tf.Tensor]  # A tensor -> the same values under another name.

_LIGHT: Final = 1e-3
"""Tensors below this share of the peak are not held in order: it would cost edges and gain nothing.

A judgement, not measured by itself. Larger, more bytes may live at other times than the schedule says; smaller, the
function gets more control edges, each of which takes the executor time.
"""

_LIGHT_TOGETHER: Final = 0.02
"""What tensors that are not held come to together, at most, as a share of the peak.

NASNetMobile has thousands of light tensors, and its steps took 7 % more than predicted while none of them was held.
"""

_KNOWN_VALUES: Final = op_facts.METADATA | {"Const"}
"""Kinds of operations whose results the graph optimizer may know while it optimizes."""


@dataclass(frozen=True)
class Rewritten:
    """A function that runs a plan's schedule, and what was written into it.

    Attributes:
        plan: whose schedule it runs.
        step: the traced function; its operations read other tensors than before.
        copies: the recomputations, in schedule order.
        control_edges: how many control edges hold the schedule's order.
    """

    plan: Plan
    step: TracedStep
    copies: tuple[tf.Operation, ...]
    control_edges: int


def emit(plan: Plan, step: TracedStep, *, in_xla: bool = False) -> Rewritten:
    """Rewrite the function so that it runs the plan's schedule.

    A second occurrence of an op becomes a copy of it, and what the schedule reads afterwards reads the copy.
    The schedule is cut into spans whose operations may run in any order without holding more than its peak. Every
    op that touches a large tensor is held behind those of the span before its own, so that the executor can neither run
    a recomputation early nor let large ops overlap where memory is short. Under XLA, which ignores control edges, a
    recomputation reads a value that depends on the backward pass instead.

    Args:
        plan: a plan for ``step.graph``.
        step: the traced function.
        in_xla: is the function compiled with XLA?

    Raises:
        PlanMismatch: if the plan was made for another graph.
    """
    plan.check_graph(step.graph)
    return (_XlaEmitter if in_xla else _Emitter)(plan, step).run()


class _Emitter:
    """Walks along a schedule and rewrites the function for TensorFlow's executor, which control edges hold in order."""

    def __init__(self, plan: Plan, step: TracedStep) -> None:
        self.plan = plan
        self.graph = step.graph
        self.step = step
        self.newest: list[tf.Tensor] = list(step.tensors)  # For each tensor of the graph, its newest instance.
        self.runs = [0] * len(step.graph.ops)
        self.copies: list[tf.Operation] = []
        self.barrier: list[tf.Operation] = []  # What the operations of this span wait for; one at most.
        self.span: set[str] = set()
        self.unawaited: dict[str, tf.Operation] = {}  # Of the span, those that no other of it waits for.
        # What oneDNN may merge with other ops: held by nothing itself, waited for once those ops have run.
        self.loose: list[tuple[tf.Operation, frozenset[int]]] = []
        self.control_edges = 0
        self.constant: dict[str, bool] = {}  # By name, whether an operation makes what the graph optimizer knows.
        # What stands in for tensors that the graph optimizer must not see through: by name, and by how it is made.
        self.hidden: dict[tuple[str, _Cover], tf.Tensor] = {}
        self.merges = _private.uses_onednn()
        pinned = {self.graph.roots[t] for t in self.graph.inputs}
        light = self._light_bytes(pinned)
        self.large = [
            self.graph.roots[number] not in pinned and self.graph.tensors[self.graph.roots[number]].size_bytes > light
            for number in range(len(self.graph.tensors))
        ]

    def _light_bytes(self, pinned: set[int]) -> int:
        """The size up to which tensors are not held in order."""
        peak_bytes = max(1, self.plan.peak_bytes)
        sizes = Counter(self.graph.tensors[root].size_bytes for root in set(self.graph.roots) - pinned)
        together, light = 0, 0
        for size, count in sorted(sizes.items()):
            together += size * count
            if size > _LIGHT * peak_bytes or together > _LIGHT_TOGETHER * peak_bytes:
                break
            light = size
        return light

    def run(self) -> Rewritten:
        starts = frozenset(span_starts(self.graph, self.plan.schedule))
        for position, index in enumerate(self.plan.schedule):
            if position in starts:
                self._end_span()
            operation = self._copy(index) if self.runs[index] else self._rebind(index)
            if self._heavy(index):
                if self.merges and self.graph.ops[index].kind in op_facts.MERGED_BY_ONEDNN:
                    self.loose.append((operation, self._merged_with(index)))
                else:
                    self._keep_in_order(operation)
            self.runs[index] += 1
        return Rewritten(self.plan, self.step, tuple(self.copies), self.control_edges)

    def _heavy(self, index: int) -> bool:
        """Does the op read or make a large tensor? A view's bytes are its source's; it is never held."""
        op = self.graph.ops[index]
        if op.kind in op_facts.RESIDENT:
            return False  # What a loop hands on is there before anything runs.
        if op.outputs and all(self.graph.tensors[t].alias_of is not None for t in op.outputs):
            return False
        return any(self.large[t] for t in op.inputs) or any(self.large[t] for t in op.outputs)

    def _merged_with(self, index: int) -> frozenset[int]:
        """The ops that oneDNN may merge this one with."""
        op = self.graph.ops[index]
        kinds = op_facts.MERGED_BY_ONEDNN[op.kind]
        return frozenset(n for t in op.inputs for n in self.graph.readers[t] if self.graph.ops[n].kind in kinds)

    def _rebind(self, index: int) -> tf.Operation:
        operation = self.step.operations[index]
        if operation.type in LOOPS:
            _private.run_iterations_one_by_one(operation)
        # An op that reads only shapes has no inputs in the graph: it keeps reading the first instance.
        for position, number in enumerate(self.graph.ops[index].inputs):
            source = self.newest[number]
            if operation.inputs[position] is not source:
                _private.update_input(operation, position, source)
        return operation

    def _copy(self, index: int) -> tf.Operation:
        operation = self.step.operations[index]
        op = self.graph.ops[index]
        inputs = [self.newest[t] for t in op.inputs] if op.inputs else list(operation.inputs)
        copy = self._held_copy(operation, inputs, f"{operation.name}/recomputed_{self.runs[index]}")
        for number, output in zip(op.outputs, copy.outputs, strict=True):
            self.newest[number] = output
        self.copies.append(copy)
        return copy

    def _held_copy(self, operation: tf.Operation, inputs: list[tf.Tensor], name: str) -> tf.Operation:
        """A copy of ``operation`` that runs no sooner than the schedule says."""
        self.control_edges += len(self.barrier)
        if self.barrier and operation.type in op_facts.NOT_SIMPLIFIED_WHILE_WAITING:
            inputs = [_private.awaiting(inputs[0], self.barrier), *inputs[1:]]
            return _private.copy_operation(operation, inputs, [], name)
        return _private.copy_operation(operation, inputs, self.barrier, name)

    def _keep_in_order(self, operation: tf.Operation) -> None:
        self._shield_from_optimizer(operation)
        before = {op.name for op in operation.control_inputs} | {t.op.name for t in operation.inputs}
        # Who waits for another operation of the span waits for the barrier, too; not so where the graph optimizer may
        # put other operands in the place of that operation.
        if self.span.isdisjoint(before) or operation.type in op_facts.PUSHES_CONSTANTS_DOWN:
            missing = [op for op in self.barrier if op.name not in before]
            if missing and operation.type in op_facts.NOT_SIMPLIFIED_WHILE_WAITING:
                _private.update_input(operation, 0, _private.awaiting(operation.inputs[0], missing))
            else:
                _private.add_control_inputs(operation, missing)
            self.control_edges += len(missing)
        for name in before:
            self.unawaited.pop(name, None)
        self.unawaited[operation.name] = operation
        self.span.add(operation.name)

    def _end_span(self) -> None:
        # What may be merged with a later op is waited for once that op has run; early it does no harm.
        done = [late for late, others in self.loose if all(self.runs[n] for n in others)]
        self.loose = [(late, others) for late, others in self.loose if late not in done]
        last = [*self.unawaited.values(), *done]
        if len(last) > 1:
            self.control_edges += len(last)
            last = [_private.after_all(last)]
        if last:
            self.barrier = last
        self.span.clear()
        self.unawaited.clear()

    def _shield_from_optimizer(self, operation: tf.Operation) -> None:
        """Keep the graph optimizer from making other operations of this one and one of an earlier span.

        Nor may it make a constant of this one: that would be in memory for as long as the function is.
        """
        makers = [source.op for source in operation.inputs]
        if makers and all(self._is_constant(maker) for maker in makers):
            # On a GPU, TensorFlow copies no integers of 32 bits, which are mostly sizes.
            values = [n for n, source in enumerate(operation.inputs) if source.dtype != tf.int32]
            self._hide(operation, values[0] if values else 0, _private.computed)
            return
        earlier = [op for op in makers if op.type != "Const" and op.name not in self.span]
        for position, maker in enumerate(makers):
            # Operands may be exchanged with those of a maker in this span, too: a * (b * c) of this span becomes
            # (a * b) * c, and the product of two earlier ones waits for nothing.
            if earlier and op_facts.is_merged(operation.type, maker.type):
                self._hide(operation, position, _private.opaque)

    def _hide(self, operation: tf.Operation, position: int, cover: _Cover) -> None:
        """Let the graph optimizer not see what makes an input."""
        source = operation.inputs[position]
        key = source.name, cover
        if key not in self.hidden:
            self.hidden[key] = cover(source)
        _private.update_input(operation, position, self.hidden[key])

    def _is_constant(self, operation: tf.Operation) -> bool:
        """Does the graph optimizer know what the operation makes?"""
        if operation.type in _KNOWN_VALUES:
            return True
        if not operation.inputs or not op_facts.may_repeat(operation):
            return False
        if operation.name not in self.constant:
            self.constant[operation.name] = all(self._is_constant(source.op) for source in operation.inputs)
        return self.constant[operation.name]


class _XlaEmitter(_Emitter):
    """Ties recomputations to the newest large value of the schedule; XLA orders the rest on its own."""

    def __init__(self, plan: Plan, step: TracedStep) -> None:
        super().__init__(plan, step)
        self.zero: tf.Tensor | None = None
        self.trigger: tf.Tensor | None = None
        self.late: set[str] = set()
        self.tied: dict[str, tf.Tensor] = {}
        self.kept = frozenset(self.graph.outputs)
        # The batch dimension may be unknown in the function; the trace knows it.
        self.elements = {
            tensor.name: math.prod(traced.shape)
            for tensor, traced in zip(step.tensors, self.graph.tensors, strict=True)
            if traced.shape is not None
        }

    def _rebind(self, index: int) -> tf.Operation:
        operation = super()._rebind(index)
        xla_ties.hold_filter(operation)
        self._make_late(index, operation)
        return operation

    def _copy(self, index: int) -> tf.Operation:
        copy = super()._copy(index)
        self._make_late(index, copy)
        return copy

    def _make_late(self, index: int, operation: tf.Operation) -> None:
        outputs = self.graph.ops[index].outputs
        # An output of the function is in its reader's hands already.
        if outputs and outputs[0] not in self.kept and (late := xla_ties.in_slices(operation)) is not None:
            if operation.outputs[0].name in self.elements:
                self.elements[late.name] = self.elements[operation.outputs[0].name]
            self.newest[outputs[0]] = late

    def _end_span(self) -> None:
        """The compiler decides what runs side by side."""

    def _keep_in_order(self, operation: tf.Operation) -> None:
        if self.copies and operation is self.copies[-1]:
            return
        made = [t for t in operation.outputs if xla_ties.can_be_tied_to(t) and self.elements.get(t.name)]
        if made:
            self.trigger, self.zero = made[0], None
            self.late.clear()
            self.tied.clear()

    def _held_copy(self, operation: tf.Operation, inputs: list[tf.Tensor], name: str) -> tf.Operation:
        if self.trigger is not None and not any(t.name in self.late for t in inputs):
            tieable = [(self.elements[t.name], n) for n, t in enumerate(inputs) if self._may_tie(t)]
            if tieable:
                number = min(tieable)[1]
                inputs[number] = self._tie(inputs[number])
        copy = _private.copy_operation(operation, inputs, [], name)
        self.late.update(t.name for t in copy.outputs)
        for output, original in zip(copy.outputs, operation.outputs, strict=True):
            if original.name in self.elements:
                self.elements[output.name] = self.elements[original.name]
        return copy

    def _may_tie(self, tensor: tf.Tensor) -> bool:
        if tensor.op.type == "Const" or tensor.name not in self.elements:
            return False
        return xla_ties.may_tie(tensor, self.elements[tensor.name])

    def _tie(self, tensor: tf.Tensor) -> tf.Tensor:
        if tensor.name not in self.tied:
            with _private.building_freely(tensor.graph):
                if self.zero is None:
                    assert self.trigger is not None
                    self.zero = xla_ties.late_zero(self.trigger)
                self.tied[tensor.name] = xla_ties.tie(tensor, self.zero)
        return self.tied[tensor.name]
