"""``DistributedDataParallel`` around a captured step: what its module does is captured, its reducer stays outside.

The wrapper's own ``forward`` cannot be captured: it talks to the reducer. So what it does before and after its module
happens before and after the whole step. Gradients are reduced by the reducer's hooks on the parameters, as ever.

A module under ``fully_shard`` is refused: it cannot be captured, and its shards do not say what a step takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from remat.core.errors import UnsupportedStep


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

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look for wrappers, at the first call.

        Raises:
            UnsupportedStep: for a module under ``fully_shard``.
        """
        if self._found is None:
            modules = _modules_in(self._fn, args, kwargs)
            if sharded := [one for one in modules if isinstance(one, FSDPModule)]:
                raise UnsupportedStep(
                    f"{type(sharded[0]).__name__} is under fully_shard, which graph mode cannot capture; plan the "
                    "module with remat.torch.plan before it is sharded, and run the sharded one under "
                    "remat.torch.apply(plan)"
                )
            self._found = [one for one in modules if isinstance(one, DistributedDataParallel)]

    def run(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a captured step with what the wrappers do before and after it."""
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


def _modules_in(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[nn.Module]:
    closure = [cell.cell_contents for cell in getattr(fn, "__closure__", None) or ()]
    known = [fn, getattr(fn, "__self__", None), *closure, *args, *kwargs.values()]
    return list(dict.fromkeys(module for one in known if isinstance(one, nn.Module) for module in one.modules()))
