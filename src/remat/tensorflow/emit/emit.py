"""A plan -> the function that is being traced, rewritten in place: copies of operations, and the order memory needs.

Operations that wait for one another leave cores idle: two small ones side by side finish sooner than one after the
other, each cut into pieces for all cores. Only where memory is short does an order matter. So a schedule is cut into
spans: between two barriers operations run as soon as their inputs are there, and even if all of them run at once, and
nothing is freed before the last has ended, they hold less than the schedule's own peak.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import tensorflow as tf

from remat.core.graph import Op
from remat.core.plan import Plan
from remat.tensorflow import _private
from remat.tensorflow.emit import xla_ties
from remat.tensorflow.emit.fused import Group, fused_groups, fuses
from remat.tensorflow.peak.carried_out import carried_out_at
from remat.tensorflow.peak.spans import span_starts
from remat.tensorflow.trace import op_facts
from remat.tensorflow.trace.func_graph import TracedStep
from remat.tensorflow.trace.sizes import LOOPS

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
        self.late: dict[str, tf.Tensor] = {}  # By name, what stands in for tensors of earlier spans in this one.
        self.computed: dict[str, tf.Tensor] = {}  # By name, copies of constants that are made at each run.
        self.merges = _private.uses_onednn()
        self.carried_out_at = carried_out_at(step, plan.schedule)
        self.begins_kernel = False  # Is the run that is written now the first of a group that becomes one kernel?
        self.pinned = {self.graph.roots[t] for t in self.graph.inputs}
        self.light_bytes = self._light_bytes()
        self.large = [
            self.graph.roots[number] not in self.pinned
            and self.graph.tensors[self.graph.roots[number]].size_bytes > self.light_bytes
            for number in range(len(self.graph.tensors))
        ]
        self.readers_of_shapes = self._readers_of_shapes()
        self.variables = {root for root in self.pinned if step.tensors[root].dtype == tf.resource}
        # For each of these, who reads its present value, and the number in the graph of who does so at its first run.
        self.readers_of_value: dict[int, list[tuple[tf.Operation, int | None]]] = {}

    def _readers_of_shapes(self) -> dict[int, list[tuple[tf.Operation, Sequence[int]]]]:
        """For each op, who reads the shape of a large tensor and waits for that op, with all that this one waits for.

        To the graph these read nothing. But until such an operation has run it holds the tensor, and nothing waits for
        it before the backward pass: a thread that is stopped right before it may hold a tensor too many. In a step of a
        few KiB what it makes may be large, too; then it is held in order itself, and nothing before it waits for it.
        """
        maker = {operation.name: index for index, operation in enumerate(self.step.operations)}
        found: dict[int, list[tuple[tf.Operation, Sequence[int]]]] = {}
        for index in dict.fromkeys(self.plan.schedule):
            if self.graph.ops[index].inputs or self._heavy(index):
                continue
            operation = self.step.operations[index]
            sources = {maker[source.op.name] for source in operation.inputs if source.op.name in maker}
            if any(self.large[tensor] for source in sources for tensor in self.graph.ops[source].outputs):
                # Those and, behind a check, say, more than what it reads: what may be held in a later span.
                awaited = self.graph.ops[index].after
                for before in awaited:
                    found.setdefault(before, []).append((operation, awaited))
        return found

    def _light_bytes(self) -> int:
        """The size up to which tensors are not held in order."""
        peak_bytes = max(1, self.plan.peak_bytes)
        sizes = Counter(self.graph.tensors[root].size_bytes for root in set(self.graph.roots) - self.pinned)
        together, light = 0, 0
        for size, count in sorted(sizes.items()):
            together += size * count
            if size > _LIGHT * peak_bytes or together > _LIGHT_TOGETHER * peak_bytes:
                break
            light = size
        return light

    def run(self) -> Rewritten:
        starts = self._span_starts()
        groups = self._groups()
        inside = {position for group in groups for position in range(group[0] + 1, group[-1] + 1)}
        # A span that would begin inside of a kernel begins before it.
        starts |= {group[0] for group in groups if not starts.isdisjoint(range(group[0], group[-1] + 1))}
        first = {group[0] for group in groups}
        for position, index in enumerate(self.plan.schedule):
            if position not in inside and (self.plan.one_by_one or position in starts):
                self._end_span()
            self.begins_kernel = position in first
            operation = self._copy(index) if self.runs[index] else self._rebind(index)
            if self._heavy(index):
                if self.merges and self.graph.ops[index].kind in op_facts.MERGED_BY_ONEDNN:
                    self.loose.append((operation, self._merged_with(index)))
                else:
                    self._keep_in_order(index, operation)
            self._write_after_reading(index, operation)
            self.runs[index] += 1
            for reader, awaited in self.readers_of_shapes.pop(index, ()):
                if all(self.runs[before] for before in awaited):
                    self.unawaited[reader.name] = reader
        return Rewritten(self.plan, self.step, tuple(self.copies), self.control_edges)

    def _span_starts(self) -> frozenset[int]:
        """Where spans begin: as in the replay of a peak, which has no runs that TensorFlow leaves out."""
        at = self.carried_out_at
        starts = span_starts(self.graph, [self.plan.schedule[position] for position in at])
        return frozenset(at[start] for start in starts)

    def _groups(self) -> list[Group]:
        """What becomes one kernel, with nothing beside it meanwhile that is held in order."""
        if not fuses():
            return []

        def is_by_itself(group: Group) -> bool:
            beside = set(range(group[0], group[-1])) - set(group)
            return not any(self._heavy(self.plan.schedule[position]) for position in beside)

        return list(filter(is_by_itself, fused_groups(self.step, self.plan.schedule, self.carried_out_at)))

    def _reads_late(self, operation: tf.Operation) -> bool:
        """Is an operation held back by what it reads? A control edge would be lost, or would keep kernels apart."""
        return self.begins_kernel or operation.type in op_facts.REGROUPED

    def _heavy(self, index: int) -> bool:
        """Does the op read or make a large tensor? A view's bytes are its source's; it is never held."""
        op = self.graph.ops[index]
        if op.kind in op_facts.RESIDENT:
            return False  # What a loop hands on is there before anything runs.
        if self._makes_views(op):
            return False
        return any(self.large[t] for t in op.inputs) or any(self.large[t] for t in op.outputs)

    def _makes_views(self, op: Op) -> bool:
        return bool(op.outputs) and all(self.graph.tensors[t].alias_of is not None for t in op.outputs)

    def _write_after_reading(self, index: int, operation: tf.Operation) -> None:
        """Let an update of a variable wait for those that read the value before it.

        Where one of them still runs, say the layer's gradient by its input, TensorFlow writes into a copy that becomes
        the variable's memory. However small, it may split a hole that large tensors of later steps need. What the
        update depends on has run: an edge from it would keep the graph optimizer from fusing it with its readers.
        """
        op = self.graph.ops[index]
        if not op.inputs:
            return
        if operation.type.startswith(op_facts.ASSIGNMENTS):
            readers = self.readers_of_value.pop(self.graph.roots[op.inputs[0]], [])
            missing = [reader for reader, first in readers if first is None or not self.ancestors[index] >> first & 1]
            _private.add_control_inputs(operation, missing)
            self.control_edges += len(missing)
        elif not self._makes_views(op):
            first = None if self.runs[index] else index
            for root in {self.graph.roots[t] for t in op.inputs} & self.variables:
                self.readers_of_value.setdefault(root, []).append((operation, first))

    @functools.cached_property
    def ancestors(self) -> list[int]:
        """For each op of the graph, those that its first run waits for, one bit each."""
        maker = {tensor: index for index, op in enumerate(self.graph.ops) for tensor in op.outputs}
        found: list[int] = []
        for op in self.graph.ops:
            before = {maker[tensor] for tensor in op.inputs if tensor in maker} | set(op.after)
            found.append(functools.reduce(int.__or__, (found[one] | 1 << one for one in before), 0))
        return found

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
        self._read_from(operation, [self.newest[number] for number in self.graph.ops[index].inputs])
        return operation

    def _copy(self, index: int) -> tf.Operation:
        operation = self.step.operations[index]
        op = self.graph.ops[index]
        inputs = [self.newest[t] for t in op.inputs] if op.inputs else list(operation.inputs)
        copy = self._held_copy(index, inputs, f"{operation.name}/recomputed_{self.runs[index]}")
        for number, output in zip(op.outputs, copy.outputs, strict=True):
            self.newest[number] = output
        self.copies.append(copy)
        return copy

    def _held_copy(self, index: int, inputs: list[tf.Tensor], name: str) -> tf.Operation:
        """A copy of an op that runs no sooner than the schedule says."""
        operation = self.step.operations[index]
        if self._reads_late(operation):
            return _private.copy_operation(operation, self._late(index, inputs), [], name)
        self.control_edges += len(self.barrier)
        return _private.copy_operation(operation, inputs, self.barrier, name)

    def _keep_in_order(self, index: int, operation: tf.Operation) -> None:
        self._keep_from_being_constant(operation)
        if self._reads_late(operation):
            self._read_from(operation, self._late(index, operation.inputs))
        before = {op.name for op in operation.control_inputs} | {t.op.name for t in operation.inputs}
        # Who waits for another operation of the span waits for the barrier, too; but a product that is waited for and
        # not read may become one of two numbers.
        lasting = {op.name for op in operation.control_inputs if op.type not in op_facts.REGROUPED}
        if self.span.isdisjoint(lasting | {t.op.name for t in operation.inputs}):
            missing = [op for op in self.barrier if op.name not in before]
            if missing and operation.type in op_facts.BROKEN_BY_CONTROL_INPUTS:
                self._read_from(operation, [self._waiting(operation.inputs[0]), *operation.inputs[1:]])
            else:
                _private.add_control_inputs(operation, missing)
                self.control_edges += len(missing)
        for name in before:
            self.unawaited.pop(name, None)
        self.unawaited[operation.name] = operation
        self.span.add(operation.name)

    def _late(self, index: int, inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The inputs of an op, but what earlier spans made only once the barrier is behind it.

        Whatever the graph optimizer makes of the operations of this span, it finds nothing of these earlier. Small
        tensors are meant, too, since (x * row) * column may become x * (row * column), and large ones that are there
        from the beginning. A constant is a number, mostly, of which the optimizer may make quicker operations.
        """
        late = list(inputs)
        roots = [self.graph.roots[number] for number in self.graph.ops[index].inputs]
        # Of a kernel, one input that waits is enough: its weights need not, unless all that it reads is there from the
        # beginning.
        holds_weights = not self.begins_kernel or self.pinned.issuperset(roots)
        for position, root in enumerate(roots):
            source = inputs[position]
            is_light = self.graph.tensors[root].size_bytes <= self.light_bytes
            may_be_early = root in self.pinned and (is_light or not holds_weights)
            is_of_span = self.newest[root].op.name in self.span or source.op.name in self.span
            if self.barrier and not may_be_early and not is_of_span and not self._is_constant(source.op):
                late[position] = self._waiting(source)
        return late

    def _waiting(self, source: tf.Tensor) -> tf.Tensor:
        """A tensor of an earlier span for this one."""
        if source.name not in self.late:
            self.late[source.name] = _private.awaiting(source, self.barrier)
            self.span.add(self.late[source.name].op.name)
            self.control_edges += len(self.barrier)
        return self.late[source.name]

    @staticmethod
    def _read_from(operation: tf.Operation, inputs: Sequence[tf.Tensor]) -> None:
        for position, source in enumerate(inputs):
            if operation.inputs[position] is not source:
                _private.update_input(operation, position, source)

    def _end_span(self) -> None:
        # What may be merged with a later op is waited for once that op has run; early it does no harm.
        done = [late for late, others in self.loose if all(self.runs[n] for n in others)]
        self.loose = [(late, others) for late, others in self.loose if late not in done]
        last = [*self.unawaited.values(), *done]
        if last and not self.span:
            last += self.barrier  # Nothing of this span has waited for it: what comes next is to.
        if len(last) > 1:
            self.control_edges += len(last)
            last = [_private.after_all(last)]
        if last:
            self.barrier = last
        self.late.clear()
        self.span.clear()
        self.unawaited.clear()

    def _keep_from_being_constant(self, operation: tf.Operation) -> None:
        """Let the graph optimizer not make a constant of a large tensor, which would never be freed."""
        makers = [source.op for source in operation.inputs]
        if not makers or not all(self._is_constant(maker) for maker in makers):
            return
        # On a GPU, TensorFlow copies no integers of 32 bits, which are mostly sizes.
        values = [n for n, source in enumerate(operation.inputs) if source.dtype != tf.int32]
        position = values[0] if values else 0
        source = operation.inputs[position]
        if source.name not in self.computed:
            self.computed[source.name] = _private.computed(source)
        _private.update_input(operation, position, self.computed[source.name])

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
        self.made_late: set[str] = set()
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

    def _groups(self) -> list[Group]:
        """The compiler decides what becomes one kernel."""
        return []

    def _end_span(self) -> None:
        """The compiler decides what runs side by side."""

    def _write_after_reading(self, index: int, operation: tf.Operation) -> None:
        """The compiler decides where a variable's new value lies."""

    def _keep_in_order(self, index: int, operation: tf.Operation) -> None:
        if self.copies and operation is self.copies[-1]:
            return
        made = [t for t in operation.outputs if xla_ties.can_be_tied_to(t) and self.elements.get(t.name)]
        if made:
            self.trigger, self.zero = made[0], None
            self.made_late.clear()
            self.tied.clear()

    def _held_copy(self, index: int, inputs: list[tf.Tensor], name: str) -> tf.Operation:
        operation = self.step.operations[index]
        if self.trigger is not None and not any(t.name in self.made_late for t in inputs):
            tieable = [(self.elements[t.name], n) for n, t in enumerate(inputs) if self._may_tie(t)]
            if tieable:
                number = min(tieable)[1]
                inputs[number] = self._tie(inputs[number])
        copy = _private.copy_operation(operation, inputs, [], name)
        self.made_late.update(t.name for t in copy.outputs)
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
