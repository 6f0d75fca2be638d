"""Equations of ``shard_map``'s bodies that were taken apart, evaluated together inside of one ``shard_map``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from remat.jax import _private
from remat.jax.trace.maps import Map
from remat.jax.trace.program import Equation, Instruction


def map_of(instruction: Instruction) -> Map | None:
    """What all equations of an instruction are mapped over; None where they do not come from the same kind of map."""
    found = {None if one.mapped is None else one.mapped.map for one in instruction.equations}
    return found.pop() if len(found) == 1 else None


def evaluate_together(equations: Sequence[Equation], values: Mapping[int, Any], wanted: Sequence[int]) -> list[Any]:
    """The arrays of all devices that equations of one map make.

    One call of ``shard_map`` for each equation would take JAX some two milliseconds apiece to trace.

    Args:
        equations: mapped over the same axes, in an order in which they can run.
        values: what exists, by id: arrays of all devices.
        wanted: ids of the values that are read outside.
    """
    reads: dict[int, PartitionSpec] = {}
    specs: dict[int, PartitionSpec] = {}
    for equation in equations:
        assert equation.mapped is not None, "only equations of maps are evaluated together"
        for value, spec in zip(equation.reads, equation.mapped.in_specs, strict=True):
            if value not in specs:
                reads.setdefault(value, spec)
        specs.update(zip(equation.outputs, equation.mapped.out_specs, strict=True))
        of = equation.mapped.map

    def body(*given: Any) -> tuple[Any, ...]:
        own = dict(zip(reads, given, strict=True))
        for equation in equations:
            read = [
                as_inside(own[atom], var.aval) if isinstance(atom, int) else atom.val
                for atom, var in zip(equation.inputs, equation.eqn.invars, strict=True)
            ]
            own.update(zip(equation.outputs, _private.evaluate(equation.eqn, read), strict=True))
        return tuple(as_outside(own[value], specs[value]) for value in wanted)

    mapped = jax.shard_map(
        body,
        mesh=of.mesh,
        in_specs=tuple(reads.values()),
        out_specs=tuple(specs[value] for value in wanted),
        axis_names=set(of.axes),
        check_vma=of.check_vma,
    )
    return list(mapped(*(values[value] for value in reads)))


def as_inside(array: Any, aval: Any) -> Any:
    """A part of an array of all devices as the body of a map reads it."""
    return array if array.shape == aval.shape else array.reshape(aval.shape)


def as_outside(array: Any, spec: PartitionSpec) -> Any:
    """A number that differs from device to device needs an axis, as in ``Map.whole``."""
    return array.reshape((1,)) if not array.shape and len(spec) else array
