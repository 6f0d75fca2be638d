"""What PyTorch's operators take on a CPU where it is neither arithmetic nor traffic.

A roofline has a maximum over 3 x 3 windows at 1 ns for each element that it makes; PyTorch's kernel for pictures whose
channels are not last takes 25. Too low, plans recompute what is dear: a dropout draws a number in 6 ns, twelve times
what a roofline has for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final

import torch

from remat.torch import _private
from remat.torch._private import OpOverload
from remat.torch.trace import op_facts

# Nanoseconds for each element of the largest tensor, of 512 x 512 float32 numbers, on one core of an AMD EPYC (Zen 4)
# with PyTorch 2.13, as processor time. Listed where it is more than a roofline says by half; what depends on values was
# measured with masks of attention, which are quicker than random ones. ``benchmarks.torch_operators`` measures again.
_NANOSECONDS_PER_ELEMENT: Final[dict[str, float]] = {
    f"aten::{name}": each
    for each, names in (
        (0.8, ("exp", "log1p", "gelu_backward", "masked_fill")),
        (1.0, ("log", "log2", "log10", "cumsum", "cumprod", "argmax", "argmin", "where", "logsumexp")),
        (1.3, ("erf", "erfinv", "expm1", "exp2", "sin", "cos", "sinh", "cosh", "fmod", "remainder", "elu", "isfinite")),
        (1.5, ("softplus", "log_sigmoid_forward", "asin", "acos", "erfc", "tan", "atan2")),
        (2.2, ("any", "all")),
        (2.6, ("tanh", "atan", "pow")),
        (3.8, ("topk", "mish", "mish_backward")),
        (6.0, ("var", "std", "var_mean", "std_mean", "lgamma")),
        (13.0, ("digamma",)),
        (44.0, ("sort", "argsort")),
        (2.8, ("uniform_", "rand", "rand_like", "randint", "randint_like", "random_")),
        (3.4, ("normal_", "randn", "randn_like")),
        (5.8, ("bernoulli", "bernoulli_", "randperm")),
        (6.6, ("native_dropout",)),
    )
    for name in names
}
_APPROXIMATE_GELU: Final = {"aten::gelu": 1.7, "aten::gelu_backward": 1.9}
"""The same with ``approximate="tanh"``."""

_NORM_BESIDE_LAST: Final = 1.3
"""The same of a norm over other dimensions than the last, 1.2 to 2.2; one over the last takes what a sum takes."""

# Pictures: nanoseconds for each element where channels are not last and where they are. Pools: of what a window makes
# in the forward pass, or of its gradient; averages over 2 to 9 elements took 7 to 9, maxima 22 to 31.
_PER_ELEMENT_OF_A_PICTURE: Final[dict[str, tuple[float, float]]] = {
    "aten::native_batch_norm": (1.9, 0.45),
    "aten::native_batch_norm_backward": (0.5, 0.55),
    "aten::native_group_norm_backward": (0.3, 0.7),
    "aten::_adaptive_avg_pool2d": (0.7, 0.12),
    "aten::_adaptive_avg_pool2d_backward": (1.5, 0.2),
    "aten::upsample_nearest2d": (0.63, 0.2),
    "aten::upsample_nearest2d_backward": (0.63, 0.22),
    "aten::upsample_bilinear2d": (1.5, 0.3),
    "aten::upsample_bilinear2d_backward": (3.6, 0.5),
}
_PER_WINDOW: Final[dict[str, tuple[float, float]]] = {
    "aten::max_pool2d_with_indices": (25.0, 1.5),
    "aten::max_pool2d_with_indices_backward": (0.9, 1.15),
    "aten::avg_pool2d": (8.0, 0.9),
    "aten::avg_pool2d_backward": (8.0, 1.1),
}

_PRODUCTS_PER_NANOSECOND: Final = 100.0
"""Floating-point operations of a product of two matrices of 512 x 512 on the same core, 92 to 103 for other shapes."""

_NANOSECONDS_OF_A_COLLECTIVE: Final = 250_000.0
"""What a call takes beside its bytes: one of gloo's between two processes of that machine, which sends 64 KiB. Between
machines it takes longer. Too low, plans gather small parameters again rather than run an operator again."""

_ATTENTION: Final = 1.35
"""How many times longer than such a product attention's took in its fused kernels: 70 and 78 in a nanosecond."""

# The same for convolutions of one channel each: the forward pass and small windows, then gradients of windows above 9
# elements, where oneDNN has no quick kernel; channels not last, and last. Other convolutions took 78 to 121.
_DEPTHWISE: Final = (3.6, 2.1)
_DEPTHWISE_LARGE: Final = (1.8, 1.25)
_DEPTHWISE_LARGE_BACKWARD: Final = (20.0, 9.0)
_SMALL_WINDOW: Final = 9


def flops(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, counted: float) -> float:
    """Operations of a product of matrices that a CPU could do in the time that a call takes there.

    Args:
        func: the operator.
        args: of the call; tensors may be fake.
        kwargs: likewise.
        out: what it returned.
        counted: its own operations, as ``op_facts.flops`` counts them.
    """
    name = op_facts.base_name(func)
    if name in ("aten::convolution", "aten::convolution_backward"):
        return counted * _times_of_a_convolution(name, args)
    if name.startswith("aten::_scaled_dot_product_"):
        return counted * _ATTENTION
    return max(counted, _nanoseconds(name, args, kwargs, out) * _PRODUCTS_PER_NANOSECOND)


def collective_flops() -> float:
    """The same for a call that sends something, without its bytes."""
    return _NANOSECONDS_OF_A_COLLECTIVE * _PRODUCTS_PER_NANOSECOND


def _nanoseconds(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float:
    """0.0 where nothing is known."""
    of_windows = _PER_WINDOW.get(name)
    if of_windows is not None:
        counted = args if name.endswith("_backward") else out
        return of_windows[_has_channels_last(args)] * next(map(_elements, _tensors(counted)), 0)
    of_pictures = _PER_ELEMENT_OF_A_PICTURE.get(name)
    if of_pictures is not None:
        each = of_pictures[_has_channels_last(args)]
        if name == "aten::native_batch_norm" and not args[5]:  # The statistics are given.
            each = 0.0
    else:
        # In place it takes as long, and then the name ends in a line where the table has none.
        each = _NANOSECONDS_PER_ELEMENT.get(name, 0.0) or _NANOSECONDS_PER_ELEMENT.get(name.rstrip("_"), 0.0)
        if kwargs.get("approximate") == "tanh":
            each = _APPROXIMATE_GELU.get(name, each)
        if name == "aten::linalg_vector_norm" and not _takes_last(args):
            each = _NORM_BESIDE_LAST
        if name == "aten::pow" and _is_simple_power(args):
            each = 0.0
    return each * max(map(_elements, _tensors((args, kwargs, out))), default=0) if each else 0.0


def _times_of_a_convolution(name: str, args: tuple[Any, ...]) -> float:
    backward = name.endswith("_backward")
    picture, weight, groups = (args[1], args[2], args[9]) if backward else (args[0], args[1], args[8])
    if groups == 1 or groups != picture.shape[1]:
        return 1.0
    last = _has_channels_last((picture,))
    if math.prod(weight.shape[2:]) <= _SMALL_WINDOW:
        return _DEPTHWISE[last]
    return (_DEPTHWISE_LARGE_BACKWARD if backward else _DEPTHWISE_LARGE)[last]


def _has_channels_last(args: tuple[Any, ...]) -> bool:
    """Of the first tensor with a height and a width."""
    picture = next((tensor for tensor in _tensors(args) if tensor.dim() == 4), None)
    if picture is None or picture.is_contiguous():
        return False
    return picture.is_contiguous(memory_format=torch.channels_last)


def _takes_last(args: tuple[Any, ...]) -> bool:
    """Does a reduction take the last dimension, too?"""
    dims = args[2] if len(args) > 2 else None
    return not dims or any(dim in (-1, args[0].dim() - 1) for dim in dims)


def _is_simple_power(args: tuple[Any, ...]) -> bool:
    """Powers that the kernel computes as products, roots and quotients."""
    power = args[1] if len(args) > 1 else None
    return isinstance(power, int | float) and power in (-2, -1, -0.5, 0.5, 1, 2, 3)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in _private.tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _elements(tensor: torch.Tensor) -> int:
    return math.prod(tensor.shape)
