"""Writes the two loops of a scan again: the forward one keeps less, the backward one computes what it misses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
from jax import lax

from remat.jax import _private
from remat.jax.scans.pairs import Pair
from remat.jax.trace.program import Atom, Step, alive

BODY_NAME = "remat_body_"

Body: TypeAlias = Callable[[Any, Any], tuple[Any, Any]]
"""The body of a loop: (carry, slices) to (carry, what is stacked)."""


def _read(values: Mapping[int, Any], atom: Atom) -> Any:
    return values[atom] if isinstance(atom, int) else atom.val


def _execute(steps: Sequence[Step], values: dict[int, Any], loop: int) -> None:
    for step in steps:
        # The compiler keeps the name, so that its text tells which of these talk to other devices.
        with jax.named_scope(f"{BODY_NAME}{loop}_{min(step.outputs, default=0)}"):
            made = _private.evaluate(step.eqn, [_read(values, atom) for atom in step.inputs])
        values.update(zip(step.outputs, made, strict=True))


def _read_inside(outer: Mapping[int, Any], broadcasts: Mapping[int, Step], atom: Atom) -> Any:
    """A constant of a loop, for its body: what is much larger than what it is made of is made there."""
    step = broadcasts.get(atom) if isinstance(atom, int) else None
    if step is None:
        return _read(outer, atom)
    (made,) = _private.evaluate(step.eqn, [_read(outer, source) for source in step.inputs])
    return made


def run_first(
    pair: Pair, choice: frozenset[int], outer: Mapping[int, Any], broadcasts: Mapping[int, Step]
) -> tuple[dict[int, Any], dict[int, Any]]:
    """The forward loop; returns its outputs by the flat program's ids, and the kept stacks by the body's.

    Args:
        pair: the loops.
        choice: ids of the body's values to stack.
        outer: values of the flat program.
        broadcasts: by value, steps of the flat program that the bodies repeat instead of reading their result.
    """
    loop, params = pair.first, pair.first.eqn.params
    order = sorted(choice)

    def body(carry: Any, each: Any) -> Any:
        constants = [_read_inside(outer, broadcasts, atom) for atom in loop.constants]
        values: dict[int, Any] = dict(zip(pair.first_inputs, (*constants, *carry, *each), strict=True))
        values.update(pair.constants)
        _execute(alive(pair.first_steps, [*pair.first_outputs[: len(carry)], *wanted, *order]), values, pair.forward)
        new_carry = [_read(values, atom) for atom in pair.first_outputs[: len(carry)]]
        return new_carry, ([_read(values, atom) for atom in wanted], [values[value] for value in order])

    wanted = [pair.first_outputs[params["num_carry"] + number] for number in pair.kept_stacks]
    carry, (stacks, kept) = lax.scan(
        body,
        [_read(outer, atom) for atom in loop.carry],
        [_read(outer, atom) for atom in loop.stacked],
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    made = dict(zip(loop.outputs[: params["num_carry"]], carry, strict=True))
    made.update({loop.stacks[number]: stack for number, stack in zip(pair.kept_stacks, stacks, strict=True)})
    return made, dict(zip(order, kept, strict=True))


def run_second(
    pair: Pair,
    kept: Mapping[int, Any],
    outer: Mapping[int, Any],
    broadcasts: Mapping[int, Step],
    planned: Callable[[Body, Any, Any], Body],
) -> dict[int, Any]:
    """The backward loop; what was not kept is made again in each iteration, right before it is read.

    Args:
        pair: the loops.
        kept: the forward loop's stacks by the body's ids.
        outer: values of the flat program.
        broadcasts: as of ``run_first``.
        planned: what else is done to the body, given its carry and the stacked arrays.
    """
    loop, params = pair.second, pair.second.eqn.params
    given = pair.first.eqn.params["num_consts"]
    carried = pair.first.eqn.params["num_carry"]
    steps = _lazily(pair, frozenset(kept))
    own_stacks = [
        atom
        for atom, value in zip(loop.stacked, pair.second_inputs[len(loop.inputs) - len(loop.stacked) :], strict=True)
        if value is not None
    ]

    def body(carry: Any, each: Any) -> Any:
        own, first_stacked, again = each
        constants = [_read_inside(outer, broadcasts, atom) for atom in loop.constants]
        first_constants = [_read_inside(outer, broadcasts, atom) for atom in pair.first.constants]
        values: dict[int, Any] = {**pair.constants, **again}
        values.update(zip(pair.first_inputs[:given], first_constants, strict=True))
        values.update(zip(pair.first_inputs[given + carried :], first_stacked, strict=True))
        rest = iter(own)
        for number, value in enumerate(pair.second_inputs):
            if value is None:
                continue
            if number < len(constants):
                values[value] = constants[number]
            elif number < len(constants) + len(carry):
                values[value] = carry[number - len(constants)]
            else:
                values[value] = next(rest)
        _execute(steps, values, pair.forward)
        results = [_read(values, atom) for atom in pair.second_outputs]
        return results[: len(carry)], results[len(carry) :]

    start = [_read(outer, atom) for atom in loop.carry]
    stacked = (
        [_read(outer, atom) for atom in own_stacks],
        [_read(outer, atom) for atom in pair.first.stacked],
        dict(kept),
    )
    carry, stacks = lax.scan(
        planned(body, start, stacked),
        start,
        stacked,
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return dict(zip(loop.outputs, (*carry, *stacks), strict=True))


def _lazily(pair: Pair, kept: frozenset[int]) -> list[Step]:
    """The backward body, with what it misses of the forward body computed right before its first reader."""
    maker = {value: step for step in pair.first_steps for value in step.outputs}
    there = set(kept) | pair.free
    ordered: list[Step] = []

    def need(value: int) -> None:
        pending = [value]
        while pending:
            top = pending[-1]
            if top in there or top not in maker:
                pending.pop()
                continue
            missing = [v for v in maker[top].reads if v not in there and v in maker]
            if missing:
                pending += missing
                continue
            ordered.append(maker[top])
            there.update(maker[top].outputs)
            pending.pop()

    for step in pair.second_steps:
        for value in step.reads:
            need(value)
        ordered.append(step)
    for atom in pair.second_outputs:
        if isinstance(atom, int):
            need(atom)
    return ordered
