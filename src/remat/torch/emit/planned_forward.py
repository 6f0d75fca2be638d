"""What is known of the forward pass before it runs under a plan: made once, and used by every step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from remat.torch import _private
from remat.torch.emit.eager_order import Directions
from remat.torch.emit.out_of_step import UnplannedCall
from remat.torch.trace import op_facts
from remat.torch.trace.recording import Recording


class PlannedOp:
    """What is known beforehand of one op of the forward pass, so that the step needs little more than a look at it.

    Attributes:
        number: of the op in the recording.
        func: the operator.
        made: the storages that it makes, by number.
        shapes: of their tensors; None where a shape is not known.
        shape: the only one of them, where it makes one storage; else None.
        is_kept: for each of the storages, is it kept for a recomputation?
        repeats: does the op run again?
        writes: storages of the step that it writes to.
        is_watched: is there more to do than to see whether the step follows the plan?
        is_factory: does PyTorch hand out another tensor than the one that is seen below autograd?
    """

    __slots__ = (
        "func",
        "is_factory",
        "is_kept",
        "is_watched",
        "made",
        "number",
        "repeats",
        "shape",
        "shapes",
        "writes",
    )

    def __init__(self, recording: Recording, directions: Directions, index: int) -> None:
        storages, op = recording.storages, recording.ops[index]
        self.number = index
        self.func = op.func
        self.made = op.makes
        self.shapes = tuple(storages[number].shape for number in op.makes)
        self.shape = self.shapes[0] if len(self.shapes) == 1 else None
        self.is_kept = tuple(number in directions.kept for number in op.makes)
        self.repeats = index in directions.rerun
        self.writes = frozenset(number for number in op.writes if storages[number].made_by is not None)
        self.is_watched = self.repeats or True in self.is_kept or op_facts.may_write(op.func)
        self.is_factory = _private.is_factory(op.func)

    def has(self, func: Any, shapes: list[tuple[int, ...]]) -> bool:
        """Is a call of an operator that made tensors of these shapes the one that was planned?"""
        if func is not self.func or len(shapes) != len(self.shapes):
            return False
        return all(known is None or known == shape for shape, known in zip(shapes, self.shapes, strict=True))


class PlannedForward:
    """The forward pass under a plan, made once and used by every step. A position is that of an op in ``ops``.

    Args:
        recording: of the step.
        directions: what the plan does about each saved tensor.

    Attributes:
        ops: what is known of each, ``fully_shard``'s own left out, which no plan changes.
        names: their names, for messages.
        reads: by position and turn of a tensor that autograd saves: its number, and that of its storage.
        turns: by position, how many tensors autograd saves there.
        makers: by the number of a storage, the op that makes it.
    """

    def __init__(self, recording: Recording, directions: Directions) -> None:
        self.directions = directions
        forward = recording.ops[: recording.forward_ops]
        seen = [index for index, op in enumerate(forward) if not op.is_own_code]
        self.ops = [PlannedOp(recording, directions, index) for index in seen]
        self.names = [forward[index].name for index in seen]
        # How many of the ops above come before an op of the recording.
        positions = [0, *accumulate(not op.is_own_code for op in recording.ops)]
        self.reads: dict[int, dict[int, tuple[int, int]]] = {}
        self.turns: Counter[int] = Counter()
        for number, saved in enumerate(recording.saved):
            position = positions[saved.position]
            if number in directions.instance:
                read = (number, directions.instance[number][0])
                self.reads.setdefault(position, {})[self.turns[position]] = read
            self.turns[position] += 1
        self.makers = {number: index for index, op in enumerate(self.ops) for number in op.made}

    def find(self, calls: Sequence[UnplannedCall], start: int) -> int | None:
        """The first of the planned ops, from ``start`` on, of which a run is like these calls."""
        for place in range(start, len(self.ops) - len(calls) + 1):
            if all(self.ops[place + n].has(call.func, call.shapes) for n, call in enumerate(calls)):
                return place
        return None
