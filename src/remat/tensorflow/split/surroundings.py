"""A function as the search for regions sees it, and what stands around a region: what waits for it, what it waits for.

Operations that read the shape of a tensor need not wait for the tensor. So what asks for a shape of what a region makes
is told that shape otherwise: by numbers, and inside of ``fit``, where the size of a batch is unknown, by a number that
is computed from the size of something that the region reads.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection
from functools import cached_property

import tensorflow as tf

from remat.tensorflow.split.facts import Facts, operands_of
from remat.tensorflow.trace import op_facts
from remat.tensorflow.trace.func_graph import FunctionToPlan
from remat.tensorflow.trace.which_run import operations_that_run
from remat.transform.inner import InnerLayers
from remat.transform.merged_axes import count_merged, with_merged
from remat.transform.separable import Call, Program, Region, Way


class FunctionProgram:
    """The calls of a function, for ``find_region``, and the way back to TensorFlow's operations and tensors.

    Args:
        function: the function.

    Attributes:
        facts: shapes and values.
        operations: those that run, one for each call; of a call that is a copy, the one that it is a copy of.
        tensors: one for each value; of a value that a copy makes, the one that is made by what it is a copy of.
        shapes: of the values, for the batch that is planned for and for one of twice the size.
        program: the calls. Beside its own axes a value has merged ones; see ``separable_ops``.
        copies: the numbers of the calls that are copies of others.
    """

    def __init__(self, function: FunctionToPlan) -> None:
        self.graph = function.func_graph
        self.facts = Facts(self.graph, function.input_shapes)
        self.operations = [op for op in operations_that_run(self.graph) if op.type not in op_facts.RESIDENT]
        self.tensors: list[tf.Tensor] = []
        self._ids: dict[str, int] = {}
        outputs = {tensor.name for tensor in self.graph.outputs}
        calls = tuple(self._call(op, outputs) for op in self.operations)
        self.shapes = [self.facts.shapes(tensor) or ((), ()) for tensor in self.tensors]
        self.program = Program(
            calls,
            tuple(with_merged(shape) for shape, _ in self.shapes),
            tuple(self.facts.sizes.bytes(tensor) or 0 for tensor in self.tensors),
            frozenset(self._ids[name] for name in outputs if name in self._ids),
            frozenset(self._ids[t.name] for op in self.operations for t in op.outputs if _is_view(op, t)),
        )
        self.copies: frozenset[int] = frozenset()

    def with_copies(self, layers: InnerLayers) -> FunctionProgram:
        """The function with copies of the calls of inner layers, which only slices of them will run."""
        made = copy.copy(self)
        made.operations = [self.operations[index] for index in layers.origin]
        made.tensors = [self.tensors[value] for value in layers.value_origin]
        made.shapes = [self.shapes[value] for value in layers.value_origin]
        made.program = layers.program
        # Copies stand behind what they are copies of.
        first = {origin: number for number, origin in reversed(list(enumerate(layers.origin)))}
        made.copies = frozenset(number for number, origin in enumerate(layers.origin) if first[origin] != number)
        return made

    def value(self, tensor: tf.Tensor) -> int:
        """The number of a tensor."""
        if tensor.name not in self._ids:
            self._ids[tensor.name] = len(self.tensors)
            self.tensors.append(tensor)
        return self._ids[tensor.name]

    def varying_axes(self, value: int) -> list[int]:
        """The axes of a value whose length depends on the batch."""
        one, other = self.shapes[value]
        return [axis for axis, sizes in enumerate(zip(one, other, strict=True)) if sizes[0] != sizes[1]]

    def _call(self, op: tf.Operation, outputs: Collection[str]) -> Call:
        made = tuple(map(self.value, op.outputs))
        if op.type in op_facts.METADATA:
            return Call((), made)  # It waits for no value. ``Surroundings`` sees to the shapes.
        ways: tuple[Way, ...] = ()
        if not any(tensor.name in outputs for tensor in op.outputs):  # Those are in their reader's hands already.
            ways = self.facts.ways(op)
        read = operands_of(op) if ways else op.inputs
        return Call(tuple(map(self.value, read)), made, ways)


class Surroundings:
    """What stands around a region of a function.

    Args:
        function: the function.
        region: of its program.

    Attributes:
        inside: the names of the region's operations, those that its copies are copies of left out.
        told: those that read shapes and are to be told them otherwise.
        behind: the names of the operations that wait for the region then.
    """

    def __init__(self, function: FunctionProgram, region: Region) -> None:
        self._function = function
        self._region = region
        own = region.ways.keys() - function.copies
        self.inside = frozenset(function.operations[index].name for index in own)
        self._reached = self._waiting(frozenset())
        ancestors = self._ancestors()
        readers = [op for op in function.operations if op.type in op_facts.METADATA]
        self.told = [
            op
            for op in readers
            if any(t.op.name in self.inside for t in op.inputs)
            or (op.name in ancestors and any(t.op.name in self._reached for t in op.inputs))
        ]
        self.behind = self._waiting(frozenset(op.name for op in self.told))

    @cached_property
    def can_be_cut(self) -> bool:
        """Can the region be cut for batches of every size, and does nothing that it reads wait for it?"""
        if self._region.length < 2 or not self._is_cut_alike:
            return False
        if any(tensor.op.name in self.behind for tensor in self._read):
            return False
        if not all(self._follows(tensor) for op in self.told for tensor in op.inputs):
            return False
        return not self.is_dynamic or self.measured_by is not None

    @cached_property
    def is_dynamic(self) -> bool:
        """Does the length of what is cut depend on the batch?"""
        return self._lengths[0] != self._lengths[1]

    @cached_property
    def measured_by(self) -> tuple[int, int] | None:
        """A value that is there before anything is told a shape, with the axis of it that is cut; None without one."""
        late = self._waiting(frozenset(), after=frozenset(op.name for op in self.told))
        for value, axis in self._cut:
            op = self._function.tensors[value].op
            if op.name not in late and not self._makes(value) and op.type != "Const":
                return value, axis
        return None

    def shape(self, tensor: tf.Tensor) -> list[tuple[int, bool]]:
        """The lengths of a tensor's axes for the batch that is planned for, and whether they grow with the batch."""
        value = self._function.value(tensor)
        varying = self._function.varying_axes(value)
        return [(size, axis in varying) for axis, size in enumerate(self._function.shapes[value][0])]

    @cached_property
    def _read(self) -> list[tf.Tensor]:
        function = self._function
        read = (value for index in self._region.ways for value in function.program.calls[index].inputs)
        return [function.tensors[value] for value in dict.fromkeys(read) if not self._makes(value)]

    def _makes(self, value: int) -> bool:
        return self._function.program.producer.get(value) in self._region.ways

    @cached_property
    def _cut(self) -> list[tuple[int, int]]:
        """The values that are cut, each with its axis."""
        found: dict[tuple[int, int], None] = {}
        for index, way in self._region.ways.items():
            call = self._function.program.calls[index]
            read = zip(call.inputs, way.inputs, strict=True)
            made = zip(call.outputs, way.outputs, strict=True)
            for value, part in (*read, *made):
                if isinstance(part, int):
                    found[value, part] = None
        return list(found)

    @cached_property
    def _sizes(self) -> list[list[int]]:
        return [[with_merged(shape)[axis] for shape in self._function.shapes[value]] for value, axis in self._cut]

    @cached_property
    def _lengths(self) -> tuple[int, ...]:
        """In units, for the batch that is planned for and for one of twice the size."""
        return tuple(math.gcd(*sizes) for sizes in zip(*self._sizes, strict=True))

    @cached_property
    def _is_cut_alike(self) -> bool:
        """Has each axis that is cut as many elements a unit, whatever the batch?"""
        one, other = self._lengths
        return other in (one, 2 * one) and all(sizes[0] // one == sizes[1] // other for sizes in self._sizes)

    def _follows(self, tensor: tf.Tensor) -> bool:
        """Does every axis of a tensor grow with what is cut, or not at all?

        What the table of operations can cut along an axis has as many elements a unit there as what it is made of.
        """
        function = self._function
        value = function.value(tensor)
        one, other = function.shapes[value]
        varying = function.varying_axes(value)
        if not varying:
            return True
        if len(varying) > 1 or not self.is_dynamic or other[varying[0]] != 2 * one[varying[0]]:
            return False
        index = function.program.producer.get(value)
        if tensor.op.name not in self._reached and tensor.op.name not in self.inside:
            return True
        assert index is not None, "an operation that waits for others is one of the program's"
        call = function.program.calls[index]
        inside = tensor.op.name in self.inside
        ways = (self._region.ways[index],) if inside else call.ways
        place = call.outputs.index(value)
        for way in ways:
            part = way.outputs[place]
            if isinstance(part, int) and (part == varying[0] or varying[0] < count_merged(one, part)):
                return inside or all(self._follows(function.tensors[read]) for read in call.inputs)
        return False

    def _ancestors(self) -> set[str]:
        """The names of the operations that the region waits for."""
        found: set[str] = set()
        waiting = [tensor.op for tensor in self._read]
        while waiting:
            op = waiting.pop()
            if op.name not in found and op.name not in self.inside:
                found.add(op.name)
                waiting += [tensor.op for tensor in op.inputs]
                waiting += op.control_inputs
        return found

    def _waiting(self, told: Collection[str], after: Collection[str] = ()) -> set[str]:
        """The names of the operations that wait for the region.

        Args:
            told: operations that read shapes, and wait for no value.
            after: what waits for these counts as well.
        """
        found: set[str] = set()
        for index, op in enumerate(self._function.operations):
            if op.name in self.inside or index in self._function.copies:
                continue
            reads = set() if op.name in told else {tensor.op.name for tensor in op.inputs}
            held = {before.name for before in op.control_inputs}
            if op_facts.may_repeat(op):
                held -= self.inside  # What has no effect is told to wait for the sake of memory only.
            if op.name in after or any(name in self.inside or name in found for name in (*reads, *held)):
                found.add(op.name)
        return found


def _is_view(op: tf.Operation, tensor: tf.Tensor) -> bool:
    return op.type in op_facts.VIEW_LISTS or (op.type in op_facts.VIEWS and tensor.value_index == 0)
