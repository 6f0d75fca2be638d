"""Finds the two loops that differentiation makes of one ``lax.scan``, and joins their bodies into one joint program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from remat.jax._private import JaxprEqn
from remat.jax.trace import op_facts
from remat.jax.trace.program import Atom, Flattener, Step, alive


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
    first: Loop
    second: Loop
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


def find_pairs(steps: Sequence[Step], outputs: Sequence[Atom]) -> list[Pair]:
    """Each loop whose stacks exactly one later loop of the same length reads, with that loop."""
    readers: dict[int, set[int]] = {}
    for number, step in enumerate(steps):
        for value in step.reads:
            readers.setdefault(value, set()).add(number)
    loops = [n for n, step in enumerate(steps) if step.eqn.primitive.name == "scan" and op_facts.may_repeat(step.eqn)]
    returned = {atom for atom in outputs if isinstance(atom, int)}
    pairs: list[Pair] = []
    taken: set[int] = set()
    for number in loops:
        first = Loop(steps[number].eqn, steps[number].inputs, steps[number].outputs)
        candidates = [
            other
            for other in loops
            if other > number
            and other not in taken
            and steps[other].eqn.params["length"] == first.eqn.params["length"]
            and set(Loop(steps[other].eqn, steps[other].inputs, ()).stacked) & set(first.stacks)
        ]
        if number in taken or len(candidates) != 1:
            continue
        other = candidates[0]
        second = Loop(steps[other].eqn, steps[other].inputs, steps[other].outputs)
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
    return Pair(
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
