"""What is known beforehand of a planned forward pass, so that each operator of a step needs little more than a look."""

from __future__ import annotations

from typing import Any

from remat.torch.api.plan import StepPlan
from remat.torch.trace import op_facts


class PlannedOp:
    """What is known beforehand of one op of the forward pass.

    Attributes:
        func: the operator.
        made: the storages that it makes, by number.
        shapes: of these, None where it is not known.
        shape: likewise, where it makes one.
        is_kept: are they kept?
        repeats: does it run again?
        writes: storages of the step that it writes to.
        is_watched: is there more to do than to see whether the step follows the plan?
    """

    __slots__ = ("func", "is_kept", "is_watched", "made", "repeats", "shape", "shapes", "writes")

    def __init__(self, plan: StepPlan, index: int) -> None:
        storages, directions = plan.step.recording.storages, plan.directions
        op = plan.step.recording.ops[index]
        self.func = op.func
        self.made = op.makes
        self.shapes = tuple(storages[number].shape for number in op.makes)
        self.shape = self.shapes[0] if len(self.shapes) == 1 else None
        self.is_kept = tuple(number in directions.kept for number in op.makes)
        self.repeats = index in directions.rerun
        self.writes = frozenset(number for number in op.writes if storages[number].made_by is not None)
        self.is_watched = self.repeats or True in self.is_kept or op_facts.may_write(op.func)

    def has(self, func: Any, shapes: list[tuple[int, ...]]) -> bool:
        """Is a call of an operator that made tensors of these shapes the one that was planned?"""
        if func is not self.func or len(shapes) != len(self.shapes):
            return False
        return all(known is None or known == shape for shape, known in zip(shapes, self.shapes, strict=True))


class PlannedForward:
    """The forward pass of a plan: its ops, and which node each saved tensor reads."""

    def __init__(self, plan: StepPlan) -> None:
        recording, instance = plan.step.recording, plan.directions.instance
        self.directions = plan.directions
        self.ops = [PlannedOp(plan, index) for index in range(recording.forward_ops)]
        self.names = [op.name for op in recording.ops[: recording.forward_ops]]
        self.reads = {
            (slot.position, slot.turn): (number, instance[number][0])
            for number, slot in enumerate(recording.slots)
            if number in instance
        }

    def find(self, calls: list[tuple[Any, list[tuple[int, ...]]]], start: int) -> int | None:
        """The place after the first run of planned ops, from ``start`` on, that are like these calls."""
        for place in range(start, len(self.ops) - len(calls) + 1):
            if all(self.ops[place + n].has(*call) for n, call in enumerate(calls)):
                return place + len(calls)
        return None
