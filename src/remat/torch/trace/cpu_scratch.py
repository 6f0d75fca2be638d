"""Scratch memory of CPU kernels that no shape tells: copies in other layouts, and what oneDNN keeps of an LSTM or GRU.

Found by running each operator under the profiler, PyTorch 2.13; ``tests/torch/test_torch_cpu_scratch.py`` repeats that.
Where a figure here is too small, a step needs more than was predicted, and breaks its budget once that is more than the
reserve of ``remat.torch.plan``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity, profile

from remat.torch import _private
from remat.torch._private import OpOverload
from remat.torch.trace.op_facts import base_name

_AVX512_BLOCK: Final = 16
_OTHER_BLOCK: Final = 8
"""How many channels oneDNN stores in one block: as many floats as a vector register holds, but 8 where it holds 4. The
last block is filled up, so that with a wrong figure the copies of odd numbers of channels come out too large or small.
"""
_FEWEST_IN_BLOCKS: Final = 8
"""Channels that a convolution has to read before oneDNN copies them into blocks. Measured: up to 7 it reads as they
are."""
_LAST_SCRATCH: Final = 4096
_LAST_SCRATCH_OF_A_THREAD: Final = 4120
"""Bytes that a convolution takes where channels lie last, beside the weights in oneDNN's own order. Measured at 1 and 2
threads."""

_RNN: Final = torch.ops.aten.mkldnn_rnn_layer.default
_RNN_BACKWARD: Final = torch.ops.aten.mkldnn_rnn_layer_backward.default

# They write the losses of all elements before they sum them up.
_LOSSES: Final = frozenset({"aten::mse_loss", "aten::smooth_l1_loss", "aten::huber_loss"})

# These kernels first copy what is not contiguous.
_WANT_CONTIGUOUS: Final = frozenset(
    {
        "aten::native_layer_norm",
        "aten::native_layer_norm_backward",
        "aten::native_group_norm",
        "aten::native_group_norm_backward",
        "aten::upsample_nearest2d_backward",
        "aten::upsample_bilinear2d_backward",
        "aten::embedding_dense_backward",
        "aten::max_pool2d_with_indices_backward",
    }
)


def workspace_bytes(func: OpOverload, args: tuple[Any, ...], out: Any) -> int:
    """Scratch memory that the kernel takes from PyTorch's allocator while it runs."""
    name = base_name(func)
    tensors = [t for t in args if isinstance(t, torch.Tensor)]
    if name == "aten::convolution":
        return _convolution(tensors[0], tensors[1], out)
    if name == "aten::convolution_backward":
        return _convolution_backward(tensors[0], tensors[1], tensors[2], args[4])
    if name == "aten::native_batch_norm_backward":
        return _bytes(tensors[1])
    if name in ("aten::upsample_nearest2d", "aten::upsample_bilinear2d"):
        return _bytes(tensors[0]) + _bytes(out)
    if name in _LOSSES:
        return _bytes(tensors[0]) if out.numel() == 1 else 0
    if name == "aten::_safe_softmax":
        return int(math.prod(out.shape))
    if name in ("aten::mkldnn_rnn_layer", "aten::mkldnn_rnn_layer_backward"):
        backward = name.endswith("backward")
        scratch = _rnn_line(args, backward).workspace_bytes(args[0].shape[0])
        # With batch_first the outputs' gradient comes transposed, and is copied first.
        return scratch + _bytes(args[10]) if backward and not args[10].is_contiguous() else scratch
    if name in _WANT_CONTIGUOUS:
        return sum(_bytes(t) for t in tensors if not t.is_contiguous())
    return 0


def real_sizes(func: OpOverload, args: tuple[Any, ...], made: Sequence[int]) -> dict[int, int]:
    """Bytes of the outputs that PyTorch's shape rules do not know, by the numbers given for the outputs."""
    name = base_name(func)
    if name == "aten::mkldnn_rnn_layer" and len(made) == 4 and args[0].device.type == "cpu":
        return {made[3]: _rnn_line(args, False).kept_bytes(args[0].shape[0])}
    if name in _LOSSES and made and args[0].device.type == "cpu":
        # The scalar stands in the storage of the losses of all elements.
        return {made[0]: _bytes(args[0])}
    return {}


def _bytes(tensor: torch.Tensor) -> int:
    size: int = math.prod(tensor.shape) * tensor.element_size()
    return size


@cache
def _block() -> int:
    """How many channels oneDNN stores in one block on this processor."""
    return _AVX512_BLOCK if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else _OTHER_BLOCK


def _blocked(tensor: torch.Tensor) -> int:
    """Bytes of a copy in blocks of channels."""
    channels = int(tensor.shape[1])
    return _bytes(tensor) // max(1, channels) * (-(-channels // _block()) * _block())


def _read_in_blocks(inputs: torch.Tensor) -> int:
    """Bytes of the copy of what a convolution reads: few channels are read as they are, 8 are one block everywhere."""
    channels = inputs.shape[1]
    if channels < _FEWEST_IN_BLOCKS:
        return 0
    return _bytes(inputs) if channels == _OTHER_BLOCK else _blocked(inputs)


def _has_channels_last(tensor: torch.Tensor) -> bool:
    is_either = tensor.is_contiguous()
    return tensor.dim() == 4 and not is_either and tensor.is_contiguous(memory_format=torch.channels_last)


def _brought_last(*tensors: torch.Tensor) -> int:
    """Bytes of the copies of what has its channels elsewhere."""
    return sum(_bytes(t) for t in tensors if not t.is_contiguous(memory_format=torch.channels_last))


def _convolution(inputs: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> int:
    if _has_channels_last(inputs) or _has_channels_last(weight):
        scratch = _LAST_SCRATCH + torch.get_num_threads() * _LAST_SCRATCH_OF_A_THREAD
        return _brought_last(inputs, weight) + _bytes(weight) + scratch
    # At first everything lies in blocks; then the copies of what was read go, and the result is there in both orders.
    in_blocks = _read_in_blocks(inputs) + _bytes(weight) + _blocked(out) - _bytes(out)
    return max(in_blocks, _blocked(out)) if inputs.shape[1] >= _FEWEST_IN_BLOCKS else _blocked(out)


def _convolution_backward(
    gradient: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor, stride: Sequence[int]
) -> int:
    if _has_channels_last(inputs) or _has_channels_last(weight):
        return _brought_last(gradient, inputs, weight) + 2 * _bytes(weight)
    copied, own = _read_in_blocks(inputs), _bytes(weight)
    for_weights = _blocked(gradient) + copied + own
    # With a stride, the gradient of the inputs is there in both orders.
    return max(for_weights, 2 * copied - own) if max(stride) > 1 else for_weights


class _Line:
    """Bytes that grow linearly with the length of the sequence, through two points."""

    def __init__(self, lengths: tuple[int, int], kept: Sequence[int], scratch: Sequence[int]) -> None:
        self._lengths, self._kept, self._scratch = lengths, kept, scratch

    def kept_bytes(self, length: int) -> int:
        return self._at(self._kept, length)

    def workspace_bytes(self, length: int) -> int:
        return self._at(self._scratch, length)

    def _at(self, values: Sequence[int], length: int) -> int:
        short, long = self._lengths
        return max(0, round(values[0] + (values[1] - values[0]) * (length - short) / (long - short)))


def _rnn_line(args: tuple[Any, ...], backward: bool) -> _Line:
    inputs, weights = args[0], args[2]
    mode = args[14] if backward else args[9]
    batch, features = inputs.shape[1:]
    return _probe(mode, weights.shape[0], batch, features, weights.shape[1], inputs.dtype, backward)


@cache
def _probe(mode: int, rows: int, batch: int, features: int, hidden: int, dtype: torch.dtype, backward: bool) -> _Line:
    """Run a layer on two short sequences: only oneDNN knows what it needs, and that is linear in the length."""
    lengths = (16, 64)
    kept, scratch = [], []
    with _private.no_modes(), torch.enable_grad():
        weights = [torch.zeros(rows, n, dtype=dtype) for n in (features, hidden)]
        weights += [torch.zeros(rows, dtype=dtype) for _ in range(2)]
        states = [torch.zeros(batch, hidden, dtype=dtype) for _ in range(2)]
        for length in lengths:
            inputs = torch.zeros(length, batch, features, dtype=dtype)
            flags = (mode, hidden, 1, True, False)
            forward = partial(_RNN, inputs, *weights, *states, False, [], *flags, False, True)
            outputs, *last, workspace = forward()
            kept.append(int(workspace.untyped_storage().nbytes()))
            run = forward
            if backward:
                gradients = (torch.zeros_like(outputs), None, None)
                run = partial(
                    _RNN_BACKWARD,
                    *(inputs, *weights, *states, outputs, *last, *gradients, False),
                    *(mode, hidden, 1, True, True, False, [], False, workspace),
                )
            scratch.append(_scratch_of(run))
    return _Line(lengths, kept, scratch)


def _scratch_of(run: Callable[[], Any]) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        result = run()
    now = peak = 0
    for _, size in _private.memory_events(profiled):
        now += size
        peak = max(peak, now)
    del result
    return peak - now
