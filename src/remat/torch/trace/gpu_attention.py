"""Which kernel PyTorch runs on a CUDA GPU for ``scaled_dot_product_attention``, told without one.

PyTorch decides by what it is called with and by the GPU. The table ``_KERNELS`` is that of ``sdp_utils.cpp`` in
``aten/src/ATen/native/transformers/cuda``, PyTorch 2.9 to 2.15, for dense tensors. A rule that is wrong here makes a
plan count matrices of attention that the GPU never makes, or leave some out. ``make gpu`` asks PyTorch itself on the
GPU at hand: of 3,072 calls with PyTorch 2.11 on an H200 1,024 took cuDNN's where another was named, for the two reasons
that ``_IS_UP_TO_2_11`` stands for now.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import torch

from remat.torch._private import VERSION, OpOverload
from remat.torch.trace.op_facts import base_name

Kernel: TypeAlias = Literal["cudnn", "flash", "efficient", "math"]

_HALF: Final = (torch.float16, torch.bfloat16)

_IS_UP_TO_2_11: Final = VERSION <= (2, 11)
"""Seen on an H200: 2.11 gives cuDNN heads of 256 and any dropout there. The newest sources do not, and which version
between was the first is not known."""


@dataclass(frozen=True)
class AttentionCall:
    """What the choice depends on.

    Attributes:
        dtypes: of query, key and value.
        query: shape, as those of the next two: batch, heads, length, size of a head.
        key: likewise.
        value: likewise.
        mask: its shape, None for no mask.
        mask_is_differentiated: does the mask need a gradient?
        is_dense: is the last stride of each tensor, the mask included, 1?
        dropout: its probability.
        is_causal: the flag.
        has_groups: may several heads of the query share one of the key (``enable_gqa``)?
        is_differentiated: is there a backward pass?
        capability: of the GPU, such as (9, 0).
        allowed: kernels that are not switched off, see ``torch.nn.attention.sdpa_kernel``.
        is_deterministic: does ``torch.use_deterministic_algorithms`` refuse others?
    """

    dtypes: tuple[torch.dtype, ...]
    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    mask: tuple[int, ...] | None
    mask_is_differentiated: bool
    is_dense: bool
    dropout: float
    is_causal: bool
    has_groups: bool
    is_differentiated: bool
    capability: tuple[int, int]
    allowed: frozenset[Kernel] = frozenset({"cudnn", "flash", "efficient", "math"})
    is_deterministic: bool = False

    @property
    def head(self) -> int:
        """Size of a head of the query."""
        return self.query[-1]


def choose(call: AttentionCall) -> Kernel | None:
    """The kernel that PyTorch runs; None where those that are allowed cannot, which is an error there."""
    for kernel in _order(call.capability):
        if kernel in call.allowed and all(rule(call) for rule in _KERNELS[kernel]):
            return kernel
    return None


def _order(capability: tuple[int, int]) -> tuple[Kernel, ...]:
    """In what order PyTorch tries them: ``check_prefer_cudnn_attention``, where cuDNN is 9.15.1 or newer."""
    if capability in ((9, 0), (10, 0), (10, 3)):
        return ("cudnn", "flash", "efficient", "math")
    return ("flash", "efficient", "math", "cudnn")


Rule: TypeAlias = Callable[[AttentionCall], bool]


def _has_four_axes(call: AttentionCall) -> bool:
    return len(call.query) == len(call.key) == len(call.value) == 4


def _has_lengths(call: AttentionCall) -> bool:
    return call.query[-2] > 0 and call.key[-2] > 0


def _is_dense(call: AttentionCall) -> bool:
    return call.is_dense


def _is_half(call: AttentionCall) -> bool:
    known = _HALF if call.capability >= (8, 0) else (torch.float16,)
    return len(set(call.dtypes)) == 1 and call.dtypes[0] in known


def _is_half_or_float(call: AttentionCall) -> bool:
    known = (torch.float16, torch.float32, torch.bfloat16)[: 3 if call.capability >= (8, 0) else 2]
    return len(set(call.dtypes)) == 1 and call.dtypes[0] in known


def _since(major: int) -> Rule:
    return lambda call: (major, 0) <= call.capability <= (12, 1)


def _has_equal_heads(call: AttentionCall) -> bool:
    """The efficient kernel knows no groups up to PyTorch 2.15."""
    return call.query[:2] == call.key[:2] == call.value[:2]


def _has_groups(*, of_equal_number: bool) -> Rule:
    def fits(call: AttentionCall) -> bool:
        if not call.has_groups:
            return _has_equal_heads(call)
        heads, keys, values = call.query[1], call.key[1], call.value[1]
        if not call.query[0] == call.key[0] == call.value[0] or (of_equal_number and keys != values):
            return False
        return heads % keys == 0 and heads % values == 0

    return fits


def _has_no_mask(call: AttentionCall) -> bool:
    return call.mask is None


def _flash_knows_heads(call: AttentionCall) -> bool:
    if not call.query[-1] == call.key[-1] == call.value[-1] <= 256:
        return False
    small_memory = (8, 6) <= call.capability <= (8, 9) or call.capability >= (12, 0)
    if not small_memory or not call.is_differentiated:
        return True
    return call.head <= 192 or (call.dropout == 0 and call.head > 224)


def _is_square_if_causal(call: AttentionCall) -> bool:
    return not call.is_causal or call.query[-2] == call.key[-2]


def _efficient_knows_heads(call: AttentionCall) -> bool:
    """``minimum_gemm_alignment``: 16 bytes for tensor cores."""
    is_half = call.dtypes[0] in _HALF
    step = 4 if call.capability >= (8, 0) else 1
    if call.capability >= (8, 0) or (call.capability >= (7, 0) and is_half):
        step = max(step, 8 if is_half else 4)
    return call.query[-1] == call.key[-1] and call.query[-1] % step == call.value[-1] % step == 0


def _cudnn_knows_mask(call: AttentionCall) -> bool:
    if call.mask is None:
        return True
    lengths = (call.query[-2], call.key[-2])
    if call.mask_is_differentiated or any(m not in (n, 1) for m, n in zip(call.mask[-2:], lengths, strict=True)):
        return False
    outer = zip(call.mask[:2], call.query[:2], strict=True)
    return len(call.mask) == 2 or (len(call.mask) == 4 and all(m in (n, 1) for m, n in outer))


def _cudnn_knows_shapes(call: AttentionCall) -> bool:
    size, of_value = call.head, call.value[-1]
    if max(call.query[:2]) > 65535 or size % 8 or of_value % 8 or call.key[-2] == 1:
        return False
    largest = 256 if _IS_UP_TO_2_11 and call.capability == (9, 0) else 128
    # The newest cuDNN knows 256 on these GPUs, too. Flash attention, which runs otherwise, keeps as much.
    known = (size <= largest and of_value <= largest) or (
        call.capability in ((9, 0), (10, 0)) and (size, of_value) == (192, 128)
    )
    return known and (call.dropout == 0 or call.query[-2] != 1)


def _cudnn_knows_dropout(call: AttentionCall) -> bool:
    return _IS_UP_TO_2_11 or call.dropout * 16 == math.floor(call.dropout * 16)


def _cudnn_is_allowed(call: AttentionCall) -> bool:
    return not call.is_deterministic


_FUSED: Final[tuple[Rule, ...]] = (_has_four_axes, _has_lengths, _is_dense)

_KERNELS: Final[dict[Kernel, tuple[Rule, ...]]] = {
    "cudnn": (
        *(*_FUSED, _since(8), _is_half, _cudnn_is_allowed, _cudnn_knows_mask, _cudnn_knows_dropout),
        *(_has_groups(of_equal_number=False), _cudnn_knows_shapes),
    ),
    "flash": (
        *(*_FUSED, _since(8), _is_half, _has_no_mask, _flash_knows_heads, _is_square_if_causal),
        _has_groups(of_equal_number=True),
    ),
    "efficient": (*_FUSED, _since(5), _is_half_or_float, _efficient_knows_heads, _has_equal_heads),
    "math": (),
}
"""What each kernel needs. Products written out run everything."""


_ROWS: Final = 128
"""Flash attention rounds lengths up to this in its scratch (``mha_bwd`` in ``flash_api.cpp``)."""


def workspace_bytes(func: OpOverload, args: tuple[Any, ...], out: Any) -> int:
    """Scratch that a kernel takes on a GPU, as far as it is known: that of flash attention's backward pass.

    It holds gradients of the query in float32, and a number for each row. With groups it also holds the gradients of
    key and value for each head of the query. cuDNN does not say what it takes; its algorithm is the same, and it is
    counted alike.
    """
    del out
    if base_name(func) not in _FLASH_BACKWARD:
        return 0
    gradient, query, key = args[:3]
    batch, heads, length, size = query.shape
    rows = -(-length // _ROWS) * _ROWS
    wide = -(-size // 32) * 32 if size <= 128 else -(-size // 64) * 64
    scratch = 4 * batch * heads * rows * (wide + 1)
    if key.shape[1] != heads:
        scratch += 2 * batch * heads * key.shape[2] * size * gradient.element_size()
    return int(scratch)


_FLASH_BACKWARD: Final = frozenset(
    {"aten::_scaled_dot_product_flash_attention_backward", "aten::_scaled_dot_product_cudnn_attention_backward"}
)
