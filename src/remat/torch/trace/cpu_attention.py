"""Scratch memory of PyTorch's attention kernels on a CPU: asked, since blocks differ with CPU, precision and threads.

Each thread works on blocks of queries and keys of a limited size, so that a small problem with blocks of the full size
takes what a large one does. What the backward kernel copies first does grow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, partial
from typing import Any, Final

import torch

from remat.torch import _private
from remat.torch.trace.onednn_scratch import scratch_of

FORWARD: Final = frozenset({"aten::_scaled_dot_product_flash_attention_for_cpu"})
BACKWARD: Final = frozenset({"aten::_scaled_dot_product_flash_attention_for_cpu_backward"})

_FORWARD: Final = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD: Final = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

_LARGEST_QUERIES: Final = 768
_LARGEST_KEYS: Final = 512
"""From so many queries, and so many keys, blocks grow no more: ``FlashAttentionKernel.cpp``. Smaller figures here
would ask about smaller blocks than those that run; larger ones only take longer to ask."""
_MOST_WORK: Final = 2e8
"""Products of two numbers in one run that is asked, some .1 s: in half precision the kernel packs what it reads where
there is enough of it, which one head does not show. A judgement."""


def workspace_bytes(name: str, tensors: Sequence[torch.Tensor]) -> int:
    """Bytes that a call of one of the kernels takes while it runs.

    Args:
        name: of the operator.
        tensors: what it reads, the first of them in the order of its arguments.
    """
    backward = name in BACKWARD
    query, key, value = tensors[1:4] if backward else tensors[:3]
    copied = 0
    if backward and not tensors[0].transpose(1, 2).is_contiguous():
        copied = math.prod(tensors[0].shape) * tensors[0].element_size()
    if not math.prod(query.shape) or not math.prod(key.shape):
        return copied
    queries, keys = min(int(query.shape[2]), _LARGEST_QUERIES), min(int(key.shape[2]), _LARGEST_KEYS)
    batch = heads = 1
    if query.dtype in (torch.bfloat16, torch.float16):
        affordable = max(1, int(_MOST_WORK / (queries * keys * int(query.shape[3]))))
        heads = min(int(query.shape[1]), affordable)
        batch = min(int(query.shape[0]), max(1, affordable // heads))
    sizes = batch, heads, queries, keys, int(query.shape[3]), int(value.shape[3])
    return copied + _asked(sizes, query.dtype, backward, torch.get_num_threads())


@cache
def _asked(sizes: tuple[int, ...], dtype: torch.dtype, backward: bool, threads: int) -> int:
    batch, heads, queries, keys, width, value_width = sizes

    def zeros(length: int, features: int) -> torch.Tensor:
        return torch.zeros(batch, length, heads, features, dtype=dtype).transpose(1, 2)

    with _private.no_modes(), torch.no_grad():
        given: Any = zeros(queries, width), zeros(keys, width), zeros(keys, value_width)
        forward = partial(_FORWARD, *given, 0.0, False)
        if not backward:
            return scratch_of(forward)
        out, logsumexp = forward()
        return scratch_of(partial(_BACKWARD, torch.zeros_like(out), *given, out, logsumexp, 0.0, False))
