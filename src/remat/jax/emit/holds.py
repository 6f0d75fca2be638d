"""Where a schedule has to be held back, and by which value."""

from __future__ import annotations

from dataclasses import dataclass

from remat.core.schedule import Schedule
from remat.jax.context import Tie
from remat.jax.emit import ties
from remat.jax.trace import op_facts
from remat.jax.trace.program import Program

# Reads of the forward part by the backward part that share one tie.
_STRETCH = 24


@dataclass(frozen=True)
class Hold:
    """Values that must not be used before another one exists.

    Attributes:
        step: the step of the schedule before which the tie stands.
        trigger: id of the newest value of the first runs that is still read later.
        values: ids of what is tied.
        recomputes: does a region of recomputations begin here?
    """

    step: int
    trigger: int
    values: tuple[int, ...]
    recomputes: bool


def find_holds(program: Program, schedule: Schedule, turning_point: int, tie: Tie) -> list[Hold]:
    """The ties that a schedule needs, in its order.

    Each contiguous run of recomputations is one region and gets one tie. So does what the backward part reads of the
    forward part: left alone, the compiler prepares broadcasts and copies of it as soon as it exists.

    Args:
        program: the traced function.
        schedule: instruction numbers.
        turning_point: the instruction that ends the forward part.
        tie: a barrier is free, so arguments are tied, too. A data tie is a pass over what it ties, so an argument is
            tied only where a recomputation reads nothing else.
    """
    return _Finder(program, schedule, turning_point, tie).run()


class _Finder:
    def __init__(self, program: Program, schedule: Schedule, turning_point: int, tie: Tie) -> None:
        self.program = program
        self.schedule = schedule
        self.turning_point = turning_point
        self.barriers = tie == "barrier"
        self.depth = depths(program)
        self.size = [op_facts.size_bytes(aval) for aval in program.avals]
        self.made_forward = {
            value for instruction in program.instructions[: turning_point + 1] for value in instruction.outputs
        }
        self.arguments = {*program.inputs, *program.constants}
        self.last_read: dict[int, int] = {}
        ran: set[int] = set()
        self.is_first: list[bool] = []
        for step, number in enumerate(schedule):
            self.is_first.append(number not in ran)
            if number not in ran:
                self.last_read.update(dict.fromkeys(program.instructions[number].reads, step))
            ran.add(number)

    def run(self) -> list[Hold]:
        holds: list[Hold] = []
        newest: list[int] = []  # Values of first runs, the deepest last.
        held: set[int] = set()
        step = 0
        while step < len(self.schedule):
            number = self.schedule[step]
            stop = step + 1
            if not self.is_first[step]:
                while stop < len(self.schedule) and not self.is_first[stop]:
                    stop += 1
                wanted = self._read_by_region(step, stop)
            else:
                wanted = []
                if number > self.turning_point and any(v not in held for v in self._far(step)):
                    wanted = [v for v in self._far_ahead(step) if v not in held]
            trigger = self._trigger(newest, step)
            if wanted and trigger is not None:
                wanted = [value for value in wanted if value != trigger]
                holds.append(Hold(step, trigger, tuple(wanted), not self.is_first[step]))
                held.update(wanted)
            for at in range(step, stop):
                outputs = self.program.instructions[self.schedule[at]].outputs
                if self.is_first[at]:
                    self._remember(newest, outputs)
                held.update(outputs)
            step = stop
        return holds

    def _remember(self, newest: list[int], outputs: tuple[int, ...]) -> None:
        for value in outputs:
            if ties.can_trigger(self.program.avals[value]) and value in self.last_read:
                newest.append(value)
        # Only a few of the deepest can still be wanted.
        if len(newest) > 64:
            newest.sort(key=lambda v: self.depth[v])
            del newest[:32]

    def _trigger(self, newest: list[int], step: int) -> int | None:
        waiting = [v for v in newest if self.last_read[v] >= step]
        return max(reversed(waiting), key=lambda v: self.depth[v], default=None)

    def _far(self, step: int) -> list[int]:
        """What a backward instruction reads of the forward part."""
        reads = dict.fromkeys(self.program.instructions[self.schedule[step]].reads)
        return [v for v in reads if v in self.made_forward and ties.can_tie(self.program.avals[v])]

    def _far_ahead(self, step: int) -> list[int]:
        found: dict[int, None] = {}
        for at in range(step, min(len(self.schedule), step + _STRETCH)):
            if not self.is_first[at]:
                break
            if self.schedule[at] > self.turning_point:
                found.update(dict.fromkeys(self._far(at)))
        return list(found)

    def _read_by_region(self, start: int, stop: int) -> list[int]:
        made: set[int] = set()
        chosen: dict[int, None] = {}
        for step in range(start, stop):
            instruction = self.program.instructions[self.schedule[step]]
            outside = [
                v for v in dict.fromkeys(instruction.reads) if v not in made and ties.can_tie(self.program.avals[v])
            ]
            chosen.update(dict.fromkeys(v for v in outside if self.barriers or v not in self.arguments))
            if outside and not any(v in made or v in chosen for v in instruction.reads):
                chosen[min(outside, key=lambda v: self.size[v])] = None
            made.update(instruction.outputs)
        return list(chosen)


def depths(program: Program) -> dict[int, int]:
    """For each value, the number of instructions on the longest way to it."""
    depth = dict.fromkeys((*program.inputs, *program.constants), 0)
    for instruction in program.instructions:
        own = 1 + max((depth[value] for value in instruction.reads), default=0)
        depth.update(dict.fromkeys(instruction.outputs, own))
    return depth
