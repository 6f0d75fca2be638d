"""A call of an operator by itself, on numbers made up for it: to time it, or to see what memory it takes."""

from __future__ import annotations

from typing import Any

import torch

from remat.torch._private import OpOverload


def kind(value: Any) -> Any:
    """What decides how long a call takes with this argument, and in how much memory: all but a tensor's numbers."""
    if isinstance(value, list | tuple):
        return tuple(map(kind, value))
    if isinstance(value, dict):
        return tuple((name, kind(one)) for name, one in value.items())
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), tuple(value.stride()), value.dtype, value.device)
    return repr(value)


def made_up(like: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape: ones, which no arithmetic turns into what is slow or undefined; as indices, zeros."""
    made = torch.empty_strided(tuple(like.shape), tuple(like.stride()), dtype=like.dtype, device=like.device)
    return made.fill_(1 if like.dtype.is_floating_point or like.dtype.is_complex else 0)


def may_run_alone(func: OpOverload) -> bool:
    """Is an operator one that computes, whatever its numbers are?

    One that asserts something about them (``aten::_assert_async``) is not: on a GPU a failed assertion ends every
    further call of the process.
    """
    return "assert" not in func._schema.name
