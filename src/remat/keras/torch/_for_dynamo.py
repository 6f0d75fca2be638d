"""Private functions of Keras that Dynamo cannot follow, and the same written so that it can.

``tests/keras/test_keras_private.py`` fails with a clear message when a release moves one of these.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest import mock

import torch
from keras.src.backend import torch as _backend
from keras.src.backend.torch import nn as _nn
from keras.src.tree import torchtree_impl as _trees
from keras.src.utils import backend_utils as _backend_utils
from keras.src.utils.naming import auto_name

_LEAVES: Final = (torch.Tensor, bool, int, float, str, type(None))

_own_ordered = _trees._dict_to_ordered_dict
_own_can_use_flash = _nn._can_use_flash_attention


def assume_constants() -> None:
    """Tell Dynamo which functions return the same at each step.

    Is this a graph of TensorFlow, or a pipeline of Grain? And by what name is an operation called that a layer makes
    anew at each call? Keras counts these names; Dynamo would guard the count, which is another one at each step.
    """
    functions: Sequence[Callable[..., Any]] = (
        _backend_utils.in_tf_graph,
        _backend_utils.in_grain_data_pipeline,
        auto_name,
    )
    for function in functions:
        torch._dynamo.assume_constant_result(function)
    # Keras remembers which type comes of which, as Dynamo says with a stack of calls. Nothing else follows from it.
    warnings.filterwarnings("ignore", "Dynamo detected a call to a `functools.lru_cache`", UserWarning)


def _of_backend(self: Any, name: str) -> Any:
    """In place of ``DynamicBackend.__getattr__``, which imports the backend by its name."""
    return getattr(_backend, name)


def _ordered(structure: Any) -> Any:
    """In place of ``_dict_to_ordered_dict``, which asks whether two tuples are the same object."""
    kind = type(structure)
    if kind is dict:
        return {key: structure[key] for key in sorted(structure.keys())}
    if kind is list:
        return [_ordered(child) for child in structure]
    if kind is tuple:
        return tuple([_ordered(child) for child in structure])
    return structure if isinstance(structure, _LEAVES) else _own_ordered(structure)


def _can_use_flash(
    query: Any, key: Any, value: Any, mask: Any = None, is_causal: bool = False, raise_error: bool = False
) -> Any:
    """In place of ``_can_use_flash_attention``, which asks CUDA, wherever the tensors are."""
    if query.is_cpu and not raise_error:
        return False
    return _own_can_use_flash(query, key, value, mask, is_causal, raise_error)


@contextmanager
def traceable() -> Iterator[None]:
    """Inside, Keras calls the functions above in place of its own; captured steps are guarded by which these are."""
    with ExitStack() as stack:
        for owner, name, function in (
            (_backend_utils.DynamicBackend, "__getattr__", _of_backend),
            (_trees, "_dict_to_ordered_dict", _ordered),
            (_nn, "_can_use_flash_attention", _can_use_flash),
        ):
            stack.enter_context(mock.patch.object(owner, name, function))
        yield
