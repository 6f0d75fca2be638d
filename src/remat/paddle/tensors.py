"""The tensors in what a function takes, returns and closes over, and their bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import paddle


def tensors_in(value: Any) -> list[Any]:
    """The tensors in nested lists, tuples and dictionaries."""
    if isinstance(value, paddle.Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    return [leaf for one in value for leaf in tensors_in(one)] if isinstance(value, list | tuple) else []


def bytes_of(tensors: Iterable[Any]) -> int:
    """What tensors hold together."""
    return sum(one.size * one.element_size() for one in tensors)


def closed_over(function: Callable[..., Any]) -> list[Any]:
    """What a function of Python's closes over."""
    found = []
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # A cell that is not filled yet.
            found.append(cell.cell_contents)
    return found
