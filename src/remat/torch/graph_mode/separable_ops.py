"""How PyTorch's operators can be cut along an axis, which of them are linear, and which of them state a shape.

The first axes of a tensor, taken together, count as one more axis, see ``remat.transform.merged_axes``.

An operator that is missing here ends a region that runs in slices. Each entry is tested against the operator itself, in
``tests/torch/test_torch_separable_ops.py``: what the slices make is compared with what the whole makes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, TypeAlias

import torch

from remat.torch._private import OpOverload, tree_leaves
from remat.torch.trace import op_facts
from remat.transform.merged_axes import Shape, merged, reshaped_ways
from remat.transform.separable import SUMMED, Part, Way

_Rule: TypeAlias = Callable[[tuple[Any, ...], dict[str, Any], list[torch.Tensor], list[Any]], list[Way]]

SUM, MEAN = 2, 1
"""The numbers by which losses say how they are reduced."""


def ways_of(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> tuple[Way, ...]:
    """The ways to cut a call; none where the operator is not known.

    Args:
        func: the operator.
        args: with tensors, real ones or those that tracing saw.
        kwargs: the same.
        out: what the call makes.

    Returns:
        Each with a place for every tensor among the arguments, in their order, and for every result.
    """
    rule = _RULES.get(op_facts.base_name(func).partition("::")[2])
    if rule is None:
        return ()
    operands = tensors_in((args, kwargs))
    results = list(out) if isinstance(out, list | tuple) else [out]
    # Merged axes come first: between the same two values they leave more units than axes of their own.
    ways = (*_merged_ways(rule, args, operands, results), *rule(args, kwargs, operands, results))
    return tuple({(way.inputs, way.outputs): way for way in ways}.values())


def _merged_ways(rule: _Rule, args: tuple[Any, ...], operands: list[torch.Tensor], results: list[Any]) -> list[Way]:
    """The ways to cut along merged axes, and along first axes that another shape has merged."""
    if rule is _reshaped:
        pairs = reshaped_ways(tuple(operands[0].shape), tuple(results[0].shape))
        return [Way((axis,), (place,)) for axis, place in pairs]
    if rule is _pointwise:
        made = tuple(results[0].shape)
        ways = (_pointwise_merged(operands, made, count) for count in range(2, len(made) + 1))
        return [way for way in ways if way is not None]
    if rule not in (_layer_norm, _layer_norm_backward):
        return []
    # All but the weights have as many axes, the last ones of length 1 where a row has one number.
    of_rows, leading = (4, 2) if rule is _layer_norm_backward else (1, 1)
    shape = tuple(operands[0].shape)
    counts = range(2, len(shape) - len(args[leading]) + 1)
    rest = (None,) * (len(operands) - of_rows)
    terms: tuple[Part, ...] = (SUMMED,) * 2
    return [
        Way((axis,) * of_rows + rest, (axis, *((axis, axis) if rule is _layer_norm else terms)))
        for axis in (merged(shape, count) for count in counts)
    ]


def _pointwise_merged(operands: list[torch.Tensor], made: Shape, count: int) -> Way | None:
    inputs: list[int | None] = []
    for one in operands:
        shape = tuple(one.shape)
        if len(shape) == len(made) and shape[:count] == made[:count]:
            inputs.append(merged(shape, count))
        elif len(shape) <= len(made) - count:
            inputs.append(None)
        else:
            return None  # It is repeated along some of these axes.
    return Way(tuple(inputs), (merged(made, count),)) if any(axis is not None for axis in inputs) else None


def tensors_in(arguments: Any) -> list[torch.Tensor]:
    """The tensors among some arguments, in their order, as often as they stand there."""
    return [one for one in tree_leaves(arguments) if isinstance(one, torch.Tensor)]


def sliced_arguments(func: OpOverload, args: tuple[Any, ...], shape: Sequence[int]) -> tuple[Any, ...]:
    """The arguments of a slice of a call: where the operator is told a shape, the shape of the slice's result."""
    place = _STATED_SHAPE.get(op_facts.base_name(func).partition("::")[2])
    if place is None:
        return args
    return (*args[:place], list(shape), *args[place + 1 :])


def is_linear(func: OpOverload, among: Sequence[bool], args: tuple[Any, ...] = ()) -> bool:
    """Does a factor of some operands become a factor of the result?

    Args:
        func: the operator.
        among: for each tensor among the arguments, does it have the factor?
        args: of the call.
    """
    name = op_facts.base_name(func).partition("::")[2]
    kind = _LINEAR.get(name)
    if func._overloadname.endswith("_mode"):
        return False  # A quotient that is rounded.
    if kind == "all":
        # ``add`` with a number adds what has no factor.
        return all(among) and (len(among) > 1 or name not in ("add", "sub"))
    if kind == "one":
        return sum(among) == 1
    if kind == "where":
        return list(among) == [False, True, True]
    if kind == "masked":
        return list(among) == [True, False] and len(args) > 2 and args[2] == 0
    return kind == "first" and list(among) == [True] + [False] * (len(among) - 1)


def _pointwise(args: Any, kwargs: Any, operands: list[torch.Tensor], results: list[Any]) -> list[Way]:
    """Each element of the result is made of the elements at the same place."""
    shape = results[0].shape
    ways = []
    for axis in range(len(shape)):
        inputs = []
        for one in operands:
            own = axis - (len(shape) - one.dim())
            inputs.append(own if own >= 0 and one.shape[own] == shape[axis] else None)
        if shape[axis] > 1 and any(own is not None for own in inputs):
            ways.append(Way(tuple(inputs), (axis,)))
    return ways


def _product(args: Any, kwargs: Any, operands: list[torch.Tensor], results: list[Any]) -> list[Way]:
    """Two matrices, or a batch of pairs."""
    batch = 1 if operands[0].dim() == 3 else 0
    rows, columns = batch, batch + 1
    ways = [Way((rows, None), (rows,)), Way((None, columns), (columns,)), Way((columns, rows), (SUMMED,))]
    return [Way((0, 0), (0,)), *ways] if batch else ways


def _product_and_bias(args: Any, kwargs: Any, operands: list[torch.Tensor], results: list[Any]) -> list[Way]:
    bias = operands[0]
    if bias.dim() > 1 or kwargs:
        return []
    return [Way((None, 0, None), (0,)), Way((0 if bias.numel() > 1 else None, None, 1), (1,))]


def _transposed(args: Any, kwargs: Any, operands: list[torch.Tensor], results: list[Any]) -> list[Way]:
    dims = operands[0].dim()
    first, second = (args[1] % dims, args[2] % dims) if len(args) > 2 else (0, dims - 1)
    moved = {first: second, second: first}
    return [Way((axis,), (moved.get(axis, axis),)) for axis in range(dims)]


def _permuted(args: Any, kwargs: Any, operands: list[torch.Tensor], results: list[Any]) -> list[Way]:
    dims = operands[0].dim()
    return [Way((axis % dims,), (place,)) for place, axis in enumerate(args[1])]


def _reshaped(args: Any, kwargs: Any, operands: list[torch.Tensor], results: list[Any]) -> list[Way]:
    """An axis stays where as much lies in front of it before and after."""
    before, after = operands[0].shape, results[0].shape
    ways = []
    ahead_before = 1
    for axis, size in enumerate(before):
        ahead_after = 1
        for place, other in enumerate(after):
            if ahead_after == ahead_before and size > 1 and other > 1:
                ways.append(Way((axis,), (place,)))
            ahead_after *= other
        ahead_before *= size
    return ways


def _unsqueezed(args: Any, kwargs: Any, operands: list[torch.Tensor], results: list[Any]) -> list[Way]:
    new = args[1] % results[0].dim()
    return [Way((axis,), (axis + (axis >= new),)) for axis in range(operands[0].dim())]


def _squeezed(args: Any, kwargs: Any, operands: list[torch.Tensor], results: list[Any]) -> list[Way]:
    if len(args) < 2 or not isinstance(args[1], int):
        return []
    gone = args[1] % operands[0].dim()
    if operands[0].shape[gone] != 1:
        return []
    return [Way((axis,), (axis - (axis > gone),)) for axis in range(operands[0].dim()) if axis != gone]


def _sliced(args: Any, kwargs: Any, operands: list[torch.Tensor], results: list[Any]) -> list[Way]:
    own = args[1] % operands[0].dim() if len(args) > 1 else 0
    whole = operands[0].shape == results[0].shape
    return [Way((axis,), (axis,)) for axis in range(operands[0].dim()) if axis != own] if not whole else []


def _slice_backward(args: Any, kwargs: Any, operands: list[torch.Tensor], results: list[Any]) -> list[Way]:
    own = args[2] % operands[0].dim()
    return [Way((axis,), (axis,)) for axis in range(operands[0].dim()) if axis != own]


def _along_one(place: int) -> _Rule:
    """All operands have one shape, and so has the result; the axis that is worked on is an argument."""

    def rule(args: Any, kwargs: Any, operands: list[torch.Tensor], results: list[Any]) -> list[Way]:
        own = args[place] % operands[0].dim()
        return [Way((axis,) * len(operands), (axis,)) for axis in range(operands[0].dim()) if axis != own]

    return rule


def _reduced(is_sum: bool) -> _Rule:
    """A reduction over some axes, or over all: what is not reduced stays, and a sum of slices is their sum."""

    def rule(args: Any, kwargs: Any, operands: list[torch.Tensor], results: list[Any]) -> list[Way]:
        dims = operands[0].dim()
        given = args[1] if len(args) > 1 else None
        given = [given] if isinstance(given, int) else list(given or range(dims))
        over = {axis % dims for axis in given} if dims else set()
        keeps = bool(args[2]) if len(args) > 2 else bool(kwargs.get("keepdim", False))
        ways = []
        for axis in range(dims):
            if axis not in over:
                ways.append(Way((axis,), (axis if keeps else axis - sum(1 for one in over if one < axis),)))
            elif is_sum:
                ways.append(Way((axis,), (SUMMED,)))
        return ways

    return rule


def _layer_norm(args: Any, kwargs: Any, operands: list[torch.Tensor], results: list[Any]) -> list[Way]:
    leading = operands[0].dim() - len(args[1])
    rest = (None,) * (len(operands) - 1)
    return [Way((axis, *rest), (axis,) * 3) for axis in range(leading)]


def _layer_norm_backward(args: Any, kwargs: Any, operands: list[torch.Tensor], results: list[Any]) -> list[Way]:
    leading = operands[0].dim() - len(args[2])
    rest = (None,) * (len(operands) - 4)
    return [Way((axis,) * 4 + rest, (axis, SUMMED, SUMMED)) for axis in range(leading)]


_LABELLED_AXES: Final = {2: ((0, 0),), 4: ((0, 0), (2, 1), (3, 2))}
"""By the dimensions of the logarithms of probabilities: their axes that are none of words, and those of the labels."""


def _nll(args: Any, kwargs: Any, operands: list[torch.Tensor], results: list[Any]) -> list[Way]:
    """Summed, a slice's loss is a term, and so is its weight; a mean divides by what only all rows know."""
    if operands[0].dim() not in _LABELLED_AXES or args[2] is not None or args[3] == MEAN:
        return []
    ways = []
    for axis, place in _LABELLED_AXES[operands[0].dim()]:
        made: tuple[Part, ...] = (SUMMED, SUMMED) if args[3] == SUM else (place, None)
        ways.append(Way((axis, place), made))
    return ways


def _nll_backward(args: Any, kwargs: Any, operands: list[torch.Tensor], results: list[Any]) -> list[Way]:
    """The gradient, the logarithms, the labels, and how many labels count, of all rows."""
    if operands[1].dim() not in _LABELLED_AXES or args[3] is not None:
        return []
    axes = _LABELLED_AXES[operands[1].dim()]
    return [Way((place if operands[0].dim() else None, axis, place, None), (axis,)) for axis, place in axes]


def _embedding(args: Any, kwargs: Any, operands: list[torch.Tensor], results: list[Any]) -> list[Way]:
    return [Way((None, axis), (axis,)) for axis in range(operands[1].dim())]


def _gathered(args: Any, kwargs: Any, operands: list[torch.Tensor], results: list[Any]) -> list[Way]:
    values, index = operands
    own = args[1] % max(1, values.dim())
    same = [axis for axis in range(values.dim()) if axis != own and values.shape[axis] == index.shape[axis]]
    return [Way((axis, axis), (axis,)) for axis in same]


_RULES: Final[dict[str, _Rule]] = {
    **dict.fromkeys(
        (
            *("add", "sub", "mul", "div", "neg", "abs", "exp", "log", "log1p", "sqrt", "rsqrt", "reciprocal", "pow"),
            *("tanh", "sigmoid", "relu", "gelu", "silu", "softplus", "clamp", "clamp_min", "maximum", "minimum"),
            *("gelu_backward", "silu_backward", "tanh_backward", "sigmoid_backward", "threshold_backward"),
            *("eq", "ne", "lt", "le", "gt", "ge", "logical_not", "logical_and", "bitwise_and", "bitwise_not"),
            *("where", "masked_fill", "_to_copy", "clone", "detach", "alias", "zeros_like", "ones_like"),
        ),
        _pointwise,
    ),
    **dict.fromkeys(("mm", "bmm"), _product),
    "addmm": _product_and_bias,
    **dict.fromkeys(("t", "transpose"), _transposed),
    "permute": _permuted,
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "_reshape_alias"), _reshaped),
    "unsqueeze": _unsqueezed,
    "squeeze": _squeezed,
    "slice": _sliced,
    "slice_backward": _slice_backward,
    "expand": _pointwise,
    **dict.fromkeys(("_softmax", "_log_softmax"), _along_one(1)),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), _along_one(2)),
    "sum": _reduced(True),
    **dict.fromkeys(("mean", "amax", "amin", "logsumexp"), _reduced(False)),
    "native_layer_norm": _layer_norm,
    "native_layer_norm_backward": _layer_norm_backward,
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), _nll),
    **dict.fromkeys(("nll_loss_backward", "nll_loss2d_backward"), _nll_backward),
    "embedding": _embedding,
    "gather": _gathered,
}
"""By the operator's name without its overload."""

_STATED_SHAPE: Final = {"view": 1, "_unsafe_view": 1, "reshape": 1, "expand": 1, "slice_backward": 1}
"""Operators that are told the shape of their result, and the place of that argument. ``slice_backward`` is told the
shape of what was sliced, which is its result."""

_Linear: TypeAlias = Literal["all", "one", "first", "where", "masked"]

_LINEAR: Final[dict[str, _Linear]] = {
    **dict.fromkeys(("t", "transpose", "permute", "view", "_unsafe_view", "reshape", "unsqueeze", "squeeze"), "all"),
    **dict.fromkeys(("expand", "slice", "slice_backward", "_to_copy", "clone", "detach", "alias", "neg"), "all"),
    **dict.fromkeys(("sum", "mean", "add", "sub"), "all"),
    **dict.fromkeys(("mul", "mm", "bmm"), "one"),
    **dict.fromkeys(("div", "_softmax_backward_data", "_log_softmax_backward_data", "nll_loss_backward"), "first"),
    **dict.fromkeys(("gelu_backward", "silu_backward", "tanh_backward", "sigmoid_backward"), "first"),
    **dict.fromkeys(("threshold_backward", "nll_loss2d_backward"), "first"),
    "where": "where",
    "masked_fill": "masked",
}
"""Operators of a backward pass that are linear: in all of their tensors together, in any one of them, in the first one,
in both of the values between which a mask chooses, or in what is masked with zeros."""
