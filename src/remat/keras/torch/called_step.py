"""What a training step of Keras depends on, so that it can be captured by calling it.

On TensorFlow and JAX Keras bakes into a step what its layers hold: numbers, flags, functions. On PyTorch it does not,
so that a callback may change the rate of a dropout from step to step. Here these are the key of a capture: a step that
finds others is captured anew. That is enough for layers of Keras' own, which read nothing else. What a class or a
function of the user's reads nobody knows, so a model with one is captured by Dynamo, which guards all that it comes by.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import keras
import torch

from remat.keras import _private
from remat.torch.graph_mode.by_calling import State, in_layer

_LIBRARIES: Final = ("keras", "keras_hub", "remat")
"""Whose layers and functions read nothing but their arguments, what they hold, and Keras' own settings."""

_OF_TRAINING: Final = frozenset(("train_function", "test_function", "predict_function", "stop_training"))
"""What a model holds for its loop of training, which no layer reads."""

_OF_PYTORCH: Final = (torch.nn.ParameterDict, torch.nn.ParameterList)
"""Where Keras' layers keep their variables for PyTorch."""

_PLAIN: Final = frozenset((type(None), bool, int, float, str))


def why_not_called(model: keras.Model) -> str:
    """What of a model's step may read what nobody knows of; "" where it can be captured by calling it."""
    for part in _parts_of(model):
        if not _is_known(type(part)):
            return f"{type(part).__name__} is a class of your own"
        if getattr(part, "_forward_hooks", None) or getattr(part, "_forward_pre_hooks", None):
            return f"{part.name} has hooks"
        for name, value in vars(part).items():
            if name.endswith("_initializer") or name in _OF_TRAINING:
                continue  # A built layer calls no initializer.
            for one in _held_in(value):
                if callable(one) and not (_is_known(one) or _is_known(type(one)) or isinstance(one, _OF_PYTORCH)):
                    return f"{name} of {getattr(part, 'name', type(part).__name__)} is a function of your own"
    return ""


def state_of(model: keras.Model) -> State:
    """What a model's training step depends on, beside the batch."""
    variables = [*model.variables, *model.metrics_variables]
    values = _private.raw_values(variables)
    found = list(dict(zip(map(id, values), variables, strict=True)).values())  # Those that share a tensor, once.

    @contextmanager
    def replaced(values: Sequence[torch.Tensor]) -> Iterator[None]:
        own = _private.raw_values(found)
        _private.set_raw_values(found, values)
        try:
            with _private.calls_inside(lambda layer: in_layer(layer.path or layer.name)):
                yield
        finally:
            _private.set_raw_values(found, own)
            _private.clear_losses(model)  # They are of this call only.

    key = (_settings(), *(_key_of(part) for part in _parts_of(model)))
    return State(_private.raw_values(found), lambda: [one.path for one in found], key, replaced)


def _parts_of(model: keras.Model) -> Iterator[Any]:
    """The model, its layers, and its losses."""
    yield model
    yield from _private.all_layers(model)
    yield from _private.losses_of(model)


def _settings() -> Hashable:
    """Those of Keras and PyTorch that decide what a layer's call computes."""
    return (
        keras.config.floatx(),
        keras.config.image_data_format(),
        keras.config.epsilon(),
        keras.config.is_flash_attention_enabled(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        *((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")),
    )


def _key_of(part: Any) -> Hashable:
    held = vars(part)
    found = [type(part), getattr(held.get("_dtype_policy"), "name", None), held.get("_trainable"), held.get("call")]
    # A loop without calls: it runs at each step, for thousands of values.
    for name, value in held.items():
        if name[0] != "_" and name not in _OF_TRAINING:
            kind = type(value)
            found += (name, kind, value) if kind in _PLAIN else (name, _key_of_value(value))
    return tuple(found)


def _key_of_value(value: Any) -> Any:
    kind: Any = type(value)
    return _key_maker(kind)(value)


@functools.cache
def _key_maker(kind: type) -> Callable[[Any], Any]:
    """What makes the key of values of one type; which it is, is asked thousands of times at each step."""
    if kind in _PLAIN:
        return lambda value: (kind, value)
    if issubclass(kind, list | tuple):
        return lambda value: (kind, *map(_key_of_value, value))
    if issubclass(kind, dict):
        return lambda value: (kind, *value, *map(_key_of_value, value.values()))
    if issubclass(kind, keras.Regularizer):
        return lambda value: (kind, *vars(value), *map(_key_of_value, vars(value).values()))
    if kind.__module__ in ("builtins", "functools"):  # Functions, methods, types.
        return lambda value: value if callable(value) else kind
    return lambda value: kind


def _held_in(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for one in value:
            yield from _held_in(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from _held_in(one)
    else:
        yield value


def _is_known(thing: Callable[..., Any]) -> bool:
    return str(getattr(thing, "__module__", "")).partition(".")[0] in _LIBRARIES
