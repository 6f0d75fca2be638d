"""Scratch memory of oneDNN's kernels, which differs with the CPU, its instructions, the threads and the version: asked.

Each operator is run once on few samples, in each layout and precision that a step has it in. Beyond
that, scratch memory grows linearly with the number of samples, or with the length of the sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import accumulate
from typing import Any, Final

import torch

from remat.torch import _private
from remat.torch._private import OpOverload

_CONVOLUTION: Final = torch.ops.aten.convolution.default
_CONVOLUTION_BACKWARD: Final = torch.ops.aten.convolution_backward.default
_RNN: Final = torch.ops.aten.mkldnn_rnn_layer.default
_RNN_BACKWARD: Final = torch.ops.aten.mkldnn_rnn_layer_backward.default

_FEWEST_SAMPLES: Final = 4
"""Samples of the smaller of two runs, and at least one for each thread. A judgement: with fewer, threads share a sample
and keep other buffers."""
_MOST_WORK: Final = 2e9
"""Products of two numbers in one run of a convolution forward, some .1 s on two cores. A judgement: on larger batches
oneDNN may take another way, which then is not seen; with more, asking takes longer."""
FEWEST_POINTWISE_SAMPLES: Final = 16
"""With one thread PyTorch's own kernel runs 1 x 1 convolutions of fewer: ``use_mkldnn``, ``Convolution.cpp``."""
_MOST_PRODUCT_BYTES: Final = 1 << 28
"""Of the matrices of a product that is run. What oneDNN packs them into grows no more in much smaller ones."""

_LARGE_WINDOW: Final = 256
"""Numbers of a window from which oneDNN may make a weight's gradient as one product of matrices, which it packs in
memory of its own, past PyTorch's allocator: windows of 14 x 14 took nothing, of 16 x 16 and 32 x 32 up to 1.8 MB with
one thread, and twice as much with two."""
_FEWEST_PACKED: Final = 128
_MOST_COLUMNS_PACKED: Final = 384
"""It packs at least so many places of each row, and so many columns at a time. Found by counting the heap of 25 shapes
on a CPU with AVX-512, PyTorch 2.13; with other shapes oneDNN took another way, and then less than this."""

_Layout = tuple[tuple[int, ...], str]
"""A shape and where its channels are: "first", "last", "last with gaps" (a part of more channels) or "other"."""


def _layout(tensor: torch.Tensor) -> _Layout:
    shape = tuple(int(size) for size in tensor.shape)
    if tensor.is_contiguous():
        return shape, "first"
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(len(shape))
    if last is None or not _private.is_ordered_as_channels_last(tensor):
        return shape, "other"
    return shape, "last" if tensor.is_contiguous(memory_format=last) else "last with gaps"


def _example(layout: _Layout, dtype: torch.dtype, samples: int | None = None) -> torch.Tensor:
    """A tensor of such a layout, with another number of samples if one is given."""
    shape, channels = layout
    shape = shape if samples is None else (samples, *shape[1:])
    if channels == "other":
        return torch.zeros(shape[::-1], dtype=dtype).permute(*range(len(shape) - 1, -1, -1))
    if channels.startswith("last"):
        last = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
        both = (shape[0], 2 * shape[1], *shape[2:]) if channels == "last with gaps" else shape
        return torch.zeros(both, dtype=dtype).to(memory_format=last)[:, : shape[1]]
    return torch.zeros(shape, dtype=dtype)


def of_convolution(inputs: torch.Tensor, weight: torch.Tensor, has_bias: bool, how: Sequence[Any]) -> int:
    """Bytes that ``aten.convolution`` takes while it runs, ``how`` being its arguments from the stride on."""

    def run(samples: int) -> int:
        x, w = _example(images, dtype, samples), _example(weights, dtype)
        outputs = weights[0][0] if not frozen[3] else weights[0][1] * frozen[5]
        bias = torch.zeros(outputs, dtype=dtype) if has_bias else None
        return scratch_of(partial(_CONVOLUTION, x, w, bias, *frozen))

    images, weights, dtype, frozen = _layout(inputs), _layout(weight), inputs.dtype, _frozen(how)
    key = "forward", images[0][1:], images[1], weights, dtype, has_bias, frozen
    return _with_samples(key, run, images, weights, frozen)


def of_convolution_backward(
    gradient: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor, bias: Any, how: Sequence[Any]
) -> int:
    """Bytes that ``aten.convolution_backward`` takes while it runs, ``how`` being its arguments from the stride on."""

    def run(samples: int) -> int:
        tensors = _example(gradients, dtype, samples), _example(images, dtype, samples), _example(weights, dtype)
        return scratch_of(partial(_CONVOLUTION_BACKWARD, *tensors, bias, *frozen))

    gradients, images, weights = _layout(gradient), _layout(inputs), _layout(weight)
    dtype, frozen = inputs.dtype, _frozen(how)
    bias = None if bias is None else [int(size) for size in bias]
    key = "backward", gradients[0][1:], gradients[1], images[0][1:], images[1], weights, dtype, bias is None, frozen
    packed = _packed_past_allocator(gradients[0], images, weights) if frozen[6][1] else 0
    return _with_samples(key, run, images, weights, frozen) + packed


def _packed_past_allocator(gradient: tuple[int, ...], images: _Layout, weights: _Layout) -> int:
    """The most that oneDNN packs beside what it takes from PyTorch's allocator, of one image in each thread."""
    (outputs, *window), order = weights
    if math.prod(window[1:]) < _LARGE_WINDOW or "last" in order or "last" in images[1]:
        return 0
    places = max(_FEWEST_PACKED, math.prod(gradient[2:]))
    at_once = min(torch.get_num_threads(), gradient[0])
    return at_once * 4 * places * (math.prod(window) + min(outputs, _MOST_COLUMNS_PACKED))


def of_product(func: OpOverload, args: Sequence[Any]) -> int:
    """Bytes that a product of matrices takes while it runs, whether it makes its result or is given a tensor for it."""
    if func._overloadname == "out":
        func = func.overloadpacket.default
    layouts = tuple(
        (tuple(int(n) for n in t.shape), tuple(int(n) for n in t.stride())) for t in args if isinstance(t, torch.Tensor)
    )
    key = func, layouts, args[0].dtype, torch.get_num_threads()
    if key not in _known:
        _known[key] = _product(func, layouts, args[0].dtype)
    return _known[key]


_known: dict[Any, int] = {}


def _product(func: OpOverload, layouts: Any, dtype: torch.dtype) -> int:
    """The same for zeros in the layouts of the arguments, of which the longest side is cut where they are large."""
    (left, _), (right, _) = layouts[-2:]
    *leading, rows, inner = left
    sizes = [*leading, rows, inner, right[-1]]
    while _matrices_bytes(sizes, dtype) > _MOST_PRODUCT_BYTES:
        sizes[sizes.index(max(sizes))] //= 2
    *leading, rows, inner, columns = sizes

    def matrix(first: int, second: int, strides: Sequence[int]) -> torch.Tensor:
        if strides[-1] == 1:
            return torch.zeros(*leading, first, second, dtype=dtype)
        return torch.zeros(*leading, second, first, dtype=dtype).transpose(-1, -2)

    with _private.no_modes(), torch.no_grad():
        examples = [matrix(rows, inner, layouts[-2][1]), matrix(inner, columns, layouts[-1][1])]
        if len(layouts) == 3:  # What is added to the product: a number for each column, or a matrix.
            is_vector = len(layouts[0][0]) == 1
            added = (columns,) if is_vector else (*leading, rows, columns)
            examples.insert(0, torch.zeros(added, dtype=dtype))
        return scratch_of(partial(func, *examples))


def _matrices_bytes(sizes: Sequence[int], dtype: torch.dtype) -> int:
    """Of both factors and the product; the sizes are batch, where there is one, rows, inner side and columns."""
    *leading, rows, inner, columns = sizes
    return dtype.itemsize * math.prod(leading) * (rows * inner + inner * columns + rows * columns)


def _frozen(how: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(tuple(item) if isinstance(item, list | tuple) else item for item in how)


def _with_samples(key: Any, run: Callable[[int], int], images: _Layout, weights: _Layout, how: Sequence[Any]) -> int:
    """What a run with so many samples takes: asked with as many, or where that is much work, from two with fewer."""
    threads, samples = torch.get_num_threads(), images[0][0]
    fewest = max(_FEWEST_SAMPLES, threads)
    if threads == 1 and math.prod(weights[0][2:]) == 1:
        fewest = max(fewest, FEWEST_POINTWISE_SAMPLES)

    def asked(number: int) -> int:
        whole = key, number, threads
        if whole not in _known:
            with _private.no_modes(), torch.no_grad():
                _known[whole] = run(number)
        return _known[whole]

    # Every weight is read at each place where a window stands, one for each stride, or for each number that is read.
    places = math.prod(images[0][2:]) / (1 if how[3] else math.prod(how[0]))
    affordable = max(2 * fewest, int(_MOST_WORK / max(1.0, math.prod(weights[0]) * places)))
    if samples <= affordable:
        return asked(samples)
    half = affordable // 2
    return _on_line((half, affordable), (asked(half), asked(affordable)), samples)


class Line:
    """Bytes of a layer of an LSTM or GRU that grow linearly with the length of the sequence, through two points."""

    def __init__(self, lengths: tuple[int, int], kept: Sequence[int], scratch: Sequence[int]) -> None:
        self._lengths, self._kept, self._scratch = lengths, kept, scratch

    def kept_bytes(self, length: int) -> int:
        """Of what is kept for the backward pass."""
        return _on_line(self._lengths, self._kept, length)

    def workspace_bytes(self, length: int) -> int:
        """Of what is taken in passing."""
        return _on_line(self._lengths, self._scratch, length)


def _on_line(places: tuple[int, int], values: Sequence[int], place: int) -> int:
    """The value in a place, on the line through two others; at least 0."""
    first, second = places
    return max(0, round(values[0] + (values[1] - values[0]) * (place - first) / (second - first)))


def of_recurrence(args: tuple[Any, ...], backward: bool) -> Line:
    """What a layer of an LSTM or GRU keeps and takes, by the length of the sequence."""
    inputs, weights = args[0], args[2]
    mode = args[14] if backward else args[9]
    batch, features = inputs.shape[1:]
    return _recurrence(mode, weights.shape[0], batch, features, weights.shape[1], inputs.dtype, backward)


@cache
def _recurrence(
    mode: int, rows: int, batch: int, features: int, hidden: int, dtype: torch.dtype, backward: bool
) -> Line:
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
            scratch.append(scratch_of(run))
    return Line(lengths, kept, scratch)


def scratch_of(run: Callable[[], Any]) -> int:
    """Bytes that a call takes from PyTorch's allocator and gives back while it runs."""
    changes = _private.allocations(run)
    return max(accumulate(changes, initial=0)) - sum(changes)
