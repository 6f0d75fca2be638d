"""``DistributedDataParallel`` around a captured step: what its module does is captured, its reducer stays outside.

The wrapper's own ``forward`` cannot be captured: it talks to the reducer. So what it does before and after its module
happens before and after the whole step. Gradients are reduced by the reducer's hooks on the parameters, as ever, in the
order of the schedule (``taken_gradients``).

A module under ``fully_shard`` cannot be captured, since it changes its parameters while it runs, and neither can one
whose parameters are cut over processes by tensor parallelism. Their steps run eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from remat.core.errors import UnsupportedStep
from remat.torch._private import after_forward, before_forward, local
from remat.torch.graph_mode.taken_gradients import TakenGradient


class Reducers:
    """The wrappers that a function uses: in its closure, by a global name, as its object, or among its arguments.

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
            UnsupportedStep: for a module under ``fully_shard`` or tensor parallelism, which is not captured.
        """
        if self._found is None:
            modules = _modules_in(self._fn, args, kwargs)
            if sharded := [one for one in modules if isinstance(one, FSDPModule)]:
                raise UnsupportedStep(
                    f"{type(sharded[0]).__name__} is under fully_shard, which replaces parameters while a step runs"
                )
            for module in modules:
                if any(local(one) is not one for one in module.parameters(recurse=False)):
                    raise UnsupportedStep(
                        f"{type(module).__name__} has parameters that are cut over processes (DTensor), and its "
                        "operators run as others on their parts"
                    )
            self._found = [one for one in modules if isinstance(one, DistributedDataParallel)]

    def takers_for(self, inputs: Sequence[Any]) -> dict[int, TakenGradient]:
        """Which inputs of a captured graph are parameters whose gradients a reducer waits for, by their places.

        A wrapper that looks for unused parameters follows the graph of autograd to all parameters, and gets all
        gradients at the end.
        """
        waiting = {
            id(parameter)
            for one in self._found or ()
            if not (one.find_unused_parameters or one.static_graph)
            for parameter in one.module.parameters()
            if parameter.requires_grad
        }
        return {place: TakenGradient() for place, given in enumerate(inputs) if id(given) in waiting}

    def run(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a captured step with what the wrappers do before and after it."""
        if not self._found:
            return step(*args, **kwargs)
        for wrapper in self._found:
            before_forward(wrapper)
        own = DistributedDataParallel.forward
        DistributedDataParallel.forward = _forward_of_module  # type: ignore[method-assign]
        try:
            result = step(*args, **kwargs)
        finally:
            DistributedDataParallel.forward = own  # type: ignore[method-assign]
        for wrapper in self._found:
            result = after_forward(wrapper, result)
        return result


def _forward_of_module(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
    return self.module(*args, **kwargs)


def _modules_in(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[nn.Module]:
    closure = [cell.cell_contents for cell in getattr(fn, "__closure__", None) or ()]
    names, scope = getattr(getattr(fn, "__code__", None), "co_names", ()), getattr(fn, "__globals__", {})
    known = [fn, getattr(fn, "__self__", None), *closure, *(scope.get(name) for name in names), *args, *kwargs.values()]
    return list(dict.fromkeys(module for one in known if isinstance(one, nn.Module) for module in one.modules()))
