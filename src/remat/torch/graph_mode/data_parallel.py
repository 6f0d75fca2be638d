"""``DistributedDataParallel`` around a captured step: what its module does is captured, its reducer stays outside.

The wrapper's own ``forward`` cannot be captured: it talks to the reducer. So what it does before and after its module
happens before and after the whole step. Gradients are reduced by the reducer's hooks on the parameters, as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Reducers:
    """The wrappers that a function uses: in its closure, as its object, or among its arguments.

    Args:
        fn: the function.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn
        self._found: list[DistributedDataParallel] | None = None

    @property
    def bucket_bytes(self) -> int:
        """Bytes of the buckets in which gradients are reduced."""
        parameters = [p for one in self._found or () for p in one.module.parameters() if p.requires_grad]
        return sum(p.numel() * p.element_size() for p in parameters)

    def run(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a captured step with what the wrappers do before and after it."""
        if self._found is None:
            self._found = _wrappers_in(self._fn, args, kwargs)
        if not self._found:
            return step(*args, **kwargs)
        for wrapper in self._found:
            wrapper._pre_forward()
        own = DistributedDataParallel.forward
        DistributedDataParallel.forward = _forward_of_module  # type: ignore[method-assign]
        try:
            result = step(*args, **kwargs)
        finally:
            DistributedDataParallel.forward = own  # type: ignore[method-assign]
        for wrapper in self._found:
            result = wrapper._post_forward(result)
        return result


def _forward_of_module(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
    return self.module(*args, **kwargs)


def _wrappers_in(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[DistributedDataParallel]:
    closure = [cell.cell_contents for cell in getattr(fn, "__closure__", None) or ()]
    known = [fn, getattr(fn, "__self__", None), *closure, *args, *kwargs.values()]
    modules = [module for one in known if isinstance(one, nn.Module) for module in one.modules()]
    return list(dict.fromkeys(one for one in modules if isinstance(one, DistributedDataParallel)))
