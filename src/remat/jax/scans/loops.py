"""The two loops that differentiation makes of one ``lax.scan``: found, and written again so that they keep less.

The forward loop stacks what the backward loop reads. Written again, it stacks fewer values, and each iteration of the
backward loop computes what is missing right before it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import jax
from jax import lax

from remat.jax import _private
from remat.jax._private import JaxprEqn
from remat.jax.trace import op_facts
from remat.jax.trace.program import Atom, Equation, Flattener, alive

BODY_NAME: Final = "remat_body_"
"""What the scopes in a body that is written again begin with; the compiler keeps the names of scopes in its text."""

Body: TypeAlias = Callable[[Any, Any], tuple[Any, Any]]
"""The body of a loop: (carry, slices) -> (carry, what is stacked)."""


@dataclass(frozen=True)
class Loop:
    """One scan of the flat program: its equation, and its operands by their role."""

    eqn: JaxprEqn
    inputs: tuple[Atom, ...]
    outputs: tuple[int, ...]

    @property
    def constants(self) -> tuple[Atom, ...]:
        """What every iteration reads."""
        return self.inputs[: self.eqn.params["num_consts"]]

    @property
    def carry(self) -> tuple[Atom, ...]:
        """What the first iteration starts from."""
        first = self.eqn.params["num_consts"]
        return self.inputs[first : first + self.eqn.params["num_carry"]]

    @property
    def stacked(self) -> tuple[Atom, ...]:
        """Arrays of which each iteration reads one slice."""
        return self.inputs[self.eqn.params["num_consts"] + self.eqn.params["num_carry"] :]

    @property
    def stacks(self) -> tuple[int, ...]:
        """What the iterations leave, stacked."""
        return self.outputs[self.eqn.params["num_carry"] :]


@dataclass(frozen=True)
class Pair:
    """The two loops of one scan, first the forward one. Both bodies share one set of value ids.

    Attributes:
        forward, backward: which equations of the flat program the loops are.
        first, second: the loops.
        avals: for each value id of the bodies, its shape and dtype.
        constants: arrays that the bodies captured, by value id.
        first_equations, second_equations: the bodies.
        first_inputs, second_inputs: ids of the arguments of a body, in the order of the loop's operands. In the second,
            None stands for what the forward body has made or been given, which has its id there.
        first_outputs, second_outputs: what the bodies return.
        kept_stacks: which of the forward loop's stacks something else than the backward loop reads.
        needed: ids of the forward body's values that the backward body reads.
    """

    forward: int
    backward: int
    first: Loop
    second: Loop
    avals: tuple[Any, ...]
    constants: Mapping[int, Any]
    first_equations: tuple[Equation, ...]
    second_equations: tuple[Equation, ...]
    first_inputs: tuple[int, ...]
    second_inputs: tuple[int | None, ...]
    first_outputs: tuple[Atom, ...]
    second_outputs: tuple[Atom, ...]
    kept_stacks: tuple[int, ...]
    needed: tuple[int, ...]

    @property
    def free(self) -> frozenset[int]:
        """What the backward body reads without a stack: constants, and slices of what the forward loop is given."""
        given, carried = self.first.eqn.params["num_consts"], self.first.eqn.params["num_carry"]
        return frozenset((*self.first_inputs[:given], *self.first_inputs[given + carried :], *self.constants))


def find_pairs(equations: Sequence[Equation], outputs: Sequence[Atom]) -> list[Pair]:
    """Each loop with the later one of its length that reads its stacks; one with none or several such is left out."""
    readers: dict[int, set[int]] = {}
    for number, equation in enumerate(equations):
        for value in equation.reads:
            readers.setdefault(value, set()).add(number)
    loops = [
        n
        for n, equation in enumerate(equations)
        if equation.eqn.primitive.name == "scan" and op_facts.may_repeat(equation.eqn)
    ]
    returned = {atom for atom in outputs if isinstance(atom, int)}
    pairs: list[Pair] = []
    taken: set[int] = set()
    for number in loops:
        first = Loop(equations[number].eqn, equations[number].inputs, equations[number].outputs)
        candidates = [
            other
            for other in loops
            if other > number
            and other not in taken
            and equations[other].eqn.params["length"] == first.eqn.params["length"]
            and set(Loop(equations[other].eqn, equations[other].inputs, ()).stacked) & set(first.stacks)
        ]
        if number in taken or len(candidates) != 1:
            continue
        other = candidates[0]
        second = Loop(equations[other].eqn, equations[other].inputs, equations[other].outputs)
        pairs.append(_pair(number, other, first, second, readers, returned))
        taken |= {number, other}
    return pairs


def _pair(
    forward: int,
    backward: int,
    first: Loop,
    second: Loop,
    readers: Mapping[int, set[int]],
    returned: set[int],
) -> Pair:
    body = Flattener()
    first_body, second_body = first.eqn.params["jaxpr"], second.eqn.params["jaxpr"]
    first_inputs = tuple(body.value(var.aval) for var in first_body.jaxpr.invars)
    known: dict[Any, Atom] = {}
    for atom, value in zip(first.constants, first_inputs, strict=False):
        if isinstance(atom, int):
            known["constant", atom] = value
    for atom, value in zip(first.stacked, first_inputs[len(first.inputs) - len(first.stacked) :], strict=True):
        if isinstance(atom, int):
            known["stacked", atom] = value
    first_outputs = body.add(first_body, first_inputs)
    stack_values = first_outputs[first.eqn.params["num_carry"] :]
    for stack, made in zip(first.stacks, stack_values, strict=True):
        known["stacked", stack] = made
    first_equations = tuple(body.equations)
    second_inputs: list[int | None] = []
    scope: list[Atom] = []
    roles = (
        *(("constant", atom) for atom in second.constants),
        *(("carry", None) for _ in second.carry),
        *(("stacked", atom) for atom in second.stacked),
    )
    for role, var in zip(roles, second_body.jaxpr.invars, strict=True):
        if role in known:
            scope.append(known[role])
            second_inputs.append(None)
        else:
            value = body.value(var.aval)
            scope.append(value)
            second_inputs.append(value)
    second_outputs = body.add(second_body, scope)
    second_equations = tuple(alive(body.equations[len(first_equations) :], second_outputs))
    made_first = {value for equation in first_equations for value in equation.outputs} | set(first_inputs)
    read = [value for equation in second_equations for value in equation.reads]
    read += [atom for atom in second_outputs if isinstance(atom, int)]
    kept = tuple(
        number
        for number, stack in enumerate(first.stacks)
        if stack in returned or readers.get(stack, set()) - {backward}
    )
    return Pair(
        forward,
        backward,
        first,
        second,
        tuple(body.avals),
        body.constants,
        first_equations,
        second_equations,
        first_inputs,
        tuple(second_inputs),
        tuple(first_outputs),
        tuple(second_outputs),
        kept,
        tuple(value for value in dict.fromkeys(read) if value in made_first),
    )


def _read(values: Mapping[int, Any], atom: Atom) -> Any:
    return values[atom] if isinstance(atom, int) else atom.val


def _execute(equations: Sequence[Equation], values: dict[int, Any], loop: int) -> None:
    for equation in equations:
        # By this name the compiler's text tells which of these values come from other devices.
        with jax.named_scope(f"{BODY_NAME}{loop}_{min(equation.outputs, default=0)}"):
            made = _private.evaluate(equation.eqn, [_read(values, atom) for atom in equation.inputs])
        values.update(zip(equation.outputs, made, strict=True))


def _read_inside(outer: Mapping[int, Any], broadcasts: Mapping[int, Equation], atom: Atom) -> Any:
    """A constant of a loop, for its body; made in the body where it is much larger than what it is broadcast from."""
    equation = broadcasts.get(atom) if isinstance(atom, int) else None
    if equation is None:
        return _read(outer, atom)
    (made,) = _private.evaluate(equation.eqn, [_read(outer, source) for source in equation.inputs])
    return made


def run_first(
    pair: Pair, choice: frozenset[int], outer: Mapping[int, Any], broadcasts: Mapping[int, Equation]
) -> tuple[dict[int, Any], dict[int, Any]]:
    """Run the forward loop. Returns its outputs by the ids of the flat program, and its stacks by those of the body.

    Args:
        pair: the loops.
        choice: ids of the body's values to stack.
        outer: values of the flat program.
        broadcasts: by value id, the equations of the flat program that the bodies repeat instead of reading their
            results.
    """
    loop, params = pair.first, pair.first.eqn.params
    order = sorted(choice)

    def body(carry: Any, each: Any) -> Any:
        constants = [_read_inside(outer, broadcasts, atom) for atom in loop.constants]
        values: dict[int, Any] = dict(zip(pair.first_inputs, (*constants, *carry, *each), strict=True))
        values.update(pair.constants)
        _execute(
            alive(pair.first_equations, [*pair.first_outputs[: len(carry)], *wanted, *order]), values, pair.forward
        )
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
    broadcasts: Mapping[int, Equation],
    planned: Callable[[Body, Any, Any], Body],
) -> dict[int, Any]:
    """Run the backward loop. Each iteration makes again what was not stacked, right before it is read.

    Args:
        pair: the loops.
        kept: the stacks of the forward loop, by the ids of the body.
        outer: values of the flat program.
        broadcasts: as in ``run_first``.
        planned: makes another body of the body, its carry and the stacked arrays: one that keeps a plan.
    """
    loop, params = pair.second, pair.second.eqn.params
    given = pair.first.eqn.params["num_consts"]
    carried = pair.first.eqn.params["num_carry"]
    equations = _lazily(pair, frozenset(kept))
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
        _execute(equations, values, pair.forward)
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


def _lazily(pair: Pair, kept: frozenset[int]) -> list[Equation]:
    """The backward body, each equation behind those of the forward body that make again what it reads."""
    maker = {value: equation for equation in pair.first_equations for value in equation.outputs}
    there = set(kept) | pair.free
    ordered: list[Equation] = []

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

    for equation in pair.second_equations:
        for value in equation.reads:
            need(value)
        ordered.append(equation)
    for atom in pair.second_outputs:
        if isinstance(atom, int):
            need(atom)
    return ordered
