"""What remat knows of PyTorch's operators: which may repeat, how they repeat exactly, what they cost.

Everything unknown is kept: an operator may run twice only if it is one of PyTorch's own, draws nothing at random
(or draws from a generator whose state can be put back), and writes to nothing but what it made.
"""

from __future__ import annotations

import math
from contextlib import suppress
from functools import cache
from typing import Any, Final

import torch

from remat.torch import _private
from remat.torch._private import OpOverload
from remat.torch.trace import draws

_OWN_NAMESPACES: Final = frozenset({"aten"})

# The tables below were read from the schemas and kernels of PyTorch 2.13. An operator that is missing in one of them
# would run twice where it must not (a BatchNorm would move its statistics twice), or be kept without need.

# Normalisations update running statistics, though their schema does not say so. The positions of those arguments, and
# of the flag by which the call says that they are written; None where they always are.
_RUNNING_STATISTICS: Final[dict[str, tuple[tuple[int, ...], int | None]]] = {
    "aten::native_batch_norm": ((3, 4), 5),
    "aten::cudnn_batch_norm": ((3, 4), 5),
    "aten::miopen_batch_norm": ((3, 4), 5),
    "aten::_native_batch_norm_legit": ((3, 4), 5),
    "aten::_batch_norm_with_update": ((3, 4), None),
}
# Without their running statistics these compute the same, so that a second run leaves them out.
_WITHOUT_BUFFERS: Final = frozenset({"aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"})

# Attention kernels are tagged as random, but without dropout they draw nothing. The position of the probability, whose
# name is dropout_p.
_DROPOUT_ARGUMENT: Final = {
    "aten::_scaled_dot_product_flash_attention": 3,
    "aten::_scaled_dot_product_flash_attention_for_cpu": 3,
    "aten::_scaled_dot_product_efficient_attention": 5,
    "aten::_scaled_dot_product_cudnn_attention": 5,
}

# They hand values to Python, change a storage's size or owner, or talk to a stream: a second run is not the same.
_NEVER_REPEATED: Final = frozenset(
    {
        "aten::_local_scalar_dense",
        "aten::item",
        "aten::set_",
        "aten::resize_",
        "aten::_resize_output_",
        "aten::_assert_async",
        "aten::record_stream",
        "aten::_fused_moving_avg_obs_fq_helper",
    }
)
# They lay a tensor's own axes out anew, where others make another tensor: their schema says that they write to it. A
# recurrent layer of ``batch_first`` turns its result so.
_VIEWS_IN_PLACE: Final = frozenset(
    f"aten::{name}_" for name in ("as_strided", "squeeze", "swapaxes", "swapdims", "t", "transpose", "unsqueeze")
)
# On a GPU their threads race, so that sums are made in another order at each run.
_UNORDERED_ON_GPU: Final = frozenset(
    {
        "aten::index_add",
        "aten::scatter_add",
        "aten::index_put",
        "aten::scatter_reduce",
        "aten::cumsum",
        "aten::bincount",
    }
)

# Rough floating-point operations per element, where it is not one. They are judgements by the usual polynomial and
# table methods, not measured; element-wise operators are bound by the bytes that they move, so that a figure that is
# twice too large or too small hardly changes a plan.
_FLOPS_PER_ELEMENT: Final = {
    f"aten::{name}": flops
    for flops, names in (
        (4.0, ("div", "rsqrt", "sqrt", "reciprocal")),
        (12.0, ("exp", "log", "sin", "cos", "tanh", "sigmoid", "silu", "_softmax", "_log_softmax")),
        (20.0, ("gelu", "erf", "pow", "mish", "softplus", "silu_backward", "gelu_backward")),
        (40.0, ("bernoulli_", "native_dropout", "normal_", "uniform_", "rand_like", "randn_like")),
        (6.0, ("native_layer_norm", "native_batch_norm", "native_group_norm")),
    )
    for name in names
}


# Products that are added to what is there already: they take the time of those that make a tensor.
_WITHOUT_WRITE: Final[dict[Any, Any]] = {torch.ops.aten.addmm_.default: torch.ops.aten.addmm.default}


@cache
def base_name(func: OpOverload) -> str:
    """The operator without its overload: ``aten::add``. Asking PyTorch takes longer than many an operator."""
    return str(func.name()).partition(".")[0]


@cache
def kind(func: OpOverload) -> str:
    """The operator with its overload, as graphs write it: ``add.Tensor``."""
    return str(func.name()).partition("::")[2]


@cache
def may_draw(func: OpOverload) -> bool:
    """Can a call of this operator draw random numbers?"""
    return torch.Tag.nondeterministic_seeded in func.tags


def is_random(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Does this call draw random numbers?"""
    if not may_draw(func):
        return False
    place = _DROPOUT_ARGUMENT.get(base_name(func))
    if place is None:
        return True
    probability = args[place] if place < len(args) else kwargs.get("dropout_p", 0.0)
    return bool(probability != 0.0)


@cache
def is_plain(func: OpOverload) -> bool:
    """Does this operator neither write to an argument nor draw at random, whatever it is called with?"""
    return not may_write(func) and not may_draw(func)


@cache
def _is_repeatable(func: OpOverload, on_gpu: bool) -> bool:
    """May calls of this operator run a second time, as far as that does not depend on the arguments?"""
    base = base_name(func)
    if func.namespace not in _OWN_NAMESPACES or base in _NEVER_REPEATED:
        return False
    if torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags:
        return False
    if on_gpu and base.rstrip("_") in _UNORDERED_ON_GPU:
        return False
    return base not in _RUNNING_STATISTICS or base in _WITHOUT_BUFFERS


_EMPTY: Final = frozenset(
    f"aten::{name}" for name in ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")
)


def is_empty(func: OpOverload) -> bool:
    """Does an operator only allocate, and touch no byte?"""
    return base_name(func) in _EMPTY


def may_repeat(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], *, on_gpu: bool) -> bool:
    """May this call run a second time with the same result and no other effect than on what it writes to?"""
    if not _is_repeatable(func, on_gpu):
        return False
    return not is_random(func, args, kwargs) or draws.may_draw_again(func, args, kwargs)


def may_repeat_draw(func: OpOverload) -> bool:
    """May a random call run a second time, with the default generator in the state in which it was before the first?"""
    return _is_repeatable(func, False) and draws.may_draw_again_from_default(func)


@cache
def is_view(func: OpOverload) -> bool:
    """Does an operator read and write no number, but only say where a tensor lies, a new one or that very one?"""
    return bool(func.is_view) or base_name(func) in _VIEWS_IN_PLACE


@cache
def may_write(func: OpOverload) -> bool:
    """Can a call of this operator write to an argument, running statistics included?"""
    return not is_view(func) and (_private.is_mutable(func) or base_name(func) in _RUNNING_STATISTICS)


def written(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that this call writes to, running statistics included."""
    if is_view(func):
        return []
    if _private.is_mutable(func):
        return _private.written_arguments(func, args, kwargs)
    return running_statistics(func, args)


def running_statistics(func: OpOverload, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """The buffers that a normalisation updates without saying so in its schema."""
    places, flag = _RUNNING_STATISTICS.get(base_name(func), ((), None))
    if flag is not None and not (flag < len(args) and args[flag]):
        return []
    return [args[place] for place in places if place < len(args) and isinstance(args[place], torch.Tensor)]


def repeatable_call(func: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a second run: a normalisation over the batch does without its running statistics."""
    if not running_statistics(func, args):
        return args
    places, _ = _RUNNING_STATISTICS[base_name(func)]
    return tuple(None if place in places else value for place, value in enumerate(args))


def flops(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float:
    """Floating-point operations of one run; a multiplication and an addition count as two."""
    if base_name(func) == "aten::convolution_backward":
        return _convolution_backward_flops(*args)
    formula = _private.flop_formula(_WITHOUT_WRITE.get(func, func))
    if formula is not None:
        with suppress(AssertionError):  # That of attention in PyTorch 2.9 knows no groups of heads.
            return float(formula(*args, **kwargs, out_val=out))
    name = base_name(func)
    tensors = [t for t in _private.tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)]
    elements: int = max((math.prod(t.shape) for t in tensors), default=0)
    if name == "aten::mkldnn_rnn_layer":
        return 2.0 * _rnn_products(args)
    if name == "aten::mkldnn_rnn_layer_backward":
        return 6.0 * _rnn_products(args)
    if name.startswith("aten::_scaled_dot_product_"):
        query, key = args[:2] if "backward" not in name else args[1:3]
        products = 2.0 * math.prod(query.shape) * int(key.shape[-2])
        return float(products * (5 if "backward" in name else 2))
    return float(_FLOPS_PER_ELEMENT.get(name, 1.0) * elements)


def _convolution_backward_flops(gradient: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor, *how: Any) -> float:
    """Each gradient of two takes what the forward pass took; PyTorch's formula multiplies a weight's by the groups."""
    is_transposed, (of_inputs, of_weight, _) = how[4], how[7]
    places = math.prod((inputs if is_transposed else gradient).shape)
    return 2.0 * (bool(of_inputs) + bool(of_weight)) * places * math.prod(weight.shape[1:])


def _rnn_products(args: tuple[Any, ...]) -> float:
    """Multiplications of a recurrent layer: each step and sample meets every weight of both matrices."""
    inputs, *weights = [t for t in args[:3] if isinstance(t, torch.Tensor)]
    return float(inputs.shape[0] * inputs.shape[1] * sum(math.prod(w.shape) for w in weights))
