"""A plan -> the function, evaluated in the plan's order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax

from remat.core.schedule import Schedule
from remat.jax import _private
from remat.jax.context import Tie
from remat.jax.emit import ties
from remat.jax.emit.holds import Hold, find_holds
from remat.jax.trace.program import Program

FlatFunction: TypeAlias = Callable[[Sequence[Any], Sequence[Any]], list[Any]]
"""A function of the flat arguments and of the captured arrays that returns the flat results; meant for tracing."""


def emit(program: Program, schedule: Schedule, turning_point: int, tie: Tie) -> FlatFunction:
    """The function that evaluates the program by the schedule.

    A second run of an instruction computes its values again, and what the schedule runs afterwards reads the new ones.
    What a region of recomputations reads from outside is tied to the newest value of the first runs before it, so that
    no compiler can run it early or merge it with the first run.

    Args:
        program: the traced function.
        schedule: instruction numbers; an instruction that occurs again is recomputed.
        turning_point: the instruction that ends the forward part.
        tie: "barrier" where the compiler keeps ``optimization_barrier``, "data" for everywhere.

    Returns:
        The function; captured arrays come in the order of ``program.constants``.
    """
    holds: dict[int, Hold] = {}
    shardings: Mapping[int, Any] = {}
    if len(schedule) > len(program.instructions):
        holds = {hold.step: hold for hold in find_holds(program, schedule, turning_point, tie)}
        shardings = program.shardings
    last_read: dict[int, int] = {}
    for step, number in enumerate(schedule):
        last_read.update(dict.fromkeys(program.instructions[number].reads, step))
    returned = {atom for atom in program.outputs if isinstance(atom, int)}
    dies: dict[int, list[int]] = {}
    for value, step in last_read.items():
        if value not in returned:
            dies.setdefault(step, []).append(value)

    def placed(numbers: Sequence[int], arrays: Sequence[Any]) -> dict[int, Any]:
        constrained: Callable[[Any, Any], Any] = jax.lax.with_sharding_constraint
        return {
            value: constrained(array, shardings[value]) if value in shardings else array
            for value, array in zip(numbers, arrays, strict=True)
        }

    def run(arguments: Sequence[Any], captured: Sequence[Any]) -> list[Any]:
        values: dict[int, Any] = dict(zip(program.inputs, arguments, strict=True))
        values.update(zip(program.constants, captured, strict=True))
        for step, number in enumerate(schedule):
            hold = holds.get(step)
            if hold is not None:
                wanted = [value for value in hold.values if value in values]
                read = [values[value] for value in wanted]
                if tie == "barrier":
                    tied, (trigger,) = ties.tie_by_barrier(read, [values[hold.trigger]])
                    # Left unread, the trigger's place in the barrier would be dropped as dead.
                    values[hold.trigger] = trigger
                else:
                    tied = ties.tie_by_data(read, [values[hold.trigger]])
                values.update(placed(wanted, tied))
            values.update(placed(program.instructions[number].outputs, _execute(program, number, values)))
            for value in dies.get(step, ()):
                del values[value]
        return [values[atom] if isinstance(atom, int) else atom.val for atom in program.outputs]

    return run


def named_run(program: Program, prefix: str) -> FlatFunction:
    """The plain function with the number of each instruction, behind a prefix, in the names that the compiler keeps."""

    def run(arguments: Sequence[Any], captured: Sequence[Any]) -> list[Any]:
        values: dict[int, Any] = dict(zip(program.inputs, arguments, strict=True))
        values.update(zip(program.constants, captured, strict=True))
        for number, instruction in enumerate(program.instructions):
            with jax.named_scope(f"{prefix}{number}"):
                values.update(zip(instruction.outputs, _execute(program, number, values), strict=True))
        return [values[atom] if isinstance(atom, int) else atom.val for atom in program.outputs]

    return run


def _execute(program: Program, number: int, values: Mapping[int, Any]) -> list[Any]:
    inside: dict[int, Any] = {}
    made: list[Any] = []
    for step in program.instructions[number].steps:
        read = [
            atom.val if not isinstance(atom, int) else inside[atom] if atom in inside else values[atom]
            for atom in step.inputs
        ]
        made = _private.evaluate(step.eqn, read)
        inside.update(zip(step.outputs, made, strict=True))
    return made
