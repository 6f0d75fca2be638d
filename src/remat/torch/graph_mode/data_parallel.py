"""``DistributedDataParallel`` around a captured step: what its module does is captured, its reducer stays outside.

The wrapper's own ``forward`` cannot be captured: it talks to the reducer. So what it does before and after its module
happens before and after the whole step. Gradients are reduced by the reducer's hooks on the parameters, as ever, in the
order of the schedule (``taken_gradients``).

A module under ``fully_shard`` is captured with its parameters whole, and its schedule says when they are gathered and
their gradients reduced (``collectives``). One whose parameters are cut over processes by tensor parallelism cannot be
captured. Its steps run eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from remat.core.errors import UnsupportedStep
from remat.torch._private import after_forward, before_forward, local
from remat.torch.graph_mode import _aot
from remat.torch.graph_mode.captured_ranks import CapturedRanks
from remat.torch.graph_mode.collectives import ShardedParameter
from remat.torch.graph_mode.taken_gradients import TakenGradient
from remat.torch.used_modules import used_modules

if TYPE_CHECKING:
    from remat.torch.graph_mode._sharded import ShardedModules


class Reducers:
    """The wrappers that a function uses, see ``used_modules``.

    Args:
        fn: the function.

    Attributes:
        ranks: the processes, where they send in the order of a schedule; None before the first call, and elsewhere.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn
        self._found: list[DistributedDataParallel] | None = None
        self._sharded: ShardedModules | None = None
        self.ranks: CapturedRanks | None = None

    @property
    def bucket_bytes(self) -> int:
        """Bytes of the buckets in which gradients are reduced, and of those that earlier steps left whole."""
        parameters = [p for one in self._found or () for p in one.module.parameters() if p.requires_grad]
        whole_bytes: int = 0 if self._sharded is None else self._sharded.whole_gradients_bytes
        return whole_bytes + int(sum(p.numel() * p.element_size() for p in parameters))

    @property
    def reduction(self) -> Hashable:
        """What the next step does with its gradients; steps in which it differs are captured and planned apart."""
        return None if self._sharded is None else self._sharded.reduction

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look for wrappers and for modules under ``fully_shard``, at the first call.

        Raises:
            UnsupportedStep: for a module under tensor parallelism, and for one under ``fully_shard`` whose steps, as
                things stand, are not captured.
        """
        if self._found is None:
            used = used_modules(self._fn, args, kwargs)
            modules = list(dict.fromkeys(module for one in used for module in one.modules()))
            if any(isinstance(one, FSDPModule) for one in modules):
                from remat.torch.graph_mode import _sharded  # Private symbols, which others do without.

                self._sharded, self.ranks = _sharded.ShardedModules(modules), CapturedRanks()
            own = set() if self._sharded is None else self._sharded.parameters
            for module in modules:
                if any(local(one) is not one and one not in own for one in module.parameters(recurse=False)):
                    raise UnsupportedStep(
                        f"{type(module).__name__} has parameters that are cut over processes (DTensor), and its "
                        "operators run as others on their parts"
                    )
            self._found = [one for one in modules if isinstance(one, DistributedDataParallel)]
        if self._sharded is not None:
            if why := self._sharded.why_not():
                raise UnsupportedStep(f"a module under fully_shard {why}")
            self._sharded.prepare()

    def takers_for(self, inputs: Sequence[Any]) -> dict[int, Any]:
        """Which inputs of a captured graph are parameters whose gradients somebody waits for, by their places.

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
        found: dict[int, Any] = {place: TakenGradient() for place, given in enumerate(inputs) if id(given) in waiting}
        for group in () if self._sharded is None else self._sharded.groups:
            places = {id(one): place for place, one in enumerate(group.parameters)}
            found |= {
                place: ShardedParameter(group, places[id(given)])
                for place, given in enumerate(inputs)
                if id(given) in places
            }
        return found

    def run(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a captured step with what the wrappers do before and after it."""
        if self._sharded is not None and self.ranks is not None and not _aot.runs_eagerly():
            with self._sharded.shown_whole(), self.ranks.capturing():
                result = step(*args, **kwargs)
            return self._sharded.as_outside(result)
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
