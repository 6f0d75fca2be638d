"""Layers under ``lax.scan``: what the loop of the forward part keeps, and what that of the backward part makes again.

Differentiation makes two loops of one: the first stacks what the second reads. Both bodies together are one joint
program. A menu of choices keeps less and less of it; the loop of the backward part then computes the rest
again, one iteration at a time, so that what is recomputed exists for one layer only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax

from remat.cost_model import DeviceProfile
from remat.jax import _private, op_facts
from remat.jax._private import ClosedJaxpr, JaxprEqn
from remat.jax.program import Atom, Flattener, Program, Step, alive, program_of_steps
from remat.jax.scan_choice import cheapest_choice
from remat.jax.trace import graph_of_program

# Shares of all that the loops could keep, which the menu offers.
_SHARES = (1.0, 0.85, 0.7, 0.55, 0.4, 0.3, 0.2, 0.12, 0.06, 0.0)


@dataclass(frozen=True)
class _Loop:
    """One scan of the flat program: its equation, and its operands by their role."""

    eqn: JaxprEqn
    inputs: tuple[Atom, ...]
    outputs: tuple[int, ...]

    @property
    def constants(self) -> tuple[Atom, ...]:
        return self.inputs[: self.eqn.params["num_consts"]]

    @property
    def carry(self) -> tuple[Atom, ...]:
        first = self.eqn.params["num_consts"]
        return self.inputs[first : first + self.eqn.params["num_carry"]]

    @property
    def stacked(self) -> tuple[Atom, ...]:
        return self.inputs[self.eqn.params["num_consts"] + self.eqn.params["num_carry"] :]

    @property
    def stacks(self) -> tuple[int, ...]:
        return self.outputs[self.eqn.params["num_carry"] :]


@dataclass(frozen=True)
class _Pair:
    """The two loops of one scan, and their joint body.

    Attributes:
        forward, backward: numbers of the steps of the flat program.
        first, second: the loops.
        avals: of the values of the joint body.
        inputs: ids in the joint body by the flat program's atom: constants and slices of stacked arrays.
        first_steps, second_steps: the bodies.
        first_inputs, second_inputs: ids of the body's arguments in the order of the loop's operands; None where the
            backward loop reads what the forward loop stacked.
        first_outputs, second_outputs: what the bodies return.
        kept_stacks: numbers of the forward loop's stacks that others read, too.
        needed: ids of the forward body's values that the backward body reads.
    """

    forward: int
    backward: int
    first: _Loop
    second: _Loop
    avals: tuple[Any, ...]
    constants: Mapping[int, Any]
    first_steps: tuple[Step, ...]
    second_steps: tuple[Step, ...]
    first_inputs: tuple[int, ...]
    second_inputs: tuple[int | None, ...]
    first_outputs: tuple[Atom, ...]
    second_outputs: tuple[Atom, ...]
    kept_stacks: tuple[int, ...]
    needed: tuple[int, ...]

    @property
    def free(self) -> frozenset[int]:
        """What the backward body can read anyhow: constants and slices of what the forward loop was given."""
        given, carried = self.first.eqn.params["num_consts"], self.first.eqn.params["num_carry"]
        return frozenset((*self.first_inputs[:given], *self.first_inputs[given + carried :], *self.constants))


def scan_menu(closed: ClosedJaxpr, profile: DeviceProfile) -> list[ClosedJaxpr]:
    """The function with its pairs of loops keeping less and less; empty where it has none.

    Raises:
        UnsupportedStep: where a shape is unknown.
    """
    flattener = Flattener()
    inputs = tuple(flattener.value(var.aval) for var in closed.jaxpr.invars)
    outputs = flattener.add(closed, inputs)
    steps = alive(flattener.steps, outputs)
    pairs = _find_pairs(steps, outputs)
    if not pairs:
        return []
    bodies = [_forward_program(pair) for pair in pairs]
    graphs = [graph_of_program(body, profile) for body in bodies]
    menu, seen = [], set()
    for share in _SHARES:
        choices = tuple(
            cheapest_choice(body, graph, pair.needed, pair.free, int(pair.first.eqn.params["length"]), share)
            for pair, body, graph in zip(pairs, bodies, graphs, strict=True)
        )
        if choices in seen:
            continue
        seen.add(choices)
        chosen = {pair.forward: choice for pair, choice in zip(pairs, choices, strict=True)}
        run = _rewritten(flattener, steps, inputs, outputs, chosen, pairs)
        menu.append(jax.make_jaxpr(run)(*(_shape(flattener.avals[value]) for value in inputs)))
    return menu


def _shape(aval: Any) -> Any:
    make: Any = jax.ShapeDtypeStruct
    return make(aval.shape, aval.dtype, weak_type=bool(getattr(aval, "weak_type", False)))


def _find_pairs(steps: Sequence[Step], outputs: Sequence[Atom]) -> list[_Pair]:
    readers: dict[int, set[int]] = {}
    for number, step in enumerate(steps):
        for value in step.reads:
            readers.setdefault(value, set()).add(number)
    loops = [n for n, step in enumerate(steps) if step.eqn.primitive.name == "scan" and op_facts.may_repeat(step.eqn)]
    returned = {atom for atom in outputs if isinstance(atom, int)}
    pairs: list[_Pair] = []
    taken: set[int] = set()
    for number in loops:
        first = _Loop(steps[number].eqn, steps[number].inputs, steps[number].outputs)
        candidates = [
            other
            for other in loops
            if other > number
            and other not in taken
            and steps[other].eqn.params["length"] == first.eqn.params["length"]
            and set(_Loop(steps[other].eqn, steps[other].inputs, ()).stacked) & set(first.stacks)
        ]
        if number in taken or len(candidates) != 1:
            continue
        other = candidates[0]
        second = _Loop(steps[other].eqn, steps[other].inputs, steps[other].outputs)
        pairs.append(_pair(number, other, first, second, readers, returned))
        taken |= {number, other}
    return pairs


def _pair(
    forward: int,
    backward: int,
    first: _Loop,
    second: _Loop,
    readers: Mapping[int, set[int]],
    returned: set[int],
) -> _Pair:
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
    first_steps = tuple(body.steps)
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
    second_steps = tuple(alive(body.steps[len(first_steps) :], second_outputs))
    made_first = {value for step in first_steps for value in step.outputs} | set(first_inputs)
    read = [value for step in second_steps for value in step.reads]
    read += [atom for atom in second_outputs if isinstance(atom, int)]
    kept = tuple(
        number
        for number, stack in enumerate(first.stacks)
        if stack in returned or readers.get(stack, set()) - {backward}
    )
    return _Pair(
        forward,
        backward,
        first,
        second,
        tuple(body.avals),
        body.constants,
        first_steps,
        second_steps,
        first_inputs,
        tuple(second_inputs),
        tuple(first_outputs),
        tuple(second_outputs),
        kept,
        tuple(value for value in dict.fromkeys(read) if value in made_first),
    )


def _forward_program(pair: _Pair) -> Program:
    body = Flattener()
    body.avals, body.constants = list(pair.avals), dict(pair.constants)
    outputs: list[Atom] = [*pair.first_outputs, *pair.needed]
    return program_of_steps(body, alive(pair.first_steps, outputs), pair.first_inputs, outputs)


def _rewritten(
    flattener: Flattener,
    steps: Sequence[Step],
    inputs: Sequence[int],
    outputs: Sequence[Atom],
    choices: Mapping[int, frozenset[int]],
    pairs: Sequence[_Pair],
) -> Any:
    starts = {pair.forward: pair for pair in pairs}
    ends = {pair.backward: pair for pair in pairs}

    def run(*arguments: Any) -> list[Any]:
        values: dict[int, Any] = {**dict(zip(inputs, arguments, strict=True)), **flattener.constants}
        kept: dict[int, dict[int, Any]] = {}
        for number, step in enumerate(steps):
            if number in starts:
                made, kept[number] = _run_first(starts[number], choices[number], values)
            elif number in ends:
                pair = ends[number]
                made = _run_second(pair, kept.pop(pair.forward), values)
            else:
                read = [values[atom] if isinstance(atom, int) else atom.val for atom in step.inputs]
                made = dict(zip(step.outputs, _private.evaluate(step.eqn, read), strict=True))
            values.update(made)
        return [values[atom] if isinstance(atom, int) else atom.val for atom in outputs]

    return run


def _read(values: Mapping[int, Any], atom: Atom) -> Any:
    return values[atom] if isinstance(atom, int) else atom.val


def _execute(steps: Sequence[Step], values: dict[int, Any]) -> None:
    for step in steps:
        made = _private.evaluate(step.eqn, [_read(values, atom) for atom in step.inputs])
        values.update(zip(step.outputs, made, strict=True))


def _run_first(pair: _Pair, choice: frozenset[int], outer: Mapping[int, Any]) -> tuple[dict[int, Any], dict[int, Any]]:
    """The forward loop; returns its outputs by the flat program's ids, and the kept stacks by the body's."""
    loop, params = pair.first, pair.first.eqn.params
    constants = [_read(outer, atom) for atom in loop.constants]
    order = sorted(choice)

    def body(carry: Any, each: Any) -> Any:
        values: dict[int, Any] = dict(zip(pair.first_inputs, (*constants, *carry, *each), strict=True))
        values.update(pair.constants)
        _execute(alive(pair.first_steps, [*pair.first_outputs[: len(carry)], *wanted, *order]), values)
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


def _run_second(pair: _Pair, kept: Mapping[int, Any], outer: Mapping[int, Any]) -> dict[int, Any]:
    """The backward loop; what was not kept is made again in each iteration, right before it is read."""
    loop, params = pair.second, pair.second.eqn.params
    given = pair.first.eqn.params["num_consts"]
    carried = pair.first.eqn.params["num_carry"]
    constants = [_read(outer, atom) for atom in loop.constants]
    first_constants = [_read(outer, atom) for atom in pair.first.constants]
    steps = _lazily(pair, frozenset(kept))
    own_stacks = [
        atom
        for atom, value in zip(loop.stacked, pair.second_inputs[len(loop.inputs) - len(loop.stacked) :], strict=True)
        if value is not None
    ]

    def body(carry: Any, each: Any) -> Any:
        own, first_stacked, again = each
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
        _execute(steps, values)
        results = [_read(values, atom) for atom in pair.second_outputs]
        return results[: len(carry)], results[len(carry) :]

    carry, stacks = lax.scan(
        body,
        [_read(outer, atom) for atom in loop.carry],
        (
            [_read(outer, atom) for atom in own_stacks],
            [_read(outer, atom) for atom in pair.first.stacked],
            dict(kept),
        ),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return dict(zip(loop.outputs, (*carry, *stacks), strict=True))


def _lazily(pair: _Pair, kept: frozenset[int]) -> list[Step]:
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
