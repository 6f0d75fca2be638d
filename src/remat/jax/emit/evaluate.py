"""A plan -> the function, evaluated in the plan's order, with each recomputation held back.

A compiler merges equal computations and runs early what it can, which would undo a plan. So what recomputations read is
tied to a late value: a *hold* says before which position of the schedule the tie stands, and to which value. How the
two kinds of tie work stands in ``remat.jax.emit.ties``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import jax

from remat.core.schedule import Schedule
from remat.jax import _private
from remat.jax.context import Tie
from remat.jax.emit import on_cpu, ties
from remat.jax.emit.in_maps import evaluate_together, map_of
from remat.jax.trace import op_facts
from remat.jax.trace.graph import taken_over
from remat.jax.trace.program import Program

FlatFunction: TypeAlias = Callable[[Sequence[Any], Sequence[Any]], list[Any]]
"""A function of the flat arguments and of the captured arrays that returns the flat results; meant for tracing."""

_POSITIONS_OF_ONE_TIE: Final = 24
"""So many positions of the backward part share one tie for what they read of the forward part.

A judgement, not measured. Fewer: more ties, each by data a pass over what it ties. More: what the last of them read is
tied to an earlier value, so that the compiler may make its broadcasts and copies somewhat sooner.
"""

_MOST_TRIGGERS: Final = 64
"""How many values of first runs are remembered as triggers; beyond it, only the deeper half is kept.

It bounds the search for the deepest one. A judgement, not measured. Too few, all of them may have been read for the
last time when a tie is needed: recomputations then stay without one, and the compiled peak shows it.
"""


_LEAST_COPIED_BYTES: Final = 1 << 16
"""Arguments below this may be copied before they are overwritten. A judgement: a barrier for each of hundreds of small
ones makes a program longer, and they are a thousandth of a step."""


def emit(
    program: Program, schedule: Schedule, turning_point: int, tie: Tie, donated: Sequence[int] = ()
) -> FlatFunction:
    """The function that evaluates the program by the schedule.

    A second run of an instruction computes its values again, and what the schedule runs afterwards reads the new ones.
    What a stretch of recomputations reads from outside is tied to the newest value of the first runs before it. No
    compiler can then run the stretch early, or merge it with the first runs.

    Args:
        program: the traced function.
        schedule: instruction numbers; an instruction that occurs again is recomputed.
        turning_point: the instruction that ends the forward part.
        tie: "barrier" where the compiler keeps ``optimization_barrier``; "data" works everywhere.
        donated: which arguments' buffers results may take over.

    Returns:
        The function; captured arrays come in the order of ``program.constants``.
    """
    holds: dict[int, Hold] = {}
    shardings: Mapping[int, Any] = {}
    apart: Tie | None = None
    overwritten: dict[int, list[tuple[int, int]]] = {}
    if len(schedule) > len(program.instructions):
        if tie == "barrier":
            overwritten = _reads_of_overwritten(program, schedule, donated)
        holds = {hold.position: hold for hold in _find_holds(program, schedule, turning_point, tie)}
        shardings = program.shardings
        if not shardings and not _common_axes(program) and jax.default_backend() == "cpu":
            apart = tie
    last_read: dict[int, int] = {}
    for position, number in enumerate(schedule):
        last_read.update(dict.fromkeys(program.instructions[number].reads, position))
    returned = {atom for atom in program.outputs if isinstance(atom, int)}
    dies: dict[int, list[int]] = {}
    for value, position in last_read.items():
        if value not in returned:
            dies.setdefault(position, []).append(value)

    runs = list(_runs(program, schedule, holds))

    def placed(numbers: Sequence[int], arrays: Sequence[Any]) -> dict[int, Any]:
        constrained: Callable[[Any, Any], Any] = jax.lax.with_sharding_constraint
        return {
            value: constrained(array, shardings[value]) if value in shardings else array
            for value, array in zip(numbers, arrays, strict=True)
        }

    def run(arguments: Sequence[Any], captured: Sequence[Any]) -> list[Any]:
        values: dict[int, Any] = dict(zip(program.inputs, arguments, strict=True))
        values.update(zip(program.constants, captured, strict=True))
        for position, stop in runs:
            number = schedule[position]
            hold = holds.get(position)
            if hold is not None:
                wanted = [value for value in hold.values if value in values]
                read = [values[value] for value in wanted]
                if tie == "barrier":
                    triggers = (hold.trigger, *(value for value in hold.done if value in values))
                    tied, after = ties.tie_by_barrier(read, [values[value] for value in triggers])
                    # Left unread, a trigger's place in the barrier would be dropped as dead.
                    values.update(zip(triggers, after, strict=True))
                else:
                    tied = ties.tie_by_data(read, [values[hold.trigger]])
                values.update(placed(wanted, tied))
            if stop > position + 1:
                equations = [
                    one for number in schedule[position:stop] for one in program.instructions[number].equations
                ]
                made = {value for one in equations for value in one.outputs}
                wanted = [value for value in made if value in returned or last_read.get(value, -1) >= stop]
                values.update(zip(wanted, evaluate_together(equations, values, wanted), strict=True))
            else:
                values.update(placed(program.instructions[number].outputs, _execute(program, number, values, apart)))
            for at in range(position, stop):
                for pair in overwritten.get(at, ()):
                    tied, after = ties.tie_by_barrier([values[pair[0]]], [values[pair[1]]])
                    values.update(placed(pair, [*tied, *after]))
                for value in dies.get(at, ()):
                    values.pop(value, None)
        return [values[atom] if isinstance(atom, int) else atom.val for atom in program.outputs]

    return run


def _reads_of_overwritten(
    program: Program, schedule: Schedule, donated: Sequence[int]
) -> dict[int, list[tuple[int, int]]]:
    """Where a donated argument is read before the result that takes over its buffer is made.

    The compiler does not know that these readers come first, and copies the argument: all that is in its schedule
    before the update reads the copy, which lives as long (77 of 231 MiB of a ResNet50). Where each reader waits for the
    one before it, and the update for the last, nothing is copied.

    Returns:
        By position of the reader: the argument, and a value that the reader makes and that is read later.
    """
    instructions = program.instructions
    producer = {value: number for number, one in enumerate(instructions) for value in one.outputs}
    first = {number: position for position, number in reversed(list(enumerate(schedule)))}
    reads: dict[int, list[int]] = {}
    for position, number in enumerate(schedule):
        for value in instructions[number].reads:
            reads.setdefault(value, []).append(position)

    def results_of_readers(value: int, stop: int) -> Iterator[tuple[int, int]]:
        """For each reader before a position: where it stands, and what it makes that is read later."""
        for position in reads.get(value, ()):
            if position >= stop:
                return
            reader = instructions[schedule[position]]
            if reader.reads == (value,) and op_facts.keeps_elements(reader.root):
                until = next((p for p in range(position + 1, stop) if schedule[p] == schedule[position]), stop)
                yield from (pair for pair in results_of_readers(reader.outputs[0], until) if pair[0] > position)
                continue
            later = (v for v in reader.outputs if reads.get(v, [-1])[-1] > position)
            trigger = next((v for v in later if ties.can_trigger(program.avals[v])), None)
            if trigger is not None:
                yield position, trigger

    found: dict[int, list[tuple[int, int]]] = {}
    pairs = taken_over(program, donated, lambda value: _kind(program.avals[value]))
    for argument, result in pairs:
        if op_facts.size_bytes(program.avals[argument]) < _LEAST_COPIED_BYTES or result not in producer:
            continue
        update = first[producer[result]]
        if update in reads.get(argument, ()):
            for position, trigger in results_of_readers(argument, update):
                found.setdefault(position, []).append((argument, trigger))
    return found


def _kind(aval: Any) -> tuple[Any, Any]:
    return getattr(aval, "shape", ()), getattr(aval, "dtype", None)


def _runs(program: Program, schedule: Schedule, holds: Mapping[int, Hold]) -> Iterator[tuple[int, int]]:
    """Stretches of positions that are evaluated at once: one instruction, or several inside of one ``shard_map``."""
    start = 0
    while start < len(schedule):
        own = map_of(program.instructions[schedule[start]])
        stop = start + 1
        while own is not None and stop < len(schedule) and stop not in holds:
            if map_of(program.instructions[schedule[stop]]) != own:
                break
            stop += 1
        yield start, stop
        start = stop


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


def _execute(program: Program, number: int, values: Mapping[int, Any], apart: Tie | None = None) -> list[Any]:
    """The results of an instruction.

    Args:
        program: the traced function.
        number: of the instruction.
        values: what exists, by id.
        apart: how recomputations are held back, where XLA on a CPU needs another form of some equations; else None.
    """
    instruction = program.instructions[number]
    if instruction.is_mapped and map_of(instruction) is not None:
        return evaluate_together(instruction.equations, values, instruction.outputs)
    inside: dict[int, Any] = {}
    made: list[Any] = []
    for equation in instruction.equations:
        if equation.mapped is not None:
            made = evaluate_together([equation], {**values, **inside}, equation.outputs)
            inside.update(zip(equation.outputs, made, strict=True))
            continue
        read = [
            atom.val if not isinstance(atom, int) else inside[atom] if atom in inside else values[atom]
            for atom in equation.inputs
        ]
        if apart is not None:
            made = on_cpu.evaluate(equation.eqn, read, apart)
        else:
            made = _private.evaluate(equation.eqn, read)
        inside.update(zip(equation.outputs, made, strict=True))
    return made


@dataclass(frozen=True)
class Hold:
    """A place in a schedule where values are tied to another one: nothing reads them before that one exists.

    Attributes:
        position: the position of the schedule before which the tie stands.
        trigger: id of the value that has to exist, the deepest of the first runs so far that is still read later.
        values: ids of what is tied.
        done: ids of further triggers, where a tie is a barrier: results of first runs that free memory, such as the
            gradient of a weight, which reads an activation for the last time. Left alone, the compiler may run these
            behind the recomputations, and keep what they read until then.
    """

    position: int
    trigger: int
    values: tuple[int, ...]
    done: tuple[int, ...] = ()


def _find_holds(program: Program, schedule: Schedule, turning_point: int, tie: Tie) -> list[Hold]:
    """Where a schedule needs ties, in its order.

    Recomputations that follow one another directly, a stretch of them, get one tie. So does what the backward part
    reads of the forward part: left alone, the compiler makes broadcasts and copies of a value as soon as it exists.

    Args:
        program: the traced function.
        schedule: instruction numbers.
        turning_point: the instruction that ends the forward part.
        tie: a barrier is free, so it ties arguments, too. A tie by data is a pass over what it ties, so it ties an
            argument only where a recomputation reads nothing else.
    """
    return _Finder(program, schedule, turning_point, tie).run()


class _Finder:
    def __init__(self, program: Program, schedule: Schedule, turning_point: int, tie: Tie) -> None:
        self.program = program
        self.schedule = schedule
        self.turning_point = turning_point
        self.barriers = tie == "barrier"
        self.axes = _common_axes(program)
        self.depth = _depths(program)
        self.size = [op_facts.size_bytes(aval) for aval in program.avals]
        self.made_forward = {
            value for instruction in program.instructions[: turning_point + 1] for value in instruction.outputs
        }
        self.arguments = {*program.inputs, *program.constants}
        self.frees = _freeing_positions(program, schedule) if self.barriers else frozenset[int]()
        self.last_read: dict[int, int] = {}
        ran: set[int] = set()
        self.is_first: list[bool] = []
        for position, number in enumerate(schedule):
            self.is_first.append(number not in ran)
            if number not in ran:
                self.last_read.update(dict.fromkeys(program.instructions[number].reads, position))
            ran.add(number)

    def run(self) -> list[Hold]:
        holds: list[Hold] = []
        newest: list[int] = []  # Values of first runs, the deepest last.
        held: set[int] = set()
        freeing: list[int] = []  # Results of backward first runs that free memory, since the last tie.
        position = 0
        while position < len(self.schedule):
            number = self.schedule[position]
            stop = position + 1
            if not self.is_first[position]:
                while stop < len(self.schedule) and not self.is_first[stop]:
                    stop += 1
                wanted = self._read_by_stretch(position, stop)
            else:
                wanted = []
                if number > self.turning_point and any(v not in held for v in self._forward_reads(position)):
                    wanted = [v for v in self._forward_reads_ahead(position) if v not in held]
                if number > self.turning_point:
                    wanted += [v for v in self._arguments_alone(position) if v not in held]
            trigger = self._trigger(newest, position)
            if wanted and trigger is not None:
                wanted = [value for value in wanted if value != trigger]
                done = dict.fromkeys(value for value in freeing if value != trigger and value not in wanted)
                holds.append(Hold(position, trigger, tuple(wanted), tuple(done)))
                held.update(wanted)
                freeing = []
            for at in range(position, stop):
                outputs = self.program.instructions[self.schedule[at]].outputs
                if self.is_first[at]:
                    self._remember(newest, outputs)
                    if at in self.frees and self.schedule[at] > self.turning_point:
                        freeing += filter(self._can_trigger, outputs)
                held.update(outputs)
            position = stop
        return holds

    def _can_trigger(self, value: int) -> bool:
        aval = self.program.avals[value]
        if not self.barriers and _private.is_laid_out(aval):
            return False  # JAX takes no slice of it, which a tie by data begins with.
        return ties.can_trigger(aval) and _private.varying_axes(aval) == self.axes

    def _can_tie(self, value: int) -> bool:
        aval = self.program.avals[value]
        return ties.can_tie(aval) and _private.varying_axes(aval) == self.axes

    def _remember(self, newest: list[int], outputs: tuple[int, ...]) -> None:
        for value in outputs:
            if self._can_trigger(value) and value in self.last_read:
                newest.append(value)
        if len(newest) > _MOST_TRIGGERS:
            newest.sort(key=lambda v: self.depth[v])
            del newest[: _MOST_TRIGGERS // 2]

    def _trigger(self, newest: list[int], position: int) -> int | None:
        """The deepest value that a first run has made and one later on reads."""
        waiting = [v for v in newest if self.last_read[v] >= position]
        return max(reversed(waiting), key=lambda v: self.depth[v], default=None)

    def _forward_reads(self, position: int) -> list[int]:
        """What a backward instruction reads of the forward part."""
        reads = dict.fromkeys(self.program.instructions[self.schedule[position]].reads)
        return [v for v in reads if v in self.made_forward and self._can_tie(v)]

    def _arguments_alone(self, position: int) -> list[int]:
        """What an instruction reads that reads arguments alone, as the one does that makes a kernel in another order.

        The compiler may run it at the beginning of the step: 99 of 372 MiB of a ResNet50.
        """
        reads = dict.fromkeys(self.program.instructions[self.schedule[position]].reads)
        if not self.barriers or not self.arguments.issuperset(reads):
            return []
        return [v for v in reads if self._can_tie(v) and self.size[v] >= _LEAST_COPIED_BYTES]

    def _forward_reads_ahead(self, position: int) -> list[int]:
        """What the backward instructions at the next positions read of the forward part, up to a recomputation."""
        found: dict[int, None] = {}
        for at in range(position, min(len(self.schedule), position + _POSITIONS_OF_ONE_TIE)):
            if not self.is_first[at]:
                break
            if self.schedule[at] > self.turning_point:
                found.update(dict.fromkeys(self._forward_reads(at)))
        return list(found)

    def _read_by_stretch(self, start: int, stop: int) -> list[int]:
        """What the recomputations between two positions read and do not make themselves, as far as it is tied."""
        made: set[int] = set()
        chosen: dict[int, None] = {}
        for position in range(start, stop):
            instruction = self.program.instructions[self.schedule[position]]
            outside = [v for v in dict.fromkeys(instruction.reads) if v not in made and self._can_tie(v)]
            chosen.update(dict.fromkeys(v for v in outside if self.barriers or v not in self.arguments))
            if outside and not any(v in made or v in chosen for v in instruction.reads):
                chosen[min(outside, key=lambda v: self.size[v])] = None
            made.update(instruction.outputs)
        return list(chosen)


def _common_axes(program: Program) -> frozenset[str]:
    """Inside of ``shard_map``, the axes over which most bytes of the program differ from device to device; else none.

    A tie makes all that it ties differ over the axes of one another. What is the same on all devices, such as a sum
    over them, may have to stay so; hence only values that differ over the same axes are tied.
    """
    sizes: dict[frozenset[str], int] = {}
    for instruction in program.instructions:
        for value in instruction.outputs:
            axes = _private.varying_axes(program.avals[value])
            sizes[axes] = sizes.get(axes, 0) + op_facts.size_bytes(program.avals[value])
    return max(sizes, key=lambda axes: (sizes[axes], sorted(axes)), default=frozenset())


def _freeing_positions(program: Program, schedule: Schedule) -> frozenset[int]:
    """Positions at which a computed value is read for the last time before it dies or is made anew."""
    computed = {value for instruction in program.instructions for value in instruction.outputs}
    kept = {atom for atom in program.outputs if isinstance(atom, int)}
    is_read_later: set[int] = set(kept)
    positions: set[int] = set()
    for position in reversed(range(len(schedule))):
        instruction = program.instructions[schedule[position]]
        is_read_later.difference_update(value for value in instruction.outputs if value not in kept)
        if any(value in computed and value not in is_read_later for value in instruction.reads):
            positions.add(position)
        is_read_later.update(instruction.reads)
    return frozenset(positions)


def _depths(program: Program) -> dict[int, int]:
    """For each value, the number of instructions on the longest way to it."""
    depth = dict.fromkeys((*program.inputs, *program.constants), 0)
    for instruction in program.instructions:
        own = 1 + max((depth[value] for value in instruction.reads), default=0)
        depth.update(dict.fromkeys(instruction.outputs, own))
    return depth
