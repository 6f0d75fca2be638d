"""A flat program whose pairs of loops are run by choices, inside of calls of ``shard_map`` and outside of them.

What lies in the bodies of calls that were taken apart (``remat.jax.trace.maps``) is put into calls again, a stretch of
equations at a time. What a forward loop leaves there to its backward loop, in another call, is one array of all devices
for each stack, of which each device has its own part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import PartitionSpec

from remat.jax import _private
from remat.jax.emit.in_maps import as_inside, as_outside
from remat.jax.scans.light_loops import inflates
from remat.jax.scans.loops import Body, LoopPair, Way, read
from remat.jax.scans.pairs import Pair
from remat.jax.trace.maps import Map
from remat.jax.trace.program import Atom, Equation, Flattener


class Rewritten:
    """A flat program whose pairs of loops are run by choices.

    Args:
        flattener: has written the program.
        equations: those of it that are needed.
        inputs, outputs: of the program.
    """

    def __init__(
        self,
        flattener: Flattener,
        equations: Sequence[Equation],
        inputs: Sequence[int],
        outputs: Sequence[Atom],
    ) -> None:
        self._constants = flattener.constants
        self._equations = equations
        self._inputs = inputs
        self._outputs = outputs
        self._broadcasts = broadcasts_of(equations, flattener.avals)
        self._stretches = _stretches(equations)
        self._layouts: dict[int, tuple[Any, PartitionSpec]] = {}
        for equation in equations:
            if equation.mapped is not None:
                read = [var for atom, var in zip(equation.inputs, equation.eqn.invars, strict=True) if _is_id(atom)]
                for value, var, spec in zip(equation.reads, read, equation.mapped.in_specs, strict=True):
                    self._layouts[value] = var.aval, spec
                for value, var, spec in zip(
                    equation.outputs, equation.eqn.outvars, equation.mapped.out_specs, strict=True
                ):
                    self._layouts[value] = var.aval, spec

    def in_ways(self, ways: Sequence[Way], planned: Callable[[Body, Any, Any], Body]) -> Callable[..., list[Any]]:
        """The flat function; there is a way for each pair, and ``planned`` is as in ``LoopPair``."""

        def run(*arguments: Any) -> list[Any]:
            loops = [LoopPair(way, self._broadcasts_for(way.pair), planned) for way in ways]
            program = Run(self._equations, loops, self._outputs, self._layouts)
            values: dict[int, Any] = {**dict(zip(self._inputs, arguments, strict=True)), **self._constants}
            for stretch in self._stretches:
                program.add(stretch, values)
            return [read(values, atom) for atom in self._outputs]

        return run

    def _broadcasts_for(self, pair: Pair) -> dict[int, Equation]:
        """The broadcasts that a pair's bodies may repeat: those of the same map, or outside of all maps, as it is."""
        own = self._equations[pair.forward].map
        return {value: one for value, one in self._broadcasts.items() if one.map == own}


class Run:
    """One run of the program.

    Args:
        equations: of the program.
        loops: its pairs, to be run by choices.
        outputs: of the program.
        layouts: by id, the shape of a value in the body of a map and how an array of all devices holds it.
    """

    def __init__(
        self,
        equations: Sequence[Equation],
        loops: Sequence[LoopPair],
        outputs: Sequence[Atom],
        layouts: Mapping[int, tuple[Any, PartitionSpec]] = MappingProxyType({}),
    ) -> None:
        self._equations = equations
        self._starts = {loop.pair.forward: loop for loop in loops}
        self._ends = {loop.pair.backward: loop for loop in loops}
        self._layouts = layouts
        self._last_read = {atom: len(equations) for atom in outputs if isinstance(atom, int)}
        for number in range(len(equations)):
            for value in self.reads(number):
                self._last_read[value] = max(self._last_read.get(value, -1), number)

    def add(self, stretch: range, values: dict[int, Any]) -> None:
        """Evaluate a stretch of equations, and add what they make to the values."""
        of = self._equations[stretch[0]].map
        if of is None:
            self.evaluate(stretch, values)
        else:
            self._evaluate_in_map(of, stretch, values)

    def reads(self, number: int) -> Sequence[int]:
        """What an equation reads, or the loop in its place."""
        if number in self._starts:
            return sorted(self._starts[number].read_by_first)
        if number in self._ends:
            return sorted(self._ends[number].read_by_second)
        return self._equations[number].reads

    def _makes(self, number: int) -> Sequence[int]:
        return self._starts[number].made_by_first if number in self._starts else self._equations[number].outputs

    def evaluate(self, stretch: range, values: dict[int, Any]) -> None:
        """Evaluate equations of one map, or outside of all maps, as ``add`` does."""
        for number in stretch:
            if number in self._starts:
                values.update(self._starts[number].run_first(values))
            elif number in self._ends:
                values.update(self._ends[number].run_second(values))
            else:
                equation = self._equations[number]
                made = _private.evaluate(equation.eqn, [read(values, atom) for atom in equation.inputs])
                values.update(zip(equation.outputs, made, strict=True))

    def _evaluate_in_map(self, of: Map, stretch: range, values: dict[int, Any]) -> None:
        made = [value for number in stretch for value in self._makes(number)]
        there = set(made)
        read = [v for v in dict.fromkeys(v for number in stretch for v in self.reads(number)) if v not in there]
        wanted = [value for value in made if self._last_read.get(value, -1) >= stretch.stop]
        given = [loop for number, loop in self._ends.items() if number in stretch and loop.pair.forward not in stretch]
        handed = [
            loop for number, loop in self._starts.items() if number in stretch and loop.pair.backward not in stretch
        ]
        specs = [self._layouts[value][1] for value in wanted]
        specs += [spec for loop in handed for spec in loop.left_of(of.own_spec)]
        left = [array for loop in given for array in jax.tree.leaves(loop.left)]
        in_specs = [self._layouts[value][1] for value in read]
        in_specs += [spec for loop in given for spec in loop.left_of(of.own_spec)]

        def body(*arrays: Any) -> tuple[Any, ...]:
            own = {
                value: as_inside(array, self._layouts[value][0])
                for value, array in zip(read, arrays[: len(read)], strict=True)
            }
            rest = iter(arrays[len(read) :])
            for loop in given:
                loop.left = jax.tree.map(lambda _: next(rest), loop.left)
            self.evaluate(stretch, own)
            made = [as_outside(own[value], self._layouts[value][1]) for value in wanted]
            return (*made, *(array for loop in handed for array in jax.tree.leaves(loop.left)))

        mapped = jax.shard_map(
            body,
            mesh=of.mesh,
            in_specs=tuple(in_specs),
            out_specs=tuple(specs),
            axis_names=set(of.axes),
            check_vma=of.check_vma,
        )
        arrays = iter(mapped(*(values[value] for value in read), *left))
        values.update((value, next(arrays)) for value in wanted)
        for loop in handed:
            loop.left = jax.tree.map(lambda _: next(arrays), loop.left)


def _stretches(equations: Sequence[Equation]) -> list[range]:
    """Equations that follow one another in maps of one kind, or one equation alone."""
    found: list[range] = []
    for number, equation in enumerate(equations):
        own = equation.map
        if found and own is not None and equations[found[-1].start].map == own:
            found[-1] = range(found[-1].start, number + 1)
        else:
            found.append(range(number, number + 1))
    return found


def _is_id(atom: Atom) -> bool:
    return isinstance(atom, int)


def broadcasts_of(equations: Sequence[Equation], avals: Sequence[Any]) -> dict[int, Equation]:
    """The equations that only repeat what they read many times over, by what they make."""
    return {one.outputs[0]: one for one in equations if inflates(one, avals)}
