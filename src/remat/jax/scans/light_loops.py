"""Loops that only spread out small arrays, such as causal masks, put into the loops that read what they stack.

Differentiation takes what no iteration of a loop changes out of it. Of layers whose attention runs in chunks, it makes
the masks of all chunks in a loop of their own, before the first layer: two arrays that lie in memory for the whole
step, though each chunk could make its own from a few numbers. Here each iteration makes its own again. The same holds
of broadcasts that loops of loops read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from remat.jax import _private
from remat.jax._private import JaxprEqn
from remat.jax.trace import op_facts
from remat.jax.trace.program import Atom, Equation


def with_light_loops_inside(equations: Sequence[Equation], avals: Sequence[Any]) -> list[Equation]:
    """The equations with each light loop in the loops that read it, which no longer read what it stacks.

    Args:
        equations: a flat program. The light loops stay in it, needed or not.
        avals: for each value id, its shape and dtype.
    """
    made_by: dict[int, Equation] = {}
    for one in equations:
        is_light = inflates(one, avals) or _is_light_loop(one, avals) or _is_generated(one, made_by)
        if is_light and one.mapped is None:
            made_by.update(dict.fromkeys(one.outputs, one))
    return [_holding(one, made_by, avals) if made_by and one.eqn.primitive.name == "scan" else one for one in equations]


def _is_light_loop(equation: Equation, avals: Sequence[Any]) -> bool:
    return equation.eqn.primitive.name == "scan" and _is_light(equation.eqn) and _is_much_larger(equation, avals)


def _is_light(eqn: JaxprEqn) -> bool:
    """Is an equation light, or a loop that carries nothing and holds nothing else?"""
    if eqn.primitive.name != "scan":
        return op_facts.is_light(eqn)
    return not _private.scan_counts(eqn)[1] and all(map(_is_light, eqn.params["jaxpr"].jaxpr.eqns))


def _is_generated(equation: Equation, made_by: Mapping[int, Equation]) -> bool:
    """Is it made of nothing but what is light itself, such as a comparison of two counters?"""
    return op_facts.is_light(equation.eqn) and all(value in made_by for value in equation.reads)


def inflates(equation: Equation, avals: Sequence[Any]) -> bool:
    """Does an equation only repeat what it reads many times over?"""
    return equation.eqn.primitive.name in ("broadcast_in_dim", "iota") and _is_much_larger(equation, avals)


def _is_much_larger(equation: Equation, avals: Sequence[Any]) -> bool:
    made, read = (
        sum(op_facts.size_bytes(avals[value]) for value in values) for values in (equation.outputs, equation.reads)
    )
    return made >= op_facts.INFLATION * read


def _holds_loops(eqn: JaxprEqn) -> bool:
    inner = [one for jaxpr in op_facts.inner_jaxprs(eqn) for one in jaxpr.eqns]
    return any(one.primitive.name == "scan" or _holds_loops(one) for one in inner)


def _light_operands(equation: Equation, made_by: Mapping[int, Equation]) -> dict[int, Equation]:
    """What a loop would read of light equations and can make itself, by the place among its inputs."""
    length, (given, carried) = int(equation.eqn.params["length"]), _private.scan_counts(equation.eqn)
    holds_loops = _holds_loops(equation.eqn)
    light: dict[int, Equation] = {}
    for place, atom in enumerate(equation.inputs):
        found = made_by.get(atom) if isinstance(atom, int) else None
        if found is None or given <= place < given + carried:
            continue
        is_loop = found.eqn.primitive.name == "scan"
        if (is_loop and found.eqn.params["length"] == length) if place >= given else (is_loop or holds_loops):
            light[place] = found
    return light


def _needed(equation: Equation, light: Mapping[int, Equation], made_by: Mapping[int, Equation]) -> list[int]:
    """The values from outside that a loop needs which makes ``light`` itself."""
    given, _ = _private.scan_counts(equation.eqn)
    around: list[Atom] = []  # What is read outside of the body, or not light.
    inside: list[int] = []
    for place, atom in enumerate(equation.inputs):
        if place not in light:
            around.append(atom)
            continue
        constants = _private.scan_counts(light[place].eqn)[0] if place >= given else len(light[place].inputs)
        around += light[place].inputs[constants:]
        inside += [one for one in light[place].inputs[:constants] if isinstance(one, int)]
    read_around = [atom for atom in around if isinstance(atom, int)]
    return list(dict.fromkeys([*read_around, *_sources(inside, made_by)]))


def _holding(equation: Equation, made_by: Mapping[int, Equation], avals: Sequence[Any]) -> Equation:
    """A loop that makes what it would read of light loops: as a whole where it reads all of it, else slice by slice."""
    light = _light_operands(equation, made_by)
    if not light or equation.mapped is not None:
        return equation
    params = equation.eqn.params
    length, (given, carried) = int(params["length"]), _private.scan_counts(equation.eqn)
    ids = _needed(equation, light, made_by)

    def run(*arrays: Any) -> Any:
        values = dict(zip(ids, arrays, strict=True))

        def read(atom: Atom) -> Any:
            if isinstance(atom, int) and atom not in values:
                return _made(made_by[atom], atom, None, read)
            return values[atom] if isinstance(atom, int) else np.asarray(atom.val, getattr(atom.aval, "dtype", None))

        def body(carry: Any, slices: Any) -> Any:
            inputs: list[Any] = []
            for place, atom in enumerate(equation.inputs):
                if place in light:
                    inputs.append(_made(light[place], atom, slices.get(place), read))
                elif place < given:
                    inputs.append(read(atom))
                else:
                    inputs.append(carry[place - given] if place < given + carried else slices[place])
            results = _private.jaxpr_as_fun(params["jaxpr"])(*inputs)
            return results[:carried], results[carried:]

        stacked: dict[int, Any] = {}
        for place in range(given + carried, len(equation.inputs)):
            stacked[place] = read(equation.inputs[place]) if place not in light else _stacked_of(light[place], read)
        start = [read(atom) for atom in equation.inputs[given : given + carried]]
        unroll = params["unroll"]
        carry, stacks = lax.scan(body, start, stacked, length=length, reverse=params["reverse"], unroll=unroll)
        return [*carry, *stacks]

    closed = jax.make_jaxpr(run)(*(_private.shape_of_aval(avals[value]) for value in ids))
    if len(closed.jaxpr.eqns) != 1 or closed.consts:
        return equation  # Something of it does not belong to the loop, as where its constants are scalars.
    (eqn,) = closed.jaxpr.eqns
    atom_of = dict(zip(closed.jaxpr.invars, ids, strict=True))
    inputs = tuple(var if isinstance(var, _private.Literal) else atom_of[var] for var in eqn.invars)
    eqn = eqn.replace(source_info=equation.eqn.source_info)
    return dataclasses.replace(equation, eqn=eqn, inputs=inputs)


def _sources(values: Sequence[int], made_by: Mapping[int, Equation]) -> list[int]:
    """What values are made of that is not light itself."""
    found: list[int] = []
    pending = list(values)
    while pending:
        value = pending.pop()
        if value in made_by:
            pending += made_by[value].reads
        else:
            found.append(value)
    return found


def _stacked_of(loop: Equation, read: Any) -> list[Any]:
    return [read(atom) for atom in loop.inputs[_private.scan_counts(loop.eqn)[0] :]]


def _made(loop: Equation, value: Atom, slices: Any, read: Any) -> Any:
    """What a light loop makes: all of it, or the slice of one iteration."""
    number = loop.outputs.index(value)
    if slices is None:
        return _private.evaluate(loop.eqn, [read(atom) for atom in loop.inputs])[number]
    constants = [read(atom) for atom in loop.inputs[: _private.scan_counts(loop.eqn)[0]]]
    return _private.jaxpr_as_fun(loop.eqn.params["jaxpr"])(*constants, *slices)[number]
