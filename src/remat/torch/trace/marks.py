"""Marks on tensors of a step that is being recorded, for whoever wants to find them in its graph again."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeAlias

import torch

Take: TypeAlias = Callable[[torch.Tensor, Hashable], None]

_take: ContextVar[Take | None] = ContextVar("take", default=None)


def mark(tensor: torch.Tensor, as_what: Hashable) -> None:
    """Note a tensor of the step that is being recorded, see ``Recording.marked``; in a real step do nothing."""
    if (take := _take.get()) is not None:
        take(tensor, as_what)


@contextmanager
def marks_go_to(take: Take) -> Iterator[None]:
    """Inside, ``mark`` hands on what it is given."""
    token = _take.set(take)
    try:
        yield
    finally:
        _take.reset(token)
