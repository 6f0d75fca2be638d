"""What Paddle's kernels allocate beside the results whose shapes the program says, on a CPU.

Found by measuring single operators of Paddle 3.3 with its own counter. A kernel that is missing here makes a step need
more than was predicted; ``tests/paddle`` compares the two on programs that hold each of these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from remat.paddle.trace import op_facts

_FLOAT_BYTES: Final = 4
_CHANNELS_LAST: Final = ("NHWC", "NDHWC")

RECURRENT: Final = "rnn"
"""The operator of all recurrent layers on a CPU."""
_CELLS: Final = {"LSTM": (4, 2), "GRU": (3, 1)}
"""Gates and states of a cell, by the operator's mode; a simple cell has one gate and no state."""


_WITH_BROADCAST: Final = frozenset(
    f"{name}_grad" for name in ("add", "subtract", "multiply", "divide", "maximum", "minimum", "elementwise_pow")
)
"""Gradients of element-wise operators, which make their results twice where an operand was spread in the middle."""


def workspace_bytes(
    op: Any,
    operands: Sequence[Sequence[int] | None],
    results: Sequence[Sequence[int] | None],
    bytes_of: Callable[[Any], int],
) -> int:
    """Scratch bytes of one run of an operator; 0 where nothing is known of it.

    Args:
        op: the operator.
        operands: the shapes of its operands; None for one that is absent or no tensor.
        results: those of its results.
        bytes_of: the bytes of a value of the program.
    """
    name = op_facts.kind(op)
    base, is_grad = name.removesuffix("_grad"), name.endswith("_grad")
    made = [value for value in op.results() if value.initialized()]
    if name == "add_n":  # Sums of half precision are formed in single precision.
        is_half = results[0] is not None and op_facts.element_bytes(op.results()[0].dtype) < _FLOAT_BYTES
        return _FLOAT_BYTES * math.prod(results[0] or ()) if is_half else 0
    if name == "einsum_grad":  # At most: how much its kernel turns around depends on the equation.
        return 2 * sum(map(bytes_of, made)) + bytes_of(op.operands_source()[-1])
    first = operands[0] if operands else None
    second = operands[1] if len(operands) > 1 else None
    if first is None:
        return 0
    if name == "layer_norm_grad":
        rows = math.prod(first[: int(op.attrs()["begin_norm_axis"])])
        return _FLOAT_BYTES * (2 * math.prod(first) + rows)
    if name == "batch_norm_grad":
        return 2 * _FLOAT_BYTES * math.prod(operands[3] or (0,))
    if name == "lamb_":
        return bytes_of(op.operands_source()[0])
    if name == "matmul_grad":
        size = op_facts.element_bytes(op.operands_source()[0].dtype)
        # Of one matrix the batch is folded into its rows, but for half precision.
        spread = [first, second] if len(second or ()) > 2 or size < _FLOAT_BYTES else [first]
        return size * sum(_spread(factor, operands[-1] or ()) for factor in spread)
    if name in _WITH_BROADCAST and second is not None:
        return sum(map(bytes_of, made)) if _is_spread_in_the_middle(first, second) else 0
    if base in op_facts.CONVOLUTIONS and second is not None:
        return _unfolded_bytes(op, first, second, operands[-1] if is_grad else results[0], is_grad=is_grad)
    if base in op_facts.TRANSPOSED and second is not None:
        return _folded_bytes(op, first, second, is_grad=is_grad)
    if name == RECURRENT:
        return _Recurrence.of(op, first).forward_scratch_bytes
    if name == f"{RECURRENT}_grad":
        unwanted_bytes = 0 if op.results()[0].initialized() else bytes_of(op.operands_source()[0])
        return _Recurrence.of(op, first).backward_scratch_bytes + unwanted_bytes
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
        """Gradients of a layer's gates, of the results of the layers below, and of both directions when apart."""
        between = self.layers if self.layers > 1 else 0
        sequences = self.directions * (self.gates + between) + (4 if self.directions > 1 else 0)
        return sequences * self.sequence_bytes + (2 if self.gates > 1 else 1) * self.state_bytes


def _is_spread_in_the_middle(first: Sequence[int], second: Sequence[int]) -> bool:
    """Is one of two operands spread along another axis than the outermost and innermost ones of the other?

    Axes of length 1 at the end of the smaller one do not count.
    """
    large, small = (first, second) if len(first) >= len(second) else (second, first)
    start = len(large) - len(small)
    while small and small[-1] == 1:
        small = small[:-1]
    return any(large[start + place] != size for place, size in enumerate(small))


def _spread(factor: Sequence[int] | None, product: Sequence[int]) -> int:
    """Elements of the gradient of a factor that is spread along a batch, before it is summed up along the batch."""
    if factor is None or len(factor) < 2 or math.prod(factor[:-2]) == math.prod(product[:-2]):
        return 0
    return math.prod(product[:-2]) * math.prod(factor[-2:])


def _unfolded_bytes(
    op: Any, image: Sequence[int], kernel: Sequence[int], made: Sequence[int] | None, *, is_grad: bool
) -> int:
    """One image of a convolution, unfolded into columns; a kernel of one pixel needs none.

    Where channels come last, the kernel turns its images first.
    """
    attributes = op.attrs()
    if made is None or len(kernel) not in (4, 5) or len(image) != len(kernel):
        return 0
    turned = 0
    places = made[2:]
    if attributes.get("data_format") in _CHANNELS_LAST:
        turned = (2 if is_grad else 1) * math.prod(image) + math.prod(made)
        places = made[1:-1]
    window = kernel[2:]
    moves = {*attributes.get("strides", (1,)), *attributes.get("dilations", (1,))} - {1}
    if set(window) == {1} and not moves and not any(attributes.get("paddings", (0,))):
        return _FLOAT_BYTES * turned
    return _FLOAT_BYTES * (kernel[1] * math.prod(window) * math.prod(places) + turned)


def _folded_bytes(op: Any, image: Sequence[int], kernel: Sequence[int], *, is_grad: bool) -> int:
    """The columns of one image that a transposed convolution folds into its result; its gradient unfolds all groups."""
    if len(kernel) not in (4, 5) or len(image) != len(kernel):
        return 0
    attributes = op.attrs()
    comes_last = attributes.get("data_format") in _CHANNELS_LAST
    places, turned = (image[1:-1], math.prod(image)) if comes_last else (image[2:], 0)
    groups = int(attributes.get("groups", 1)) if is_grad else 1
    return _FLOAT_BYTES * (groups * kernel[1] * math.prod(kernel[2:]) * math.prod(places) + turned)
