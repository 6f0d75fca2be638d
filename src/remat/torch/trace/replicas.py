"""Replicas: what ``DistributedDataParallel`` adds to a step, seen without any process talking to another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.nn.parallel import DistributedDataParallel


@contextmanager
def without_reduction(found: Callable[[int], None]) -> Iterator[None]:
    """Inside, a replicated module runs as the module in it: its buckets and hooks are for real gradients.

    Args:
        found: told the bytes of the buckets in which the gradients of a replicated module are reduced, once for each.
    """
    seen: set[int] = set()

    def forward(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
        if id(self) not in seen:
            seen.add(id(self))
            found(sum(_bytes(p) for p in self.module.parameters() if p.requires_grad))
        return self.module(*args, **kwargs)

    with mock.patch.object(DistributedDataParallel, "forward", forward):
        yield


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
