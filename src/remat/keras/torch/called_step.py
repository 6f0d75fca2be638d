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
from dataclasses import dataclass
from typing import Any, Final

import keras
import numpy as np
import torch

from remat.keras import _private
from remat.keras.torch import seeded_draws
from remat.torch.graph_mode.by_calling import NotCalled, State, in_layer

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
    places = [_Place.of_variable(one) for one in variables]
    key: list[Hashable] = [_settings()]
    for part in _parts_of(model):
        key.append(_key_of(part, places))
        for number, tensor in enumerate(_private.constants_of(part, torch.Tensor)):
            places.append(_Place({str(number): tensor}, str(number), part))
    found = list({id(one.value): one for one in places}.values())  # Those that share a tensor, once.

    @contextmanager
    def replaced(values: Sequence[torch.Tensor]) -> Iterator[None]:
        if why := why_not_called(model):
            raise NotCalled(why)  # It is new: when the model was first limited there was none.
        instead = {id(one.value): value for one, value in zip(found, values, strict=True)}
        own = [one.value for one in places]
        for one, value in zip(places, own, strict=True):
            one.put(instead[id(value)])
        try:
            named = _private.calls_inside(lambda layer: in_layer(getattr(layer, "path", None) or layer.name))
            constants = _private.constants_replaced(instead)
            with named, constants, _private.whole_tracebacks(), seeded_draws.captured():
                yield
        finally:
            for one, value in zip(places, own, strict=True):
                one.put(value)
            _private.clear_losses(model)  # They are of this call only.

    return State([one.value for one in found], lambda: [one.name for one in found], tuple(key), replaced)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor is held that a step reads.

    Attributes:
        holder: the attributes of a variable, or of a layer.
        key: of the tensor among them.
        owner: of the attributes.
    """

    holder: dict[str, Any]
    key: str
    owner: Any

    @classmethod
    def of_variable(cls, variable: Any) -> _Place:
        return cls(vars(variable), _private.RAW_VALUE, variable)

    @property
    def value(self) -> torch.Tensor:
        value: torch.Tensor = self.holder[self.key]
        return value

    @property
    def name(self) -> str:
        path = str(getattr(self.owner, "path", None) or getattr(self.owner, "name", ""))
        return path if self.key == _private.RAW_VALUE else f"{path}/{self.key}"

    def put(self, value: torch.Tensor) -> None:
        # Layers would take note of an assignment.
        self.holder[self.key] = value


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


def _key_of(part: Any, places: list[_Place]) -> Hashable:
    """What a layer holds. Tensors are no part of it; their places are added to ``places``."""
    held = vars(part)
    found = [type(part), getattr(held.get("_dtype_policy"), "name", None), held.get("_trainable"), held.get("call")]
    if _private.OPTIONS_OF_LOSS in held:
        found.append(_key_of_value(held[_private.OPTIONS_OF_LOSS]))
    # A loop without calls: it runs at each step, for thousands of values.
    for name, value in held.items():
        kind = type(value)
        if kind is torch.Tensor:
            places.append(_Place(held, name, part))
        elif name[0] != "_" and name not in _OF_TRAINING:
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
    if issubclass(kind, np.ndarray):
        return _Same
    if kind.__module__ in ("builtins", "functools"):  # Functions, methods, types.
        return lambda value: value if callable(value) else kind
    return lambda value: kind


class _Same:
    """A value that is equal to nothing but itself."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)


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
