"""A call of an operator by itself, on numbers made up for it: to time it, or to see what memory it takes."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import accumulate
from typing import Any, Final

import torch

from remat.torch import _private
from remat.torch._private import OpOverload
from remat.torch.trace import op_facts

_DROPOUT: Final = "dropout_p"
"""The argument of fused attention."""

_SEEDS: Final = frozenset({"philox_seed", "philox_offset", "rng_state"})
"""What the gradients of fused attention are given of its dropout."""


def kind(value: Any) -> Any:
    """What decides how long a call takes with this argument, and in how much memory: all but a tensor's numbers."""
    if isinstance(value, list | tuple):
        return tuple(map(kind, value))
    if isinstance(value, dict):
        return tuple((name, kind(one)) for name, one in value.items())
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), tuple(value.stride()), value.dtype, value.device)
    return repr(value)


def may_run_alone(func: OpOverload) -> bool:
    """Is an operator one that computes, whatever its numbers are?

    One that asserts something about them (``aten::_assert_async``) is not: on a GPU a failed assertion ends every
    further call of the process.
    """
    return "assert" not in func._schema.name


def made_up(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of the same kind: tensors of ones, which no arithmetic turns into what is slow or undefined.

    Indices are zeros. Fused attention notes the seeds of its dropout on the CPU or on the GPU, by the kernel and by
    whether a CUDA graph is captured, and a trace does not say which. A kernel that reads them where they are not ends
    the process, so that what is given such seeds runs without its dropout: then nothing reads them.

    Args:
        func: what is called; an operator, or a function in the place of one.
        args: of one call; tensors may be stand-ins.
        kwargs: those by name.
    """
    tensors = [one for one in _private.tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
    devices = [one.device for one in tensors if one.device.type != "meta"]
    names = [argument.name for argument in func._schema.arguments] if isinstance(func, OpOverload) else []
    if _SEEDS.intersection(names):
        args = tuple(0.0 if name == _DROPOUT else value for name, value in zip(names, args, strict=False))
        kwargs = {name: 0.0 if name == _DROPOUT else value for name, value in kwargs.items()}

    def one(like: torch.Tensor) -> torch.Tensor:
        device = devices[0] if devices and like.device.type == "meta" else like.device
        made = torch.empty_strided(tuple(like.shape), tuple(like.stride()), dtype=like.dtype, device=device)
        return made.fill_(1 if like.dtype.is_floating_point or like.dtype.is_complex else 0)

    own: tuple[tuple[Any, ...], dict[str, Any]] = _private.tree_map_only(torch.Tensor, one, (args, kwargs))
    return own


def scratch_bytes(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device, *, warm: bool = False
) -> int | None:
    """What a call is handed out and gives back while it runs alone; None where it cannot, or nobody counts.

    Args:
        func: the operator.
        args: its arguments; tensors may be stand-ins.
        kwargs: those by name.
        device: on which it runs, and whose bytes are counted.
        warm: run it once before: the first call of its kind may look for an algorithm, and keep what libraries set up.
    """
    draws: AbstractContextManager[Any] = nullcontext()
    if op_facts.may_draw(func):
        draws = torch.random.fork_rng([device.index] if device.type == "cuda" else [])
    with _private.no_modes(), torch.no_grad(), _private.BelowAutograd(), draws:
        try:
            own, named = made_up(func, args, kwargs)
            run = partial(func, *own, **named)
            if warm:
                run()
            _, changes = _private.with_allocations(run, device.type)
        except Exception:  # Whatever it is that made-up numbers do not do; too little memory is one of the reasons.
            return None
    return None if changes is None else scratch_in(changes)


def scratch_in(changes: Iterable[int]) -> int:
    """What of the bytes that a call took it had given back at its end, at their most."""
    sums = list(accumulate(changes))
    return max(sums) - max(0, sums[-1]) if sums else 0
