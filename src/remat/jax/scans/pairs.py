"""The two loops that differentiation makes of one ``lax.scan``: found among all loops of a program, and joined.

The forward loop stacks what the backward loop reads. Others may read the same stacks: the next layer's loops read the
outputs of the layer below. So a loop is paired with the one that reads most of what nobody else reads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from remat.jax import _private
from remat.jax._private import JaxprEqn
from remat.jax.trace import op_facts
from remat.jax.trace.program import Atom, Equation, Flattener, alive


@dataclass(frozen=True)
class Loop:
    """One scan of the flat program: its equation, and its operands by their role."""

    eqn: JaxprEqn
    inputs: tuple[Atom, ...]
    outputs: tuple[int, ...]

    @property
    def counts(self) -> tuple[int, int]:
        """How many values every iteration reads whole, and how many are carried."""
        return _private.scan_counts(self.eqn)

    @property
    def constants(self) -> tuple[Atom, ...]:
        """What every iteration reads."""
        return self.inputs[: self.counts[0]]

    @property
    def carry(self) -> tuple[Atom, ...]:
        """What the first iteration starts from."""
        given, carried = self.counts
        return self.inputs[given : given + carried]

    @property
    def stacked(self) -> tuple[Atom, ...]:
        """Arrays of which each iteration reads one slice."""
        return self.inputs[sum(self.counts) :]

    @property
    def stacks(self) -> tuple[int, ...]:
        """What the iterations leave, stacked."""
        return self.outputs[self.counts[1] :]


# Compared by identity: bodies are large, and a pair is written once.
@dataclass(frozen=True, eq=False)
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
        first_outputs, second_outputs: what the bodies return; of the forward loop's stacks only those that are kept.
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
    def first_carries(self) -> tuple[int, ...]:
        """What the forward loop carries into an iteration, by its ids in the body."""
        given, carried = self.first.counts
        return self.first_inputs[given : given + carried]

    @property
    def free(self) -> frozenset[int]:
        """What the backward body reads without a stack of its own.

        Constants, slices of what the forward loop is given, and slices of the stacks that others read anyway: their
        own, and those of the iteration before, which are what the loop carries.
        """
        given, carried = self.first.counts
        shared = (*self.shared.values(), *self.shifted)
        return frozenset((*self.first_inputs[:given], *self.first_inputs[given + carried :], *self.constants, *shared))

    @property
    def shared(self) -> dict[int, int]:
        """The stacks that others read and the backward body, too: id in the flat program -> id in the body."""
        _, carried = self.first.counts
        stacks = (self.first.stacks[number] for number in self.kept_stacks)
        made = zip(stacks, self.first_outputs[carried:], strict=True)
        return {stack: value for stack, value in made if isinstance(value, int)}

    @property
    def shifted(self) -> dict[int, tuple[int, Atom]]:
        """What each iteration carries in, where the iteration before has left it in a stack that others read.

        By the id in the body: the stack's id in the flat program, and what the first iteration starts from.
        """
        _, carried = self.first.counts
        stacks = {value: stack for stack, value in self.shared.items()}
        carries = zip(self.first_carries, self.first_outputs[:carried], self.first.carry, strict=True)
        return {
            value: (stacks[made], start)
            for value, made, start in carries
            if isinstance(made, int) and made in stacks and made != value
        }


def find_pairs(
    equations: Sequence[Equation],
    outputs: Sequence[Atom],
    may_be_inside: Callable[[JaxprEqn], bool] = op_facts.may_repeat,
) -> list[Pair]:
    """Each loop with the later one that makes its gradients; a loop without such a one is left out.

    A backward loop has as many iterations as its forward loop, runs in the other direction, and reads its stacks. Where
    several loops do, the pair in which most bytes are read that nobody else reads is made first, and among equals the
    last forward loop gets the first backward loop.

    Args:
        equations: the flat program.
        outputs: what it returns.
        may_be_inside: may a loop of such an equation be written again? One in the body of a ``shard_map`` that was
            taken apart may be where all that it does repeats or is a collective, which is kept.
    """
    readers: dict[int, set[int]] = {}
    for number, equation in enumerate(equations):
        for value in equation.reads:
            readers.setdefault(value, set()).add(number)
    loops = {
        number: Loop(equation.eqn, equation.inputs, equation.outputs)
        for number, equation in enumerate(equations)
        if equation.eqn.primitive.name == "scan"
        and (may_be_inside if equation.mapped is None else op_facts.may_be_stacked)(equation.eqn)
    }
    candidates = []
    for number, first in loops.items():
        for other, second in loops.items():
            if other > number and equations[number].map == equations[other].map and _may_be_backward(first, second):
                own = {stack for stack in first.stacks if readers.get(stack) == {other}}
                candidates.append((_bytes_read(first, second, own), _bytes_read(first, second), number, -other))
    returned = {atom for atom in outputs if isinstance(atom, int)}
    pairs: list[Pair] = []
    taken: set[int] = set()
    for *_, number, negative in sorted(candidates, reverse=True):
        if not taken & {number, -negative}:
            pairs.append(_pair(number, -negative, loops[number], loops[-negative], readers, returned))
            taken |= {number, -negative}
    return sorted(pairs, key=lambda pair: pair.forward)


def _may_be_backward(first: Loop, second: Loop) -> bool:
    own, other = first.eqn.params, second.eqn.params
    runs_back = bool(own["reverse"]) != bool(other["reverse"])
    return runs_back and own["length"] == other["length"] and not set(first.stacks).isdisjoint(second.stacked)


def _bytes_read(first: Loop, second: Loop, of: Collection[int] | None = None) -> int:
    """Bytes of the first loop's stacks that the second reads, or of some of them."""
    stacks = dict(zip(first.outputs, first.eqn.outvars, strict=True))
    read = set(second.stacked) & set(first.stacks if of is None else of)
    return sum(op_facts.size_bytes(stacks[value].aval) for value in read if isinstance(value, int))


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
    stack_values = first_outputs[first.counts[1] :]
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
        (*first_outputs[: first.counts[1]], *(stack_values[number] for number in kept)),
        tuple(second_outputs),
        kept,
        tuple(value for value in dict.fromkeys(read) if value in made_first),
    )
