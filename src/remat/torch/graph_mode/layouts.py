"""Writes in place into a part of a tensor: the result keeps the layout that eager PyTorch leaves it in.

While it traces, AOTAutograd turns ``gate.add_(x)`` into a sum in a tensor of its own, whose elements lie side by side.
Where ``gate`` is a part of a wider tensor, eager PyTorch's sum has gaps between its rows. Kernels run rows with gaps
otherwise: the last numbers of each row are computed one by one, not a register full at a time. A sigmoid of the sum
then differs in its last bits. PyTorch's own cells of a GRU or an LSTM write so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import fx

from remat.torch._private import OpOverload, is_mutable
from remat.torch.trace import op_facts

_LIBRARY: Final = torch.library.Library("remat", "FRAGMENT")
_LIBRARY.define("laid_out(Tensor values, SymInt[] stride) -> Tensor")


def _laid_out(values: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    made = torch.empty_strided(tuple(values.shape), tuple(stride), dtype=values.dtype, device=values.device)
    return made.copy_(values)


_LIBRARY.impl("laid_out", _laid_out, "CompositeExplicitAutograd")

laid_out: Final[Any] = torch.ops.remat.laid_out.default
"""The same numbers in a tensor of other strides."""


def differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Do the elements of two tensors of the same shape lie otherwise?"""
    axes = zip(one.shape, one.stride(), other.stride(), strict=True)
    return one.numel() > 1 and any(size > 1 and first != second for size, first, second in axes)


class InLayout:
    """An operator that writes its result into a new tensor of given strides, as its in-place form would.

    Args:
        func: the operator, without its underscore.
        like: a tensor of the shape, strides, dtype and device of the result.

    Attributes:
        func: the operator.
    """

    def __init__(self, func: OpOverload, like: torch.Tensor) -> None:
        in_place = in_place_form(func)
        assert in_place is not None, f"{func} has an in-place form"
        self.func = func
        self._in_place = in_place
        self.__name__ = f"{op_facts.base_name(func).partition('::')[2]}_in_layout"
        self.__module__ = __name__
        self.__qualname__ = self.__name__
        self._geometry = (tuple(like.shape), tuple(like.stride()))
        self._dtype, self._device = like.dtype, like.device

    def __call__(self, first: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The result."""
        made: torch.Tensor = torch.empty_strided(*self._geometry, dtype=self._dtype, device=self._device)
        made.copy_(first)
        self._in_place._op(made, *args, **kwargs)
        return made


def in_place_form(func: Any) -> OpOverload | None:
    """The operator that does the same to its first argument: ``add_.Tensor`` for ``add.Tensor``."""
    if not isinstance(func, OpOverload) or is_mutable(func):
        return None
    namespace, _, name = op_facts.base_name(func).partition("::")
    packet = getattr(getattr(torch.ops, namespace), f"{name}_", None)
    found = getattr(packet, func._overloadname, None)
    return found if isinstance(found, OpOverload) else None


def with_layouts(joint: fx.GraphModule) -> None:
    """Have operators write their results in the layout that is wanted, where they did so for ``laid_out`` alone.

    What lies so already is read as it is: random numbers are drawn into a tensor of eager PyTorch's strides.
    """
    for node in joint.graph.find_nodes(op="call_function", target=laid_out):
        made = node.args[0]
        like = node.meta["val"]
        if not differ(made.meta["val"], like):
            node.replace_all_uses_with(made)
            joint.graph.erase_node(node)
            continue
        if len(made.users) != 1 or in_place_form(made.target) is None or made.meta["val"].dtype != like.dtype:
            continue
        with joint.graph.inserting_before(node):
            in_layout = joint.graph.call_function(InLayout(made.target, like), made.args, dict(made.kwargs))
        in_layout.meta = {**made.meta, "val": like}
        node.replace_all_uses_with(in_layout)
        joint.graph.erase_node(node)
        joint.graph.erase_node(made)
