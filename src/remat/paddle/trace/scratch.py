"""What Paddle's kernels allocate beside the results whose shapes the program says, on a CPU.

Found by measuring single operators of Paddle 3.3 with its own counter. A kernel that is missing here makes a step need
more than was predicted; ``tests/paddle`` compares the two on programs that hold each of these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from remat.paddle.trace import op_facts

_FLOAT_BYTES: Final = 4

RECURRENT: Final = "rnn"
"""The operator of all recurrent layers on a CPU."""
_CELLS: Final = {"LSTM": (4, 2), "GRU": (3, 1)}
"""Gates and states of a cell, by the operator's mode; a simple cell has one gate and no state."""


def workspace_bytes(op: Any, operands: Sequence[Sequence[int] | None], results: Sequence[Sequence[int] | None]) -> int:
    """Scratch bytes of one run of an operator; 0 where nothing is known of it."""
    name = op_facts.kind(op)
    first = operands[0] if operands else None
    if first is None:
        return 0
    if name == "layer_norm_grad":
        return 2 * _FLOAT_BYTES * math.prod(first)
    if name.removesuffix("_grad") in ("conv2d", "depthwise_conv2d"):
        made = operands[-1] if name.endswith("_grad") else results[0]
        return _unfolded_bytes(op, first, operands[1], made)
    if name == RECURRENT:
        return _Recurrence.of(op, first).forward_scratch_bytes
    if name == f"{RECURRENT}_grad":
        return _Recurrence.of(op, first).backward_scratch_bytes
    return 0


def bytes_unsaid(op: Any, first: Sequence[int] | None) -> dict[int, int]:
    """For results whose shapes the program does not say, by their places, the bytes that the kernel allocates.

    Args:
        op: the operator.
        first: the shape of its first operand.
    """
    if op_facts.kind(op) != RECURRENT or first is None or op_facts.is_test(op):
        return {}
    recurrence = _Recurrence.of(op, first)
    return {1: recurrence.mask_bytes, 3: recurrence.reserve_bytes}


@dataclass(frozen=True)
class _Recurrence:
    """An operator of recurrent layers: all their layers and directions, over a whole sequence.

    Attributes:
        gates: of a cell.
        states: values of a cell beside its gates that the backward pass needs.
        layers: one upon the other.
        directions: 1 or 2.
        state_bytes: of one state of a whole batch.
        sequence_bytes: of the results of one layer in one direction.
        weight_bytes: of the weights between a cell's states.
    """

    gates: int
    states: int
    layers: int
    directions: int
    state_bytes: int
    sequence_bytes: int
    weight_bytes: int

    @classmethod
    def of(cls, op: Any, first: Sequence[int]) -> _Recurrence:
        attributes = op.attrs()
        steps, samples = first[:2]
        hidden = int(attributes["hidden_size"])
        gates, states = _CELLS.get(str(attributes["mode"]), (1, 0))
        state_bytes = _FLOAT_BYTES * samples * hidden
        weight_bytes = _FLOAT_BYTES * gates * hidden * hidden
        directions = 2 if attributes["is_bidirec"] else 1
        layers = int(attributes["num_layers"])
        return cls(gates, states, layers, directions, state_bytes, steps * state_bytes, weight_bytes)

    @property
    def mask_bytes(self) -> int:
        """A byte for each element of a layer's result, also where nothing is dropped."""
        return self.directions * self.sequence_bytes // _FLOAT_BYTES

    @property
    def reserve_bytes(self) -> int:
        """What the backward pass needs: gates and states of all layers, and the results of all but the last."""
        return self.directions * self.sequence_bytes * ((self.gates + self.states + 1) * self.layers - 1)

    @property
    def forward_scratch_bytes(self) -> int:
        """Results of a layer below, and of both directions before they are joined."""
        sequences = (self.directions if self.layers > 1 else 0) + (2 if self.directions > 1 else 0)
        is_gru = self.gates == 3
        return sequences * self.sequence_bytes + self.state_bytes + (self.weight_bytes if is_gru else 0)

    @property
    def backward_scratch_bytes(self) -> int:
        """Gradients of a layer's gates, of its results, and of the results of the layers below."""
        between = self.layers if self.layers > 1 else 0
        sequences = self.directions * (self.gates + 1 + between) + (4 if self.directions > 1 else 0)
        return sequences * self.sequence_bytes + (2 + self.states) * self.state_bytes


def _unfolded_bytes(op: Any, image: Sequence[int], kernel: Sequence[int] | None, made: Sequence[int] | None) -> int:
    """One image of a convolution, unfolded into columns; a kernel of one pixel needs none."""
    attributes = op.attrs()
    if kernel is None or made is None or len(kernel) != 4 or len(image) != 4:
        return 0
    height, width = kernel[2:]
    moves = {*attributes.get("strides", (1,)), *attributes.get("dilations", (1,))} - {1}
    if height == width == 1 and not moves and not any(attributes.get("paddings", (0,))):
        return 0
    positions = made[1] * made[2] if attributes.get("data_format") == "NHWC" else made[2] * made[3]
    return _FLOAT_BYTES * kernel[1] * height * width * positions
