"""A function with regions that run in slices: ``remat.transform`` finds them and says the order, this writes them.

The slices are copies of operations, one slice behind the other. Nothing holds them in that order yet: the plan for the
function does, by the control edges that it is carried out with. Terms of a sum are added one by one, each over the sum
so far, so that no more than two live at once.

Inside of ``fit`` the size of a batch is unknown while a function is traced. Then the bounds of the slices are computed
when the function runs, from the shape of what the region reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import tensorflow as tf

from remat.tensorflow import _private
from remat.tensorflow.emit import xla_ties
from remat.tensorflow.split.separable_ops import parameter_inputs
from remat.tensorflow.split.surroundings import FunctionProgram, Surroundings
from remat.tensorflow.trace import op_facts
from remat.tensorflow.trace.func_graph import FunctionToPlan
from remat.transform.inner import find_inner_layers
from remat.transform.merged_axes import count_merged, with_merged
from remat.transform.order import order_around
from remat.transform.separable import Region, Way, find_region
from remat.transform.split import Slice, write_slices

_SUMMED_IN: Final = {tf.bfloat16: tf.float32, tf.float16: tf.float32}
"""The type in which slices are added up, where it is not the result's own."""

Look: TypeAlias = Callable[[str], tf.Tensor]
"""Finds a tensor of a copy of the function by the name that it has in the function."""


@dataclass(frozen=True)
class Written:
    """What was written into a function.

    Attributes:
        operations: the new ones, in the order in which they were made.
        places: for each of them, in front of which operation of the function it stands in program order, by name; None
            for behind the last.
        stands_for: by the name of one that a slice runs, the name of the operation that it is a part of.
        constants: the names of those that the slices read, wherever in the function they were made.
    """

    operations: tuple[tf.Operation, ...]
    places: tuple[str | None, ...]
    stands_for: dict[str, str]
    constants: frozenset[str]


class Splitter:
    """Splits regions of a function into any number of slices: the one that saves the most, or inner layers as well.

    Args:
        function: the function, which stays as it is.
        least_bytes: what lives inside a region before it is worth the trouble.
        inner: are inner layers cut, too, whose forward part then runs once more in the backward pass? Not under XLA,
            which would merge both runs into one.

    Attributes:
        regions: what is split, in the order in which it runs; empty where there is nothing.
    """

    def __init__(self, function: FunctionToPlan, least_bytes: int, *, inner: bool = False) -> None:
        self._function = FunctionProgram(function)
        self._in_xla = function.in_xla
        found: Sequence[Region] = ()
        if not inner:
            region = find_region(self._function.program, (), least_bytes)
            found = () if region is None else (region,)
        elif not self._in_xla:
            found = self._take_layers(least_bytes)
        self._around = [Surroundings(self._function, region) for region in found]
        self.regions = tuple(found) if all(around.can_be_cut for around in self._around) else ()

    def _take_layers(self, least_bytes: int) -> Sequence[Region]:
        function = self._function

        def accepts(region: Region) -> bool:
            return Surroundings(function, region).can_be_cut

        layers = find_inner_layers(function.program, least_bytes, accepts)
        if layers is None:
            return ()
        self._function = function.with_copies(layers)
        order = order_around(layers.program, layers.regions) or ()
        return [one for one in order if isinstance(one, Region)]

    @property
    def length(self) -> int:
        """How many slices each region can be cut into; 0 where there is nothing to cut."""
        return min((region.length for region in self.regions), default=0)

    @property
    def saved_bytes(self) -> int:
        """Bytes of what lives inside the regions only."""
        return sum(region.saved_bytes for region in self.regions)

    def write(self, graph: _private.FuncGraph, look: Look, slices: int) -> Written | None:
        """Write the regions in slices, in the function itself or in a copy; None where they cannot be cut so often.

        Args:
            graph: the function or the copy.
            look: finds its tensors.
            slices: how many.
        """
        if slices > self.length:
            return None
        changed = _Changed(graph, look, frozenset(name for around in self._around for name in around.inside))
        operations: list[tf.Operation] = []
        places: list[str | None] = []
        stands_for: dict[str, str] = {}
        for region, around in zip(self.regions, self._around, strict=True):
            before = len(graph.get_operations())
            writer = _Writer(self._function, region, around, changed, slices, self._in_xla)
            with _private.building_freely(graph):
                writer.prepare()
                prepared = len(graph.get_operations()) - before
                write_slices(self._function.program, region, slices, writer)
                writer.hand_over()
            made = graph.get_operations()[before:]
            calls = self._function.program.calls
            first = self._behind_makers(region, [] if around.measured_by is None else [around.measured_by[0]])
            then = self._behind_makers(region, [value for index in region.ways for value in calls[index].inputs])
            operations += made
            places += [*[first] * prepared, *[then] * (len(made) - prepared)]
            stands_for |= writer.stands_for
        read = {tensor.op for op in operations for tensor in op.inputs}
        constants = frozenset(op.name for op in read if op.type == "Const")
        return Written(tuple(operations), tuple(places), stands_for, constants)

    def _behind_makers(self, region: Region, values: Sequence[int]) -> str | None:
        """The first operation of the function behind those outside of the region that make some values."""
        function = self._function
        made = function.program.producer
        operations = function.graph.get_operations()
        numbers = {op.name: number for number, op in enumerate(operations)}
        outside = [value for value in values if value in made and made[value] not in region.ways]
        makers = [numbers[function.tensors[value].op.name] for value in outside]
        # Inputs stand elsewhere in a copy of the function.
        behind = (op.name for op in operations[max(makers, default=-1) + 1 :] if op.type != "Placeholder")
        return next(behind, None)


class _Changed:
    """A function, or a copy of it, while regions are written into it.

    Args:
        graph: the function or the copy.
        look: finds its tensors.
        gone: the names of the operations that slices replace.

    Attributes:
        new: what has replaced tensors, by their names in ``graph``.
    """

    def __init__(self, graph: _private.FuncGraph, look: Look, gone: frozenset[str]) -> None:
        self.graph, self.look, self.gone = graph, look, gone
        self.new: dict[str, tf.Tensor] = {}

    def replace(self, old: tf.Tensor, new: tf.Tensor) -> None:
        """Have everything that stays and reads a tensor read another one."""
        self.new[old.name] = new
        for reader in list(old.consumers()):
            is_told = reader.type in op_facts.METADATA and old.op.name in self.gone
            if reader.name in self.gone or is_told:
                continue
            for place, source in enumerate(reader.inputs):
                if source.name == old.name:
                    _private.update_input(reader, place, new)


class _Writer:
    """Writes slices behind the operations of a function.

    Args:
        function: what is known of the function.
        region: what is cut.
        around: what stands around it.
        changed: the function or a copy of it, to which they are written.
        slices: how many are written.
        in_xla: is the function compiled with XLA, which orders operations as it likes?

    Attributes:
        stands_for: by the name of an operation that a slice runs, the name of the one that it is a part of.
    """

    def __init__(
        self,
        function: FunctionProgram,
        region: Region,
        around: Surroundings,
        changed: _Changed,
        slices: int,
        in_xla: bool,
    ) -> None:
        self._function = function
        self._region = region
        self._around = around
        self._changed = changed
        self._graph = changed.graph
        self._slices = slices
        self._in_xla = in_xla
        self._results: list[tf.Tensor] = []  # Of the slice that is being written.
        self._zeros: dict[int, tf.Tensor] = {}  # For each slice, what is there no sooner than the slice before it.
        self._length: tf.Tensor | None = None  # In units; None where it is known.
        self._starts: dict[tuple[int, int], Any] = {}
        self._corners: dict[tuple[int, str], tf.Tensor] = {}
        self._parts: dict[tuple[int, int, int], tf.Tensor] = {}
        self._flat: dict[int, tf.Tensor] = {}  # Values from outside, their first axes as one.
        self._last: dict[str, tf.Operation] = {}  # By the name of an operation of the region, its newest slice.
        self._sums: dict[int, tf.Tensor] = {}
        self._pieces: dict[int, list[tf.Tensor]] = {}
        self.stands_for: dict[str, str] = {}

    def whole(self, value: int) -> tf.Tensor:
        """A value from outside of the region."""
        tensor = self._original(value)
        return self._changed.new.get(tensor.name, tensor)

    def _original(self, value: int) -> tf.Tensor:
        """A value as the function makes it without slices."""
        return self._changed.look(self._function.tensors[value].name)

    def part(self, value: int, axis: int, cut: Slice) -> tf.Tensor:
        """A slice of a value from outside of the region."""
        key = value, axis, cut.number
        if key not in self._parts:
            whole = self._merged(value, axis)
            start, stop = self._bounds(value, axis, cut)
            axis = axis if axis < len(self._function.shapes[value][0]) else 0
            rest = (1 << axis) - 1
            with tf.device(whole.op.device or None):
                part = tf.strided_slice(
                    whole,
                    self._corner(axis, start),
                    self._corner(axis, stop),
                    [1] * (axis + 1),
                    begin_mask=rest,
                    end_mask=rest,
                    name=f"{self._function.tensors[value].op.name}/part_{cut.number}",
                )
                self._parts[key] = self._tied(part, cut)
        return self._parts[key]

    def _tied(self, part: tf.Tensor, cut: Slice) -> tf.Tensor:
        """The part, under XLA no sooner than the sums of the slice before."""
        if not self._in_xla or not xla_ties.can_tie(part) or not part.dtype.is_floating:
            return part
        if cut.number not in self._zeros:
            if not self._results:
                return part
            self._zeros[cut.number] = tf.add_n([xla_ties.late_zero(_never_empty(one)) for one in self._results])
            self._results.clear()
        return xla_ties.tie(part, self._zeros[cut.number])

    def _corner(self, axis: int, place: Any) -> Any:
        """A place on one axis, at the start of all axes before it."""
        if not tf.is_tensor(place):
            return [*[0] * axis, place]
        if (axis, place.name) not in self._corners:
            self._corners[axis, place.name] = tf.stack([*[0] * axis, place])
        return self._corners[axis, place.name]

    def _merged(self, value: int, axis: int) -> tf.Tensor:
        """A value from outside of the region, with its first axes as one where it is cut along these."""
        whole = self.whole(value)
        shape = self._function.shapes[value][0]
        count = count_merged(shape, axis)
        if count == 1:
            return whole
        if value not in self._flat:
            varying = self._function.varying_axes(value)
            assert all(place < count for place in varying), "a value with another size that is unknown has no such way"
            rows = -1 if varying else math.prod(shape[:count])
            with tf.device(whole.op.device or None):
                self._flat[value] = tf.reshape(whole, [rows, *shape[count:]], name=f"{whole.op.name}/flat")
        return self._flat[value]

    def run(self, call: int, operands: Sequence[tf.Tensor], cut: Slice) -> Sequence[tf.Tensor]:
        """A slice of an operation."""
        function = self._function
        op = function.operations[call]
        way = self._region.ways[call]
        made = function.program.calls[call].outputs[0]
        told = function.facts.told(op, way)
        given = iter(operands)
        inputs = []
        for place, tensor in enumerate(op.inputs):
            if place in parameter_inputs(op):
                inputs.append(self._parameter(op, told[place], tensor.dtype, way, made, cut))
            else:
                inputs.append(next(given))
        held = [
            self._graph.get_operation_by_name(before.name)
            for before in op.control_inputs
            if before.name not in self._around.inside
            and before.name not in self._around.behind
            and not op_facts.may_repeat(before)
        ]
        # Names tell slices apart, so that TensorFlow's optimizer does not merge two that compute the same.
        name = f"{op.name}/again_{cut.number}" if call in function.copies else f"{op.name}/slice_{cut.number}"
        copy = _private.slice_of_operation(self._graph, op, inputs, held, name)
        self.stands_for[copy.name] = op.name
        self._last[op.name] = copy
        return list(copy.outputs)

    def put(self, value: int, axis: int, cut: Slice, made: tf.Tensor) -> None:
        """Keep a part of a result."""
        self._pieces.setdefault(value, []).append(made)
        self._note(made)

    def _note(self, made: tf.Tensor) -> None:
        if self._in_xla and xla_ties.can_be_tied_to(made):
            self._results.append(made)

    def add(self, value: int, cut: Slice, made: tf.Tensor) -> None:
        """Add a term to a result."""
        made = tf.cast(made, _SUMMED_IN.get(made.dtype, made.dtype))
        if value in self._sums:
            name = f"{self._function.tensors[value].op.name}/sum_{cut.number}"
            made = tf.raw_ops.AddV2(x=self._sums[value], y=made, name=name)
        self._sums[value] = made
        self._note(made)

    def hand_over(self) -> None:
        """What read the region's results reads those of the slices."""
        for value, total in self._sums.items():
            shape = self._function.shapes[value][0]
            if total.shape.rank != len(shape):
                total = tf.reshape(total, shape)  # Axes that were summed over together are kept as several of length 1.
            self._replace(value, tf.cast(total, self._function.tensors[value].dtype))
        for value, pieces in self._pieces.items():
            axis = self._region.concatenated[value]
            name = f"{self._function.tensors[value].op.name}/joined"
            shape = self._function.shapes[value][0]
            joined = tf.concat(pieces, axis if axis < len(shape) else 0, name=name)
            if axis >= len(shape):
                varying = self._function.varying_axes(value)
                joined = tf.reshape(joined, [-1 if place in varying else size for place, size in enumerate(shape)])
            self._replace(value, joined)
        for op in self._function.operations:
            if op.name not in self._around.inside and any(
                before.name in self._around.inside for before in op.control_inputs
            ):
                self._hold_anew(self._graph.get_operation_by_name(op.name))

    def _hold_anew(self, op: tf.Operation) -> None:
        """An operation outside that waits for one of the region waits for the last slice of that one, if need be."""
        held = [before for before in op.control_inputs if before.name not in self._around.inside]
        if not op_facts.may_repeat(op):
            held += [self._last[before.name] for before in op.control_inputs if before.name in self._around.inside]
        _private.wait_for_nothing(op)
        _private.add_control_inputs(op, held)

    def prepare(self) -> None:
        """Tell the length of what is cut, and shapes to those who asked for them."""
        if self._around.is_dynamic:
            measured = self._around.measured_by
            assert measured is not None, "a region whose length is unknown reads something that tells it"
            value, axis = measured
            shape = self._function.shapes[value][0]
            count = count_merged(shape, axis)
            found = tf.shape(self.whole(value), name="remat_slices/shape")
            size = found[axis] if count == 1 else tf.reduce_prod(found[:count])
            self._length = tf.math.floordiv(size, with_merged(shape)[axis] // self._region.length)
        for op in self._around.told:
            for place, source in enumerate(op.inputs):
                old = op.outputs[place if op.type == "ShapeN" else 0]
                self._changed.replace(self._changed.look(old.name), self._asked(op.type, source, old.dtype))

    def _asked(self, kind: str, source: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        """The shape of a tensor, or its rank or its number of elements."""
        shape: list[Any] = [self._length_of(size) if varies else size for size, varies in self._around.shape(source)]
        if kind == "Rank":
            return tf.constant(len(shape), dtype)
        if kind == "Size":
            return tf.cast(math.prod(shape), dtype)
        if not any(tf.is_tensor(size) for size in shape):
            return tf.constant(shape, dtype)
        return tf.stack([tf.cast(size, dtype) for size in shape])

    def _length_of(self, size: int) -> tf.Tensor:
        """What becomes of a length that grows with the batch."""
        assert self._length is not None, "a region whose length is known is told of no other length that is not"
        length = self._region.length
        common = math.gcd(size, length)
        return tf.math.floordiv(self._length * (size // common), length // common)

    def _replace(self, value: int, new: tf.Tensor) -> None:
        self._changed.replace(self._original(value), new)

    def _parameter(self, op: tf.Operation, told: Any, dtype: tf.DType, way: Way, made: int, cut: Slice) -> tf.Tensor:
        """A constant, or with the length of the slice in it."""
        flat = told if isinstance(told, list) else [told]
        if None not in flat:
            return tf.constant(told, dtype)
        axis = way.outputs[0]
        assert isinstance(axis, int), "an operation that is told a shape makes a part"
        length: Any
        if self._length is not None and op.type == "Reshape":
            length = -1
        else:
            start, stop = self._bounds(made, axis, cut)
            length = stop - start
        if not tf.is_tensor(length):
            return tf.constant([length if one is None else one for one in flat], dtype)
        return tf.stack([tf.cast(length, dtype) if one is None else tf.constant(one, dtype) for one in flat])

    def _bounds(self, value: int, axis: int, cut: Slice) -> tuple[Any, Any]:
        """Where the slice begins and ends on an axis of a value: numbers, or tensors where the length is unknown."""
        size = with_merged(self._function.shapes[value][0])[axis]
        if self._length is None:
            return cut.of(size)
        units = size // self._region.length
        return self._start(cut.number, units), self._start(cut.number + 1, units)

    def _start(self, number: int, units: int) -> Any:
        """Where a slice begins on an axis that has so many elements a unit."""
        if number == 0:
            return 0
        if (number, units) not in self._starts:
            assert self._length is not None, "asked only where the length is unknown"
            if units == 1:
                start = tf.math.floordiv(self._length * number, self._slices)
            else:
                start = self._start(number, 1) * units
            self._starts[number, units] = start
        return self._starts[number, units]


def _never_empty(tensor: tf.Tensor) -> tf.Tensor:
    """The first element of a tensor, or a zero where it has none."""
    if tensor.shape.is_fully_defined():
        return tensor
    return tf.concat([tf.reshape(tensor, [-1])[:1], tf.zeros([1], tensor.dtype)], 0)
