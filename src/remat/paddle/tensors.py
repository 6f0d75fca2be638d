"""The tensors in what a function takes and returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import paddle


def tensors_in(value: Any) -> list[Any]:
    """The tensors in nested lists, tuples and dictionaries."""
    if isinstance(value, paddle.Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    return [leaf for one in value for leaf in tensors_in(one)] if isinstance(value, list | tuple) else []
