"""Scratch memory of CUDA kernels: what each kind of call of a step takes on the GPU at hand, and cuBLAS' workspaces.

No shape tells what cuDNN, a memory-efficient attention or a sort takes for itself, and it is not little: 302 MiB were
seen in the gradient of one convolution. So each kind of call that a traced step makes is run once on the GPU, alone and
on made-up numbers, and PyTorch's allocator says what it handed out. Where no GPU is, or the call cannot run alone, the
formula of ``gpu_attention`` stands.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, Final

import torch

from remat.torch import _private
from remat.torch._private import OpOverload
from remat.torch.trace import gpu_attention, lone_calls, op_facts

_PRODUCTS: Final = frozenset(
    f"aten::{name}"
    for name in ("mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "dot", "linear", "_addmm_activation", "_scaled_mm")
)
"""What cuBLAS computes."""

_ROOM: Final = 4
"""A call is run if so many times what it reads and makes is free. Scratch memory is seldom as large as what is read
and made together; with less, a call could fill the GPU."""

_KiB: Final = 1024

_known: dict[Any, int] = {}


def workspace_bytes(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Scratch memory of one call on a GPU, in bytes, as the allocator hands it out.

    Args:
        func: the operator.
        args: its arguments; tensors may be stand-ins.
        kwargs: those by name.
        out: what it returns, for the formulas.
    """
    tensors = [one for one in _private.tree_leaves((args, kwargs, out)) if isinstance(one, torch.Tensor)]
    device = next((one.device for one in tensors if one.device.type == "cuda"), None)
    if device is None or not torch.cuda.is_available():
        return gpu_attention.workspace_bytes(func, args, out)
    if not _may_take_scratch(func):
        return 0
    key = (func, lone_calls.kind(args), lone_calls.kind(kwargs))
    if key not in _known:
        moved_bytes = sum(one.numel() * one.element_size() for one in tensors)
        with torch.cuda.device(device):
            if moved_bytes * _ROOM > _free_bytes():  # Another time there may be room.
                return gpu_attention.workspace_bytes(func, args, out)
            found = _seen(func, args, kwargs)
        _known[key] = gpu_attention.workspace_bytes(func, args, out) if found is None else found
    return _known[key]


def known_bytes(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The same where it was seen before, else 0; nothing is run."""
    return _known.get((func, lone_calls.kind(args), lone_calls.kind(kwargs)), 0)


def _may_take_scratch(func: OpOverload) -> bool:
    if func.namespace != "aten" or op_facts.is_view(func) or torch.Tag.pointwise in func.tags:
        return False
    return lone_calls.may_run_alone(func) and not op_facts.is_empty(func)


def _free_bytes() -> int:
    """What PyTorch's allocator has or could get on the current GPU."""
    free_bytes, _ = torch.cuda.mem_get_info()
    return free_bytes + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def _seen(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """What a call was handed out and gave back on the current GPU while it ran; None where it cannot run alone."""
    device = torch.device("cuda", torch.cuda.current_device())
    if not _private.in_backward_pass():  # Else this is autograd's thread, which would wait for itself.
        try:
            _take_workspace_of_backward(device.index)
        except Exception:  # Too little memory, for one.
            return None
    return lone_calls.scratch_bytes(func, args, kwargs, device, warm=True)


class _ProductInBackward(torch.autograd.Function):
    """A product of matrices in the backward pass alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """The argument."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        """A product with itself."""
        return gradient @ gradient


@cache
def _take_workspace_of_backward(device: int) -> None:
    """Have cuBLAS take its workspace in autograd's thread, so that no measured step sees that happen.

    It runs in a thread of its own, since here the operators may be called below autograd.
    """

    def run() -> None:
        x = torch.ones(8, 8, device=f"cuda:{device}", requires_grad=True)
        _ProductInBackward.apply(x).sum().backward()  # type: ignore[no-untyped-call]

    with ThreadPoolExecutor(1) as thread:
        thread.submit(run).result()


def cublas_bytes(functions: Iterable[Any], capability: tuple[int, int] | None) -> int:
    """What cuBLAS keeps for the products of a step from the first of them on: 0 for a step without one.

    It has a workspace for each thread that computes: the user's, and the one in which autograd runs backward passes on
    a GPU. cuBLASLt, which adds a bias, has smaller ones beside them. As in ``CUDABlas.cpp`` and
    ``CublasHandlePool.cpp`` of PyTorch 2.11; 65 MiB were seen on an H200.

    Args:
        functions: the operators of the step.
        capability: of the GPU, such as (9, 0); None for a device without cuBLAS.
    """
    if capability is None:
        return 0
    if not any(isinstance(func, OpOverload) and op_facts.base_name(func) in _PRODUCTS for func in functions):
        return 0
    own = _of_configuration(os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if own is None:
        own = 4096 * 8 * _KiB if capability[0] in (9, 10) else (4096 * 2 + 16 * 8) * _KiB
    light = os.environ.get("CUBLASLT_WORKSPACE_SIZE", "")
    return 2 * (own + (int(light) if light.isdigit() else 1024) * _KiB)


def _of_configuration(text: str) -> int | None:
    """Bytes of a ``CUBLAS_WORKSPACE_CONFIG``, such as ":4096:8"; None where it says nothing."""
    pairs = re.findall(r":(\d+):(\d+)", text)
    return sum(int(size) * int(count) for size, count in pairs) * _KiB if pairs else None


def capability_of(device_type: str) -> tuple[int, int] | None:
    """The compute capability of the GPU at hand; None for a device of another kind."""
    if device_type != "cuda" or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability()
