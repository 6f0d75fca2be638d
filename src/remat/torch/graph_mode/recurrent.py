"""An LSTM on a CPU as eager PyTorch runs it: one kernel of oneDNN for each layer and direction.

PyTorch decides for these kernels by looking at where its tensors are, and finds those of a trace nowhere. Left alone it
would trace every step of a sequence as operators of its own, whose results differ in their last bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from remat.torch._private import run_composite

_LSTM: Final = 2  # oneDNN's number for this kind of layer.
_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)


def lstm(
    inputs: torch.Tensor,
    states: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Any:
    """What ``torch.lstm`` computes, given the same arguments, by the operators that it runs on a CPU.

    Raises:
        NotImplementedError: on another device.
    """
    hidden, cell = states
    if not _takes_kernels([inputs, *states, *weights], hidden.shape[2] != cell.shape[2]):
        rest = (has_biases, layers, dropout, train, bidirectional, batch_first)
        return run_composite(torch.ops.aten.lstm.input, inputs, states, weights, *rest)
    of_layer = 4 if has_biases else 2
    matrices = [weights[start : start + of_layer] for start in range(0, len(weights), of_layer)]
    x = (inputs.transpose(0, 1) if batch_first else inputs).contiguous()
    hidden, cell = hidden.contiguous(), cell.contiguous()
    directions = 2 if bidirectional else 1
    last_hidden, last_cell = [], []
    for layer in range(layers):
        made = []
        for direction in range(directions):
            number = layer * directions + direction
            of_inputs, of_hidden, *biases = matrices[number]
            biases = biases or [torch.zeros_like(of_inputs), torch.zeros_like(of_hidden)]
            output, h, c, _ = torch.ops.aten.mkldnn_rnn_layer.default(
                *(x, of_inputs, of_hidden, *biases, hidden[number], cell[number], direction > 0, []),
                *(_LSTM, hidden.shape[2], layers, has_biases, bidirectional, batch_first, train),
            )
            made.append(output)
            last_hidden.append(h)
            last_cell.append(c)
        x = made[0] if directions == 1 else torch.cat(made, -1)
        if dropout and train and layer < layers - 1:
            x = torch.dropout(x, dropout, True)
    return x.transpose(0, 1) if batch_first else x, torch.stack(last_hidden, 0), torch.stack(last_cell, 0)


def _takes_kernels(tensors: Sequence[torch.Tensor], has_projections: bool) -> bool:
    """Would eager PyTorch take oneDNN's kernels for these tensors?"""
    kinds = {(t.device.type, t.dtype) for t in tensors}
    if any(device != "cpu" for device, _ in kinds):
        raise NotImplementedError(f"an LSTM on {sorted(device for device, _ in kinds)[0]} is not captured")
    is_on = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled
    if has_projections or not is_on or not tensors[0].numel():
        return False
    return all(dtype in _DTYPES for _, dtype in kinds)
