"""A function with regions that run in slices: ``remat.transform`` finds them, this writes each as a loop.

The loop's body is one slice of the region, forward and backward equations together. What the slices make parts of is
written into one array in place, and what they make terms of is added up: XLA keeps both in the buffers that the loop
carries. A function that differentiates itself needs nothing more to make a head one region, because the gradient of its
loss stands in it as the number 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax

from remat.jax import _private
from remat.jax._private import ClosedJaxpr
from remat.jax.split.products import of_matrices
from remat.jax.split.separable_primitives import sliced_parameters, ways_of
from remat.jax.trace import op_facts
from remat.jax.trace.program import Equation, Flattener, alive, trace_jaxpr
from remat.transform.inner import InnerLayers, find_inner_layers
from remat.transform.order import order_around
from remat.transform.separable import Call, Program, Region, find_region
from remat.transform.split import Slice, write_slice

SCOPE: Final = "remat_slices"
"""In the names of the loops over slices, for reports and for whoever looks a loop up."""

_SUMMED_IN: Final = {"bfloat16": jnp.float32, "float16": jnp.float32}
"""The type in which slices are added up, where it is not the result's own."""


@dataclass(frozen=True)
class _Turned:
    """What a sum over slices is wanted as.

    Attributes:
        value: the transposed sum.
        axes: for each of its axes, that of the sum.
    """

    value: int
    axes: tuple[int, ...]


class Splitter:
    """Splits regions of a function into any number of slices: the one that saves the most, or inner layers as well.

    Args:
        closed: the function, traced.
        least_bytes: what lives inside a region before it is worth the trouble, values that are fused away counted.
        inner: are inner layers cut, too, whose forward part then runs once more in the backward part?

    Attributes:
        regions: what is split; empty where there is nothing.
    """

    def __init__(self, closed: ClosedJaxpr, least_bytes: int, *, inner: bool = False) -> None:
        flattener = Flattener()
        self._inputs = tuple(flattener.value(var.aval) for var in closed.jaxpr.invars)
        self._outputs = flattener.add(closed, self._inputs)
        self._avals = list(flattener.avals)
        self._constants = flattener.constants
        self._equations = tuple(alive(flattener.equations, self._outputs))
        self._program = Program(
            tuple(map(_call, self._equations)),
            tuple(tuple(getattr(aval, "shape", ())) for aval in self._avals),
            tuple(map(op_facts.size_bytes, self._avals)),
            frozenset(atom for atom in self._outputs if isinstance(atom, int)),
            frozenset(value for one in self._equations if _holds_nothing(one) for value in one.outputs),
        )
        # By the ids of the function's own values, which copies of equations have besides theirs.
        self._own_values = tuple(range(len(self._avals)))
        self.regions: tuple[Region, ...] = ()
        if inner:
            self._take_layers(find_inner_layers(self._program, least_bytes))
        elif (region := find_region(self._program, (), least_bytes)) is not None:
            self.regions = (region,)
        self._order = self._order_around(self.regions)
        if self._order is None:
            self.regions = ()
        self._turned = self._find_turned()

    @property
    def length(self) -> int:
        """How many slices each region can be cut into; 0 where there is nothing to cut."""
        return min((region.length for region in self.regions), default=0)

    @property
    def values(self) -> frozenset[int]:
        """What the regions make, by the ids that ``program_of`` gives the values of the same function."""
        made = (value for region in self.regions for index in region.ways for value in self._equations[index].outputs)
        return frozenset(self._own_values[value] for value in made)

    def split(self, slices: int) -> ClosedJaxpr | None:
        """The function with its regions in about so many slices; None where they cannot be cut so often.

        All slices have as many units but the last, which has the rest. So there may be fewer than were asked for.
        """
        if slices > self.length:
            return None

        def run(*arguments: Any) -> list[Any]:
            values: dict[int, Any] = dict(zip(self._inputs, arguments, strict=True))
            values.update(self._constants)
            for one in self._order or ():
                if isinstance(one, Region):
                    values.update(self._loop(one, slices, values))
                else:
                    self._evaluate(one, values)
            return [values[atom] if isinstance(atom, int) else atom.val for atom in self._outputs]

        make: Any = jax.ShapeDtypeStruct
        avals = [self._avals[value] for value in self._inputs]
        shapes = [make(one.shape, one.dtype, weak_type=bool(getattr(one, "weak_type", False))) for one in avals]
        return trace_jaxpr(run, shapes)[0]

    def _take_layers(self, layers: InnerLayers | None) -> None:
        """Write the copies of equations that inner layers need."""
        if layers is None:
            return
        self._equations = tuple(
            _with_values(self._equations[origin], call)
            for origin, call in zip(layers.origin, layers.program.calls, strict=True)
        )
        self._avals = [self._avals[value] for value in layers.value_origin]
        self._own_values = layers.value_origin
        self._program, self.regions = layers.program, layers.regions

    def _find_turned(self) -> dict[int, _Turned]:
        """The transposition of each sum over slices that nobody reads but this one: it is summed up transposed.

        That is what XLA makes of a product and its transposition, but not where a sum stands between the two.
        """
        readers: dict[int, list[Equation]] = {}
        for one in self._equations:
            for value in one.reads:
                readers.setdefault(value, []).append(one)
        found = {}
        for region in self.regions:
            for value in region.summed:
                axes, last = tuple(range(len(self._avals[value].shape))), value
                while [one.eqn.primitive.name for one in readers.get(last, ())] == ["transpose"]:
                    if last in self._outputs:
                        break
                    (one,) = readers[last]
                    axes, last = tuple(axes[axis] for axis in one.eqn.params["permutation"]), one.outputs[0]
                if axes != tuple(sorted(axes)):
                    found[value] = _Turned(last, axes)
        return found

    def _evaluate(self, number: int, values: dict[int, Any]) -> None:
        one = self._equations[number]
        if not values.keys() >= set(one.reads) or values.keys() >= set(one.outputs):
            return  # A transposition that its sum has been made with.
        read = [values[atom] if isinstance(atom, int) else atom.val for atom in one.inputs]
        values.update(zip(one.outputs, _private.evaluate(one.eqn, read), strict=True))

    def _order_around(self, regions: Sequence[Region]) -> tuple[int | Region, ...] | None:
        """The order in which the equations run; None where one with an effect would stand behind a later one."""
        order = order_around(self._program, regions)
        effects = [one for one in order or () if isinstance(one, int) and self._equations[one].eqn.effects]
        return order if effects == sorted(effects) else None

    def _loop(self, region: Region, slices: int, values: dict[int, Any]) -> dict[int, Any]:
        """What the region makes for others, slice by slice."""
        units = -(-region.length // slices)
        count = region.length // units
        buffers = {value: self._buffer(value, value in region.summed) for value in self._made(region)}
        with jax.named_scope(SCOPE):
            buffers = self._slices(region, values, buffers, 0, units, count)
            if rest := region.length - count * units:
                buffers = self._slices(region, values, buffers, count * units, rest, 1)
        made = {value: buffer.astype(self._avals[value].dtype) for value, buffer in buffers.items()}
        return {self._turned[value].value if value in self._turned else value: one for value, one in made.items()}

    def _made(self, region: Region) -> list[int]:
        return sorted((*region.concatenated, *region.summed))

    def _buffer(self, value: int, is_summed: bool) -> Any:
        aval = self._avals[self._turned[value].value if value in self._turned else value]
        dtype = _SUMMED_IN.get(str(aval.dtype), aval.dtype) if is_summed else aval.dtype
        return jnp.zeros(aval.shape, dtype)

    def _slices(
        self, region: Region, values: dict[int, Any], buffers: dict[int, Any], first: int, units: int, count: int
    ) -> dict[int, Any]:
        """Some slices of as many units each, beginning at a unit; ``buffers`` with what they make."""

        def one(number: Any, carried: dict[int, Any]) -> dict[int, Any]:
            start = first + number * units
            writer = _Writer(self._program, self._equations, region, values, carried, self._turned, start)
            write_slice(self._program, region, Slice(0, 0, units, region.length), writer)
            return writer.buffers

        made: dict[int, Any] = lax.fori_loop(0, count, one, buffers)
        return made


def _call(one: Equation) -> Call:
    return Call(one.reads, one.outputs, ways_of(one.eqn, [isinstance(atom, int) for atom in one.inputs]))


def _with_values(one: Equation, call: Call) -> Equation:
    """The equation with the values that a call reads and makes."""
    read = iter(call.inputs)
    inputs = tuple(next(read) if isinstance(atom, int) else atom for atom in one.inputs)
    return dataclasses.replace(one, inputs=inputs, outputs=call.outputs)


def _holds_nothing(one: Equation) -> bool:
    return op_facts.is_view(one.eqn) or op_facts.holds_nothing(one.eqn)


class _Writer:
    """Writes one slice inside of the loop's body.

    Args:
        program: what the search for regions sees of the function.
        equations: of the function.
        region: what is cut.
        values: what is known outside of the region.
        buffers: for what is read outside, which it changes.
        turned: the transpositions of what is summed up transposed.
        start: the slice's first unit, which the loop tells.
    """

    def __init__(
        self,
        program: Program,
        equations: Sequence[Equation],
        region: Region,
        values: dict[int, Any],
        buffers: dict[int, Any],
        turned: dict[int, _Turned],
        start: Any,
    ) -> None:
        self._program = program
        self._equations = equations
        self._region = region
        self._values = values
        self._turned = turned
        self._start = start
        self.buffers = dict(buffers)

    def whole(self, value: int) -> Any:
        """A value from outside of the region."""
        return self._values[value]

    def part(self, value: int, axis: int, cut: Slice) -> Any:
        """A slice of a value from outside of the region."""
        size = self._values[value].shape[axis]
        return lax.dynamic_slice_in_dim(self._values[value], self._at(size, cut), cut.of(size)[1], axis)

    def run(self, call: int, operands: Sequence[Any], cut: Slice) -> Sequence[Any]:
        """A slice of an equation."""
        one = self._equations[call]
        given = iter(operands)
        read = [next(given) if isinstance(atom, int) else atom.val for atom in one.inputs]
        part = self._region.ways[call].outputs[0]
        made = cut.shape(self._program.shapes[one.outputs[0]], part if isinstance(part, int) else None)
        params = sliced_parameters(one.eqn, [jnp.shape(array) for array in read], made)
        eqn = one.eqn.replace(params=params)
        product = of_matrices(eqn, read) if eqn.primitive.name == "dot_general" else None
        return _private.evaluate(eqn, read) if product is None else product

    def put(self, value: int, axis: int, cut: Slice, made: Any) -> None:
        """Write a part of a result to its place."""
        buffer = self.buffers[value]
        self.buffers[value] = lax.dynamic_update_slice_in_dim(buffer, made, self._at(buffer.shape[axis], cut), axis)

    def add(self, value: int, cut: Slice, made: Any) -> None:
        """Add a term to a result."""
        buffer = self.buffers[value]
        if value in self._turned:
            made = lax.transpose(made, self._turned[value].axes)
        self.buffers[value] = buffer + made.astype(buffer.dtype)

    def _at(self, size: int, cut: Slice) -> Any:
        return self._start * (size // cut.length)
