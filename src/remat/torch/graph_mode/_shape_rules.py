"""Shapes of results for which PyTorch's own rule refuses what its kernel takes, while a step is captured.

Products over groups are such: the rule wants bfloat16, and kernels for CPUs take float32 as well. Without a rule for
it, a mixture of experts is captured as for a compiler: by an operator of its library, which nobody knows and all keep.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._subclasses import fake_impls

from remat.torch._private import OpOverload
from remat.torch.trace import result_shapes


@contextmanager
def taken_as_by_kernels() -> Iterator[None]:
    """Inside, operators on fake tensors have the rules that stand-ins have."""
    rule = (result_shapes.has_rule, _shape)
    checks: list[Any] = fake_impls.op_implementations_checks
    checks.insert(0, rule)
    try:
        yield
    finally:
        checks.remove(rule)


def _shape(mode: Any, func: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """What an operator returns on fake tensors; NotImplemented where PyTorch's own rule takes them."""
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    shapes = result_shapes.shapes_of(func, tuple(map(given.get, names)), lambda argument: None)
    if shapes is None or given.get("out_dtype") is not None:
        return NotImplemented
    made = [args[0].new_empty(shape) for shape in shapes]
    return made[0] if len(made) == 1 else tuple(made)
