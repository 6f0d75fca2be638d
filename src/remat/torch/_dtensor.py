"""Every symbol of distributed tensors (DTensor) that is not documented as public, and what remat needs of their inside.

A distributed tensor has no memory of its own: each process has a part of it, and an operator on it runs operators on
the parts, with collectives in between. Autograd saves the distributed tensor, a plan is about the parts. The symbols
are where PyTorch 2.9 to 2.15 have them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any
from unittest import mock

import torch
import torch.distributed._functional_collectives as functional
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import _disable_current_modes

_own_shapes: Any = ShardingPropagator._propagate_tensor_meta_non_cached


def runs_on_parts(types: Iterable[type]) -> bool:
    """Is one of these types that of a tensor which runs operators on others?

    Such are distributed tensors, and what a collective of theirs is still to fill. A mode that returns
    ``NotImplemented`` for them is asked again for each operator on these others.
    """
    return any(map(_runs_on_parts, types))


@cache
def _runs_on_parts(kind: type) -> bool:
    return issubclass(kind, DTensor | functional.AsyncCollectiveTensor)


@contextmanager
def unseen(*, sends: bool) -> Iterator[None]:
    """Inside, modes see of distributed tensors what runs on their parts, and nothing that only finds out shapes.

    Args:
        sends: are collectives carried out? Where they are not, their results are plain tensors, as under
            ``torch.compile``: nothing waits for them.
    """
    at_once = nullcontext() if sends else mock.patch.object(functional, "_are_we_tracing", return_value=True)
    # DTensor finds out the shapes of a result by running operators, which are none of the step.
    with mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", _shapes), at_once:
        yield


def _shapes(propagator: Any, *args: Any, **kwargs: Any) -> Any:
    with _disable_current_modes():
        return _own_shapes(propagator, *args, **kwargs)


def whole(part: torch.Tensor, placement: Any) -> torch.Tensor:
    """A distributed tensor of the part that lies in this process."""
    make: Any = DTensor
    found: torch.Tensor = make(part, placement, requires_grad=False)
    return found


def forget_meshes() -> None:
    """DTensor keeps how operators run on a mesh, and PyTorch 2.9 finds it again on a later mesh of the same shape."""
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
