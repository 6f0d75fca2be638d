"""Scratch memory of CPU kernels that no shape tells: copies in other layouts, and what oneDNN says that it takes.

Found by running each operator under the profiler, PyTorch 2.13; ``tests/torch/test_torch_cpu_scratch.py`` repeats that.
Where a figure here is too small, a step needs more than was predicted, and breaks its budget once that is more than the
reserve of ``remat.torch.plan``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from remat.torch import _private
from remat.torch._private import OpOverload
from remat.torch.trace import cpu_attention, onednn_scratch
from remat.torch.trace.op_facts import base_name

_ELEMENTS_FOR_ONEDNN: Final = 20480
_LARGE_KERNEL: Final = 3
"""Limits in ``use_mkldnn``, ``Convolution.cpp``: PyTorch's own kernel runs single samples of at most so many numbers
where the kernel is not larger than that."""

_LOSSES: Final = frozenset({"aten::mse_loss", "aten::smooth_l1_loss", "aten::huber_loss"})

_PRODUCTS: Final = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"})

_WANT_CONTIGUOUS: Final = frozenset(
    {
        "aten::native_layer_norm",
        "aten::embedding_dense_backward",
        "aten::nll_loss_forward",
        "aten::nll_loss2d_forward",
        "aten::_softmax",
        "aten::_log_softmax",
        "aten::_softmax_backward_data",
        "aten::_log_softmax_backward_data",
    }
)

_POOLS_BACKWARD: Final = frozenset(
    {"aten::max_pool2d_with_indices_backward", "aten::avg_pool2d_backward", "aten::_adaptive_avg_pool2d_backward"}
)

# How many pictures they read, the input last.
_GROUP_NORMS: Final = {"aten::native_group_norm": 1, "aten::native_group_norm_backward": 2}
_GROUP_NORMS_COPY: Final = _private.VERSION >= (2, 14)

_BLOCK_BYTES: Final = 128 * 1024
"""Over another dimension than the last one, softmax kernels work on so many bytes at a time in each thread:
``BLOCK_SIZE`` in ``SoftMaxKernel.cpp``."""

# What such a kernel notes beside them: numbers for each place of a block, and in half precision copies of the block.
_SOFTMAX_NOTES: Final = {
    "aten::_log_softmax": (2, 1),
    "aten::_softmax_backward_data": (1, 2),
    "aten::_log_softmax_backward_data": (1, 1),
}


def workspace_bytes(func: OpOverload, args: tuple[Any, ...], out: Any) -> int:
    """Scratch memory that the kernel takes from PyTorch's allocator while it runs; 0 for what is not ``KNOWN``."""
    name = base_name(func)
    formula = _FORMULAS.get(name)
    if formula is None:
        return 0
    return formula(_Call(name, func, args, [t for t in args if isinstance(t, torch.Tensor)], out))


@dataclass(frozen=True)
class _Call:
    """A call of an operator, its arguments and result perhaps stand-ins.

    Attributes:
        name: of the operator, without its overload.
        func: the operator.
        args: its arguments.
        tensors: those of them that are tensors.
        out: what it returns.
    """

    name: str
    func: OpOverload
    args: tuple[Any, ...]
    tensors: list[torch.Tensor]
    out: Any


def _of_convolution(call: _Call) -> int:
    inputs, weight, how = *call.tensors[:2], call.args[3:]
    if _runs_in_onednn(inputs, weight, how):
        return onednn_scratch.of_convolution(inputs, weight, call.args[2] is not None, how)
    return _unfolded(inputs, weight, call.out, how)


def _of_convolution_backward(call: _Call) -> int:
    gradient, inputs, weight, how = *call.tensors[:3], call.args[4:]
    if _runs_in_onednn(inputs, weight, how):
        return onednn_scratch.of_convolution_backward(gradient, inputs, weight, call.args[3], how)
    return _unfolded_backward(gradient, inputs, weight, how)


def _of_upsampling(call: _Call) -> int:
    inputs = call.tensors[0]
    return 0 if _has_channels_last(inputs) else _bytes(inputs) + _bytes(call.out)


def _of_upsampling_backward(call: _Call) -> int:
    """Of a part of a tensor, both lie anew while the kernel works."""
    gradient = call.tensors[0]
    is_whole = gradient.is_contiguous() or _has_channels_last(gradient)
    return 0 if is_whole else _bytes(gradient) + _bytes(call.out)


def _of_pool_backward(call: _Call) -> int:
    """These kernels work in the order of the gradient that they read. What lies in another order is copied."""
    gradient, indices = call.tensors[0], call.tensors[2:]
    is_last = _private.is_ordered_as_channels_last(gradient)
    order = torch.channels_last if is_last else torch.contiguous_format
    return sum(_bytes(one) for one in (gradient, *indices, call.out) if not one.is_contiguous(memory_format=order))


def _of_group_norm(call: _Call) -> int:
    """From PyTorch 2.14 on these kernels copy what does not lie in the order of their input.

    Up to 2.13 they read any gradient as it lies, and take no input with gaps.
    """
    return _copied_by_group_norm(call.tensors[: _GROUP_NORMS[call.name]]) if _GROUP_NORMS_COPY else 0


def _of_product(call: _Call) -> int:
    """OneDNN runs them in half precision, and packs what they read. Of others, MKL's scratch is its own.

    What does not lie as they read it is copied first: what has neither rows nor columns in steps of one, for oneDNN
    also batches of matrices that do not lie one behind the other. BLAS reads a batch matrix by matrix.
    """
    dtype, factors = call.tensors[0].dtype, call.tensors[-2:]
    if dtype in (torch.bfloat16, torch.float16):
        if not _private.onednn_computes(dtype):
            return 0
        copied = [one for one in factors if not (_suits_blas(one) if one.dim() == 2 else _is_batch_in_order(one))]
        given = [
            torch.empty(one.shape, dtype=dtype, device="meta") if _is_among(one, copied) else one for one in call.args
        ]
        return sum(map(_bytes, copied)) + onednn_scratch.of_product(call.func, given)
    return sum(_bytes(one) // (one.shape[0] or 1 if one.dim() == 3 else 1) for one in factors if not _suits_blas(one))


def _of_loss(call: _Call) -> int:
    """They write the losses of all elements before they sum them up."""
    return _bytes(call.tensors[0]) if call.out.numel() == 1 else 0


def _of_recurrence(call: _Call) -> int:
    args, backward = call.args, call.name.endswith("backward")
    scratch = onednn_scratch.of_recurrence(args, backward).workspace_bytes(args[0].shape[0])
    # With batch_first the outputs' gradient comes transposed, and is copied first.
    return scratch + _bytes(args[10]) if backward and not args[10].is_contiguous() else scratch


_FEW_NUMBERS: Final = 32
"""Of counts and such, each in a tensor of its own."""


def _of_bags(call: _Call) -> int:
    """The gradient of an ``EmbeddingBag``'s table: a sparse one has a row for each index, which no graph shows."""
    gradient, indices = call.tensors[:2]
    mode, is_sparse, weights = call.args[8:11]
    if is_sparse:
        return indices.numel() * gradient.shape[-1] * gradient.element_size() + _bytes(indices) + _FEW_NUMBERS
    # Sorted, with where each of them was; a sum looks for its largest bag as well.
    sorted_bytes = (3 if mode else 4) * _bytes(indices)
    return sorted_bytes + _FEW_NUMBERS + (0 if weights is None else indices.numel() * gradient.element_size())


def _of_what_wants_order(call: _Call) -> int:
    """These kernels first copy what is not contiguous, and softmaxes make notes."""
    copied = sum(_bytes(t) for t in call.tensors if not t.is_contiguous())
    if call.name in _SOFTMAX_NOTES:
        dim = call.args[2 if call.name.endswith("data") else 1]
        return copied + _noted_by_softmax(call.name, call.tensors[0], dim)
    return copied


def _of_layer_norm_backward(call: _Call) -> int:
    """Each thread adds up the gradients of the weight and of the bias by itself."""
    shape, weight, bias, wanted = call.args[2], *call.args[5:8]
    like = next((one for one in (weight, bias) if one is not None), call.tensors[0])
    sums = 2 * torch.get_num_threads() * int(math.prod(shape)) if any(wanted[1:]) else 0
    return _of_what_wants_order(call) + sums * int(like.element_size())


def real_sizes(func: OpOverload, args: tuple[Any, ...], made: Sequence[int]) -> dict[int, int]:
    """Bytes of the outputs that PyTorch's shape rules do not know, by the numbers given for the outputs."""
    name = base_name(func)
    if name == "aten::mkldnn_rnn_layer" and len(made) == 4 and args[0].device.type == "cpu":
        return {made[3]: onednn_scratch.of_recurrence(args, False).kept_bytes(args[0].shape[0])}
    if name in _LOSSES and made and args[0].device.type == "cpu":
        # The scalar stands in the storage of the losses of all elements.
        return {made[0]: _bytes(args[0])}
    return {}


def _bytes(tensor: torch.Tensor) -> int:
    size: int = math.prod(tensor.shape) * tensor.element_size()
    return size


def _noted_by_softmax(name: str, tensor: torch.Tensor, dim: int) -> int:
    """What a softmax kernel takes past PyTorch's allocator, which only the process' heap shows."""
    dim %= max(1, tensor.dim())
    inner = math.prod(tensor.shape[dim + 1 :])
    if dim >= tensor.dim() - 1 or not tensor.numel():
        return 0
    along, outer = int(tensor.shape[dim]), math.prod(tensor.shape[:dim])
    places = min(max(1, _BLOCK_BYTES // along // tensor.element_size()), inner)
    threads = min(torch.get_num_threads(), outer * -(-inner // places))
    numbers, copies = _SOFTMAX_NOTES[name]
    if tensor.element_size() >= torch.float32.itemsize:
        copies = 0
    return threads * places * (numbers + copies * along) * max(tensor.element_size(), torch.float32.itemsize)


def _beside_a_cross_entropy(logits: torch.Tensor, pos_weight: torch.Tensor | None = None, reduction: int = 1) -> int:
    """Bytes of the sigmoids' logarithms, of how positive answers weigh, and of all losses where one number is made."""
    like_logits = 1 + bool(reduction) + (not logits.is_contiguous())
    return like_logits * _bytes(logits) + (0 if pos_weight is None else _bytes(pos_weight))


def _rolled_on_the_way(tensor: torch.Tensor, dims: Sequence[int]) -> int:
    """Bytes of what ``roll`` makes before its result: it rolls one dimension after the other, and flattens for none."""
    if not dims:
        return 0 if tensor.is_contiguous() else _bytes(tensor)
    return (len(dims) - 1) * _bytes(tensor)


def _copied_by_group_norm(read: Sequence[torch.Tensor]) -> int:
    """Bytes of what does not lie in the order of the input: the input itself, read last, or its gradient before it."""
    order = torch.channels_last if _private.is_ordered_as_channels_last(read[-1]) else torch.contiguous_format
    return sum(_bytes(one) for one in read if not one.is_contiguous(memory_format=order))


def _suits_blas(matrix: torch.Tensor) -> bool:
    """Does one dimension of a matrix, or of each of a batch, lie in steps of one, and the other beyond it?"""
    sizes, strides = matrix.shape[-2:], matrix.stride()[-2:]
    return 1 in sizes or any(strides[i] == 1 and strides[1 - i] >= sizes[i] for i in (0, 1))


def _is_among(one: Any, tensors: Sequence[torch.Tensor]) -> bool:
    return any(one is tensor for tensor in tensors)


def _is_batch_in_order(matrices: torch.Tensor) -> bool:
    return matrices.is_contiguous() or matrices.mT.is_contiguous()


def _has_channels_last(tensor: torch.Tensor) -> bool:
    is_either = tensor.is_contiguous()
    return tensor.dim() == 4 and not is_either and tensor.is_contiguous(memory_format=torch.channels_last)


def _runs_in_onednn(inputs: torch.Tensor, weight: torch.Tensor, how: Sequence[Any]) -> bool:
    """Does oneDNN run a convolution, or PyTorch's own kernel? ``use_mkldnn`` in ``Convolution.cpp`` decides so.

    Args:
        inputs: of the convolution.
        weight: its weight.
        how: its stride, padding, dilation, whether it is transposed, output padding and groups. Transposed and dilated
            convolutions, and those of volumes, have other kernels of PyTorch's own, which nothing is known of here.
    """
    stride, _, dilation, transposed, _, groups = how[:6]
    if transposed or max(dilation) > 1 or inputs.dim() > 4:
        return True
    is_on = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled
    if not is_on or inputs.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False
    if inputs.dtype != torch.float32:
        return _private.onednn_computes(inputs.dtype)
    is_pointwise = math.prod(weight.shape[2:]) == 1 and max(stride) == 1
    if is_pointwise and inputs.shape[0] < onednn_scratch.FEWEST_POINTWISE_SAMPLES and torch.get_num_threads() == 1:
        return False
    is_large_kernel = weight.dim() == 4 and min(weight.shape[2:]) > _LARGE_KERNEL
    return groups > 1 or is_large_kernel or inputs.shape[0] > 1 or inputs.numel() > _ELEMENTS_FOR_ONEDNN


def _unfolded(inputs: torch.Tensor, weight: torch.Tensor, results: torch.Tensor, how: Sequence[Any]) -> int:
    """Scratch of PyTorch's own convolution: all images unfolded for a matrix product, and weights brought in order."""
    stride, padding, groups = how[0], how[1], how[5]
    if math.prod(weight.shape[2:]) == 1 and max(stride) == 1 and not any(padding):
        return 0
    ordered = _bytes(weight) // groups if _has_channels_last(inputs) or _has_channels_last(weight) else 0
    return inputs.shape[0] * _unfolded_image(weight, results) + ordered


def _unfolded_image(weight: torch.Tensor, results: torch.Tensor) -> int:
    """Bytes of one image, or of a group of its channels, as the windows that each result is made of."""
    numbers: int = math.prod(weight.shape[1:]) * math.prod(results.shape[2:])
    return numbers * weight.element_size()


def _unfolded_backward(gradient: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor, how: Sequence[Any]) -> int:
    """Of the weight's gradient, all images unfolded; of the inputs', one image in each thread.

    The latter is memory that the kernel takes past PyTorch's allocator, which only the process' heap shows.
    """
    is_last = _has_channels_last(inputs) or _has_channels_last(weight)
    order = torch.channels_last if is_last else torch.contiguous_format
    copied = 0 if gradient.is_contiguous(memory_format=order) else _bytes(gradient)
    of_inputs, of_weight, _ = how[6]
    images = min(torch.get_num_threads(), inputs.shape[0]) if of_inputs else 0
    unfolded = _unfolded(inputs, weight, gradient, how) if of_weight else 0
    return copied + max(images * _unfolded_image(weight, gradient), unfolded)


_FORMULAS: Final[dict[str, Callable[[_Call], int]]] = {
    "aten::convolution": _of_convolution,
    "aten::convolution_backward": _of_convolution_backward,
    "aten::native_batch_norm_backward": lambda call: _bytes(call.tensors[1]),
    # gloo copies what a process gives.
    "_c10d_functional::all_gather_into_tensor": lambda call: (
        _bytes(call.tensors[0]) if call.tensors[0].device.type == "cpu" else 0
    ),
    "aten::binary_cross_entropy_with_logits": lambda call: _beside_a_cross_entropy(call.tensors[0], *call.args[3:5]),
    # The exponentials of all elements, and the largest of each row.
    "aten::_embedding_bag_backward": _of_bags,
    "aten::logsumexp": lambda call: _bytes(call.tensors[0]) + _bytes(call.out),
    "aten::roll": lambda call: _rolled_on_the_way(call.tensors[0], call.args[2] if len(call.args) > 2 else ()),
    "aten::_safe_softmax": lambda call: math.prod(call.out.shape),
    **dict.fromkeys(("aten::upsample_nearest2d", "aten::upsample_bilinear2d"), _of_upsampling),
    **dict.fromkeys(
        ("aten::upsample_nearest2d_backward", "aten::upsample_bilinear2d_backward"), _of_upsampling_backward
    ),
    **dict.fromkeys(_POOLS_BACKWARD, _of_pool_backward),
    **dict.fromkeys(_GROUP_NORMS, _of_group_norm),
    **dict.fromkeys(_PRODUCTS, _of_product),
    **dict.fromkeys(_LOSSES, _of_loss),
    **dict.fromkeys(("aten::mkldnn_rnn_layer", "aten::mkldnn_rnn_layer_backward"), _of_recurrence),
    **dict.fromkeys(
        (*cpu_attention.FORWARD, *cpu_attention.BACKWARD),
        lambda call: cpu_attention.workspace_bytes(call.name, call.tensors),
    ),
    **dict.fromkeys(_WANT_CONTIGUOUS, _of_what_wants_order),
    "aten::native_layer_norm_backward": _of_layer_norm_backward,
}

KNOWN: Final = frozenset(_FORMULAS)
"""The operators that there is a formula for, which may say that a call takes nothing."""
