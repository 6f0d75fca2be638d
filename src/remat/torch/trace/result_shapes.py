"""What operators make for which PyTorch has no kernel without memory, where shapes follow from values that are known.

A CTC loss is such an operator: its table of probabilities is as wide as the longest of its targets. So is the selection
by a mask: it has as many rows as the mask has truths. For products over groups PyTorch has a rule that refuses float32,
which its kernel for CPUs takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import torch

from remat.torch._private import OpOverload

LengthsOf: TypeAlias = Callable[[Any], list[int] | None]
"""The numbers in an argument: a list of them, or a tensor whose values are known; None where they are not known."""

_aten: Final = torch.ops.aten
_CTC_LOSSES: Final = frozenset((_aten._ctc_loss.default, _aten._ctc_loss.Tensor))
_CTC_GRADIENTS: Final = frozenset((_aten._ctc_loss_backward.default, _aten._ctc_loss_backward.Tensor))

_GROUPED_PRODUCT: Final = _aten._grouped_mm.default
_ROW_BYTES: Final = 16  # Rows of a grouped product begin at multiples of this; where theirs do not, they are padded.

_SELECTIONS: Final = frozenset(
    (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default)
)


def has_rule(func: OpOverload) -> bool:
    """Is there a rule for an operator whose result no value decides?"""
    return func is _GROUPED_PRODUCT


def with_positions(
    func: OpOverload, args: tuple[Any, ...], value_of: Callable[[torch.Tensor], torch.Tensor | None]
) -> tuple[Any, ...]:
    """The arguments of a selection, each mask whose values are known replaced by the positions of its truths.

    Args:
        func: an operator; of others than selections the arguments are returned as they are.
        args: its arguments.
        value_of: hands out a tensor with its values, or None where they are not known.
    """
    if func not in _SELECTIONS:
        return args
    indices: list[torch.Tensor | None] = []
    for index in args[1]:
        is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
        value = value_of(index) if is_mask else None
        indices.extend((index,) if value is None else value.nonzero(as_tuple=True))
    return args[0], indices, *args[2:]


def shapes_of(func: OpOverload, args: tuple[Any, ...], lengths_of: LengthsOf) -> tuple[tuple[int, ...], ...] | None:
    """The shapes of what an operator makes, contiguous and of its first tensor's dtype; None where that is not known.

    Args:
        func: the operator.
        args: its arguments.
        lengths_of: hands out the numbers in an argument.
    """
    if func in _CTC_GRADIENTS:
        return (tuple(args[1].shape),)
    if func is _GROUPED_PRODUCT:
        return _of_grouped_product(*args[:3])
    if func not in _CTC_LOSSES:
        return None
    log_probabilities, targets = args[0], lengths_of(args[3])
    if targets is None:
        return None
    steps, batch = (*log_probabilities.shape[:2],) if log_probabilities.dim() == 3 else (len(log_probabilities), 1)
    return (batch,), (batch, steps, 2 * max(targets, default=0) + 1)


def _of_grouped_product(
    left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor | None = None
) -> tuple[tuple[int, ...], ...] | None:
    """For dtypes that PyTorch's own rule refuses. Rows, or the summed axis, come in groups; ``ends`` says where."""
    columns = right.shape[-1]
    if left.dtype is torch.bfloat16 or columns * left.element_size() % _ROW_BYTES:
        return None
    if left.dim() == right.dim() == 2:
        return None if ends is None else ((len(ends), left.shape[0], columns),)
    groups = (len(left),) if left.dim() == right.dim() else ()
    return ((*groups, left.shape[-2], columns),)
