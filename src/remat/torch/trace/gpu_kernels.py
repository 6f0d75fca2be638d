"""The operators that a CUDA GPU would run, for a step that is traced without one.

On CPU and meta tensors PyTorch takes other ways than on a GPU: attention as products that are written out, dropout with
a mask of floats, an optimizer that updates one parameter after the other. Inside ``GpuKernels`` a step takes those of
the GPU, as far as they are known; what is not known ends up in its ``notes``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final
from unittest import mock

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from remat.core.errors import UnsupportedStep
from remat.running.cost_model import DeviceProfile
from remat.torch import _private
from remat.torch.trace.gpu_attention import AttentionCall, Kernel, choose
from remat.torch.trace.op_facts import base_name

_aten: Any = torch.ops.aten

_NAMES: Final[dict[Kernel, str]] = {
    "cudnn": "cuDNN's attention",
    "flash": "flash attention",
    "efficient": "memory-efficient attention",
    "math": "products written out",
}
_STEP_OF_HEADS: Final = 8  # Flash attention pads the size of a head to a multiple, in PyTorch 2.9 to 2.15.
_STEP_OF_MASKS: Final = 8  # Likewise memory-efficient attention the last axis of a mask (``preprocess_mask``).

_UNKNOWN: Final = (
    (("aten::convolution", "aten::convolution_backward"), "the workspaces of cuDNN's convolutions are not counted"),
    (
        ("aten::mkldnn_rnn_layer", "aten::mkldnn_rnn_layer_backward", "aten::_thnn_fused_lstm_cell"),
        "recurrent layers are counted as a CPU runs them; cuDNN's keep something else",
    ),
    (("aten::native_batch_norm",), "what cuDNN's batch normalisation keeps for itself is not counted"),
)


class GpuKernels(TorchFunctionMode):
    """A context in which a step runs the operators of a GPU on tensors of another device.

    Args:
        profile: of the GPU; it has a compute capability.
    """

    def __init__(self, profile: DeviceProfile) -> None:
        super().__init__()
        assert profile.compute_capability is not None
        self._profile = profile
        self._capability = profile.compute_capability
        self._attention: Counter[Kernel] = Counter()
        self._has_optimizer = False
        self._drops_in_products = False
        self._wants_autocast = False
        # The same under every name: who calls ``torch.nn.functional`` finds ours there, and what calls PyTorch's own
        # functions comes through the mode. That does not see what functions of ``torch.nn.functional`` call themselves.
        self._own: dict[Any, Callable[..., Any]] = {
            **dict.fromkeys((_attend, *_both(_aten.scaled_dot_product_attention)), self._attend),
            **dict.fromkeys((torch.dropout, *_both(_aten.dropout)), self._drop),
            _dropout: self._drop_of_functional,
        }
        if _normalise is not None:
            self._own |= dict.fromkeys((_normalise, torch.rms_norm, *_both(_aten.rms_norm)), self._normalise)
        self._patches = ExitStack()

    def __enter__(self) -> GpuKernels:
        super().__enter__()  # type: ignore[no-untyped-call]
        functions = {"scaled_dot_product_attention": self._attend, "dropout": self._drop_of_functional}
        if _normalise is not None:
            functions["rms_norm"] = self._normalise
        for name, ours in functions.items():
            self._patches.enter_context(mock.patch.object(F, name, ours))
        self._patches.enter_context(mock.patch.object(torch.autocast, "__init__", self._noting_autocast()))
        return self

    def __exit__(self, *exception: Any) -> None:
        self._patches.close()
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def _noting_autocast(self) -> Callable[..., None]:
        """Autocast for CUDA as PyTorch lets it begin without CUDA: switched off, with a note in place of a warning."""
        own = torch.autocast.__init__

        def begin(
            autocast: torch.autocast,
            device_type: str,
            dtype: torch.dtype | None = None,
            enabled: bool = True,
            cache_enabled: bool | None = None,
        ) -> None:
            if enabled and device_type == "cuda" and not torch.cuda.is_available():
                self._wants_autocast, enabled = True, False
            own(autocast, device_type, dtype, enabled, cache_enabled)

        return begin

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._own.get(func, func)(*args, **(kwargs or {}))

    def notes(self, operators: set[str]) -> tuple[str, ...]:
        """What was taken for granted, a sentence each.

        Args:
            operators: the base names of those that ran, "aten::mm".
        """
        version = torch.__version__.partition("+")[0]
        found = [f"the kernels are those that PyTorch {version} runs on the GPU {self._profile.name}"]
        if self._attention:
            by_kernel = ", ".join(f"{_NAMES[kernel]} {count} times" for kernel, count in self._attention.items())
            found[0] += f": {by_kernel}"
        if self._attention["cudnn"]:
            found.append(
                "PyTorch takes cuDNN's attention where cuDNN is 9.15.1 or newer, and flash attention elsewhere, which "
                "keeps as much; the workspace of cuDNN's backward pass is not known, and counted as flash attention's"
            )
        if self._attention["efficient"]:
            found.append("the workspace of memory-efficient attention's backward pass is not counted")
        if self._drops_in_products:
            found.append("dropout inside of attention that is written out is counted as on a CPU, with a larger mask")
        if self._has_optimizer:
            found.append("the optimizer updates all parameters at once (foreach), as it does on a GPU by default")
        if self._wants_autocast:
            found.append(
                'torch.autocast("cuda") switches itself off where there is no CUDA, so its region is counted in the '
                "dtypes that it was given; convert the model to those of the GPU to count them"
            )
        found += [sentence for names, sentence in _UNKNOWN if not operators.isdisjoint(names)]
        found.append("the caching allocator's rounding is not counted")
        return tuple(found)

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer choose as on a GPU, where it has the choice: all parameters in one call (``foreach``)."""
        for group in optimizer.param_groups:
            is_free = "foreach" in group and group["foreach"] is None and not group.get("fused")
            with_number = not isinstance(group.get("lr"), torch.Tensor) or group.get("capturable")
            if is_free and with_number and not group.get("differentiable"):
                group["foreach"] = True
                self._has_optimizer = True

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """``scaled_dot_product_attention``."""
        flags: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
        if (attn_mask is not None and is_causal) or query.is_nested or query.device.type not in ("cpu", "meta"):
            result: torch.Tensor = _attend(query, key, value, attn_mask, dropout_p, is_causal, **flags)
            return result
        query, key, value, attn_mask = _private.autocast_to_lower(query, key, value, attn_mask)
        call = self._call_of(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
        kernel = choose(call)
        if kernel is None:
            raise UnsupportedStep(
                f"no kernel that sdpa_kernel allows ({', '.join(sorted(call.allowed)) or 'none'}) can attend on the "
                f"GPU {self._profile.name} with a query of shape {call.query} and dtype {query.dtype}; allow another "
                "one, such as SDPBackend.MATH"
            )
        self._attention[kernel] += 1
        if kernel == "math":
            self._drops_in_products |= dropout_p > 0
            return _first(
                _aten._scaled_dot_product_attention_math(
                    query, key, value, attn_mask, dropout_p, is_causal, None, **flags
                )
            )
        if kernel == "flash":
            return _flash(query, key, value, dropout_p, is_causal, scale)
        mask = _added(attn_mask, query.dtype)
        if kernel == "cudnn":
            return _first(
                _aten._scaled_dot_product_cudnn_attention(
                    query, key, value, mask, call.is_differentiated, dropout_p, is_causal, False, scale=scale
                )
            )
        if mask is not None:
            mask = _aligned(mask).expand(*query.shape[:3], key.shape[2])
        keeps = call.is_differentiated or call.mask_is_differentiated
        return _first(
            _aten._scaled_dot_product_efficient_attention(
                query, key, value, mask, keeps, dropout_p, is_causal, scale=scale
            )
        )

    def _call_of(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        dropout: float,
        is_causal: bool,
        has_groups: bool,
    ) -> AttentionCall:
        tensors = [query, key, value, *([] if mask is None else [mask])]
        switches: dict[Kernel, bool] = {
            "cudnn": torch.backends.cuda.cudnn_sdp_enabled(),
            "flash": torch.backends.cuda.flash_sdp_enabled(),
            "efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),
            "math": torch.backends.cuda.math_sdp_enabled(),
        }
        return AttentionCall(
            dtypes=tuple(t.dtype for t in tensors[:3]),
            query=tuple(query.shape),
            key=tuple(key.shape),
            value=tuple(value.shape),
            mask=None if mask is None else tuple(mask.shape),
            mask_is_differentiated=mask is not None and mask.requires_grad,
            is_dense=all(t.stride(-1) == 1 for t in tensors if t.dim()),
            dropout=dropout,
            is_causal=is_causal,
            has_groups=has_groups,
            is_differentiated=torch.is_grad_enabled() and any(t.requires_grad for t in tensors[:3]),
            capability=self._capability,
            allowed=frozenset(kernel for kernel, is_on in switches.items() if is_on),
            is_deterministic=torch.are_deterministic_algorithms_enabled()
            and not torch.is_deterministic_algorithms_warn_only_enabled(),
        )

    def _drop_of_functional(
        self, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        """``torch.nn.functional.dropout``."""
        return _dropout(input, p, training, inplace) if inplace else self._drop(input, p, training)

    def _drop(self, input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        """``torch.dropout``: one kernel that keeps a mask of one byte for each number (``native_dropout``)."""
        if not train or not 0 < p < 1 or input.numel() == 0:
            plain: torch.Tensor = torch.dropout(input, p, train)
            return plain
        return _first(torch.native_dropout(input, p, True))

    def _normalise(
        self,
        input: torch.Tensor,
        normalized_shape: list[int],
        weight: torch.Tensor | None = None,
        eps: float | None = None,
    ) -> torch.Tensor:
        """``torch.nn.functional.rms_norm``: one kernel that keeps a number for each row."""
        mixed = weight is not None and weight.dtype != input.dtype
        if mixed or not input.is_floating_point() or _normalise is None:
            assert _normalise is not None
            plain: torch.Tensor = _normalise(input, normalized_shape, weight, eps)
            return plain
        apply: Any = FusedRmsNorm.apply
        result: torch.Tensor = apply(input, weight, list(normalized_shape), eps)
        return result


class FusedRmsNorm(torch.autograd.Function):
    """The kernel of ``rms_norm`` on a GPU, which CPU and meta tensors have no way to."""

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor | None, normalized_shape: list[int], eps: float | None
    ) -> torch.Tensor:
        """One operator, which also makes the reciprocals that the backward pass reads."""
        with _private.BelowAutograd():
            result, reciprocals = _aten._fused_rms_norm(input, normalized_shape, weight, eps)
        # PyTorch 2.9 runs no hook on a parameter that a function saves while hooks for saved tensors are on.
        ctx.save_for_backward(input, weight if weight is None else weight.detach(), reciprocals)
        ctx.normalized_shape = normalized_shape
        output: torch.Tensor = result
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """One operator, too."""
        input, weight, reciprocals = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], weight is not None and ctx.needs_input_grad[1]]
        with _private.BelowAutograd():
            found = _aten._fused_rms_norm_backward(gradient, input, ctx.normalized_shape, reciprocals, weight, wanted)
        return (*found, None, None)


def operators_of(functions: Any) -> set[str]:
    """The base names of operators, of those that are any."""
    return {base_name(func) for func in functions if func is not None}


_attend: Any = F.scaled_dot_product_attention
_dropout: Any = F.dropout
# PyTorch 2.9 has both, so that only builds without the operator lack them.
_normalise: Any = F.rms_norm if hasattr(_aten, "_fused_rms_norm") else None


def _both(operator: Any) -> tuple[Any, Any]:
    """The two ways to name an operator under ``torch.ops``."""
    return operator, operator.default


def _first(results: Any) -> torch.Tensor:
    found: torch.Tensor = results[0]
    return found


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float, is_causal: bool, scale: float | None
) -> torch.Tensor:
    size = query.shape[-1]
    scale = size**-0.5 if scale is None else scale
    if more := -size % _STEP_OF_HEADS:
        query, key, value = (F.pad(t, (0, more)) for t in (query, key, value))
    output = _first(_aten._scaled_dot_product_flash_attention(query, key, value, dropout, is_causal, scale=scale))
    return output[..., :size] if more else output


def _added(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """A mask of truth values as numbers to add: 0, or minus infinity where there is nothing to attend to."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    nothing = torch.scalar_tensor(float("-inf"), dtype=dtype, device=mask.device)
    return torch.where(mask, torch.scalar_tensor(0.0, dtype=dtype, device=mask.device), nothing)


def _aligned(mask: torch.Tensor) -> torch.Tensor:
    """A mask whose rows begin at addresses that the kernel reads: padded, and cut again, where they do not."""
    if all(stride % _STEP_OF_MASKS == 0 for stride in mask.stride()[:-1]) and mask.stride(-1) == 1:
        return mask
    size = mask.shape[-1]
    return F.pad(mask, (0, _STEP_OF_MASKS - size % _STEP_OF_MASKS))[..., :size]
