"""Memory of kernels on a CPU that no shape tells: copies in other layouts, and what oneDNN keeps of a recurrent layer.

Found by running each operator under the profiler, PyTorch 2.13; ``tests/torch/test_torch_cpu_kernels.py`` repeats that.
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

_BLOCK: Final = 16
"""oneDNN stores channels in blocks of this many."""
_SMALL_BLOCK: Final = 8
_LAST_SCRATCH: Final = 4096
_LAST_SCRATCH_OF_A_THREAD: Final = 4120
"""Beside the weights in its own order, with channels last."""

_RNN: Final = torch.ops.aten.mkldnn_rnn_layer.default
_RNN_BACKWARD: Final = torch.ops.aten.mkldnn_rnn_layer_backward.default

_LOSSES: Final = frozenset({"mse_loss", "smooth_l1_loss", "huber_loss"})

# These kernels first copy what is not contiguous.
_WANT_CONTIGUOUS: Final = frozenset(
    {
        "native_layer_norm",
        "native_layer_norm_backward",
        "native_group_norm",
        "native_group_norm_backward",
        "upsample_nearest2d_backward",
        "upsample_bilinear2d_backward",
        "embedding_dense_backward",
        "max_pool2d_with_indices_backward",
    }
)


def workspace_bytes(func: OpOverload, args: tuple[Any, ...], out: Any) -> int:
    """Scratch memory that the kernel takes from PyTorch's allocator while it runs."""
    name = func.name().partition("::")[2].partition(".")[0]
    tensors = [t for t in args if isinstance(t, torch.Tensor)]
    if name == "convolution":
        return _convolution(tensors[0], tensors[1], out)
    if name == "convolution_backward":
        return _convolution_backward(tensors[0], tensors[1], tensors[2], args[4])
    if name == "native_batch_norm_backward":
        return _bytes(tensors[1])
    if name in ("upsample_nearest2d", "upsample_bilinear2d"):
        return _bytes(tensors[0]) + _bytes(out)
    if name in _LOSSES:
        return _bytes(tensors[0]) if out.numel() == 1 else 0
    if name == "_safe_softmax":
        return int(math.prod(out.shape))
    if name in ("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"):
        backward = name.endswith("backward")
        scratch = _rnn_line(args, backward).workspace_bytes(args[0].shape[0])
        # With batch_first the outputs' gradient comes transposed, and is copied first.
        return scratch + _bytes(args[10]) if backward and not args[10].is_contiguous() else scratch
    if name in _WANT_CONTIGUOUS:
        return sum(_bytes(t) for t in tensors if not t.is_contiguous())
    return 0


def real_sizes(func: OpOverload, args: tuple[Any, ...], made: Sequence[int]) -> dict[int, int]:
    """Bytes of the outputs that PyTorch's shape rules do not know, by the numbers given for the outputs."""
    name = func.name().partition("::")[2].partition(".")[0]
    if name == "mkldnn_rnn_layer" and len(made) == 4 and args[0].device.type == "cpu":
        return {made[3]: _rnn_line(args, False).kept_bytes(args[0].shape[0])}
    if name in _LOSSES and made and args[0].device.type == "cpu":
        # The scalar stands in the storage of the losses of all elements.
        return {made[0]: _bytes(args[0])}
    return {}


def _bytes(tensor: torch.Tensor) -> int:
    size: int = math.prod(tensor.shape) * tensor.element_size()
    return size


def _blocked(tensor: torch.Tensor) -> int:
    """Bytes of a copy in blocks of channels."""
    channels = int(tensor.shape[1])
    return _bytes(tensor) // max(1, channels) * (-(-channels // _BLOCK) * _BLOCK)


def _read_in_blocks(inputs: torch.Tensor) -> int:
    """Bytes of the copy of what a convolution reads: few channels are read as they are, up to 8 are one block."""
    channels = inputs.shape[1]
    if channels < _SMALL_BLOCK:
        return 0
    return _bytes(inputs) if channels == _SMALL_BLOCK else _blocked(inputs)


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
    copied = _read_in_blocks(inputs)
    return copied + _bytes(weight) + _blocked(out) - _bytes(out) if copied else _blocked(out)


def _convolution_backward(
    gradient: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor, stride: Sequence[int]
) -> int:
    if _has_channels_last(inputs) or _has_channels_last(weight):
        return _brought_last(gradient, inputs, weight) + 2 * _bytes(weight)
    copied, own = _read_in_blocks(inputs), _bytes(weight)
    for_weights = _blocked(gradient) + copied + own
    # A strided one makes the inputs' gradient in blocks and not.
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
