"""Scratch memory of CPU kernels that no formula knows: a call of each kind is run once, alone, on made-up numbers.

``cpu_scratch`` has formulas for what steps mostly take scratch memory for, and the tables below name what is in nearly
every step and takes none. What is left is seldom in a step, but may take as much as it makes or more: a kernel that
unfolds pictures, one that looks for the k-th of each row, a sum in half precision over images. On a GPU all calls are
seen that way (``gpu_scratch``).
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import torch

from remat.torch import _private
from remat.torch._private import OpOverload
from remat.torch.trace import cpu_scratch, lone_calls, op_facts, stand_ins

_TAKE_NONE: Final = frozenset(
    f"aten::{name}"
    for name in (
        # Of the largest, and the like.
        *("amax", "amin", "max", "min", "argmax", "any", "all", "var", "var_mean", "std", "linalg_vector_norm"),
        # Copies.
        *("clone", "copy_", "_to_copy", "cat", "stack", "repeat", "constant_pad_nd", "flip", "tril", "triu"),
        *("slice_backward", "select_backward", "split_with_sizes_copy", "_unsafe_view", "_reshape_copy"),
        # Rows by their numbers.
        *("embedding", "index_select"),
        # What makes a tensor out of nothing.
        *("empty", "zeros", "ones", "full", "arange", "scalar_tensor", "new_empty", "new_zeros", "new_full"),
        *("empty_like", "zeros_like", "ones_like", "full_like", "new_ones", "empty_strided", "new_empty_strided"),
        *("rand", "randn", "randint", "randperm", "normal_", "uniform_", "bernoulli_", "bernoulli"),
    )
)
_TAKE_NONE_IN_ORDER: Final = frozenset(
    f"aten::{name}"
    for name in (
        *("mv", "addmv", "dot", "addmm_", "sum", "mean", "prod", "cumsum", "cumsum_", "native_batch_norm"),
        *("gather", "scatter", "scatter_", "scatter_add", "index_add", "index_add_"),
        *("max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d"),
        *("nll_loss_backward", "nll_loss2d_backward"),
    )
)
"""Operators without scratch memory, in PyTorch 2.9 to 2.14 (``tests/torch/test_torch_cpu_trials.py`` runs them): in any
order and precision, and in full precision where all that they read lies without gaps (of whole numbers and truths they
make sums of another type). One that is missing here costs a run of its kernel at the first plan; one that is here and
takes scratch breaks budgets."""

_LEAST_BYTES: Final = 1 << 16
_MOST_BYTES: Final = 1 << 28
"""What a call reads and makes together, for which it is run. A judgement: scratch memory of less is within the reserve
of a plan, and with more a plan would take memory and seconds that nobody expects of it."""

_known: dict[Any, int] = {}


def scratch_bytes(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Scratch memory of one call on a CPU, by formula or by a trial.

    Args:
        func: the operator.
        args: its arguments; tensors may be stand-ins.
        kwargs: those by name.
        out: what it returns.

    Returns:
        Bytes; 0 where nothing is known, and the call cannot be tried.
    """
    found = cpu_scratch.workspace_bytes(func, args, out)
    if found or not _may_be_tried(func):
        return found
    tensors = [one for one in _private.tree_leaves((args, kwargs, out)) if isinstance(one, torch.Tensor)]
    if _takes_none(func, tensors) or any(one.device.type != "cpu" or one.layout != torch.strided for one in tensors):
        return 0
    if not _LEAST_BYTES <= sum(one.numel() * one.element_size() for one in tensors) <= _MOST_BYTES:
        return 0
    key = (func, lone_calls.kind(args), lone_calls.kind(kwargs))
    if key not in _known:
        seen = lone_calls.scratch_bytes(func, args, kwargs, torch.device("cpu"))
        if seen is None:  # It cannot run alone, or a profiler counts, which another time may not.
            return 0
        _known[key] = seen
    return _known[key]


def known_bytes(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """The same, but nothing is run: 0 for what was not tried before."""
    found = cpu_scratch.workspace_bytes(func, args, out)
    if found or not _may_be_tried(func):
        return found
    return _known.get((func, lone_calls.kind(args), lone_calls.kind(kwargs)), 0)


@cache
def _may_be_tried(func: OpOverload) -> bool:
    if func.namespace != "aten" or op_facts.is_view(func):
        return False
    name = op_facts.base_name(func)
    if name in _TAKE_NONE or name in cpu_scratch.KNOWN or "_foreach_" in name or "_fused_" in name:
        return False
    return lone_calls.may_run_alone(func) and not op_facts.is_empty(func)


def _takes_none(func: OpOverload, tensors: list[torch.Tensor]) -> bool:
    """Is it known of a call that it takes nothing, though its operator may?

    One that goes number by number copies what it has to bring to another type: a mask that weighs gradients, a tensor
    in half precision beside one in full.
    """
    if torch.Tag.pointwise in func.tags:
        return len({one.dtype for one in tensors if one.dim()}) <= 1
    if op_facts.base_name(func) not in _TAKE_NONE_IN_ORDER or not tensors:
        return False
    halves = (torch.bfloat16, torch.float16)
    return tensors[0].is_floating_point() and all(t.dtype not in halves and stand_ins.is_dense(t) for t in tensors)
