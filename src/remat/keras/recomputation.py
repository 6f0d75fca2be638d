"""``recompute`` for Keras layers: the layer stays the object it is, its ``call`` drops its activations."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from remat.errors import UnsupportedStep

_CONFIG_KEY = "remat_recompute"
_PACKAGE, _NAME = "remat", "RecomputedLayer"

Enabled = bool | Callable[[], bool]


def recompute(target: Any, layers: Sequence[str | keras.layers.Layer] | None = None, *, enabled: Enabled = True) -> Any:
    """Drop the activations inside of layers after the forward pass and recompute them in the backward pass.

    The layers stay the same objects, with the same weights, names and results; training gives the same numbers in less
    memory. What is inside one layer is recomputed as a whole and its inputs are kept, so choose the blocks of a
    network, not single operations and not the whole model. The setting is part of a layer's config: it survives
    ``save`` and ``load_model`` (import ``remat.keras`` first), ``clone_model`` and ``from_config``.

    Args:
        target: a layer, or a model (compiled or not) whose ``layers`` are named.
        layers: names of layers of the model at any depth, or the layers themselves; None for ``target`` itself.
        enabled: False gives the layers their plain ``call`` back; or a function that says so at each call. In the
            environment ``REMAT_RECOMPUTE=0`` switches all off.

    Returns:
        ``target``.

    Raises:
        ValueError: where the model has no layer of a name; it lists those that there are.
        UnsupportedStep: for another backend than TensorFlow.
    """
    if layers is None:
        return recompute_layer(target, enabled=enabled)
    if isinstance(layers, str):
        raise TypeError(f"layers takes a list of names, not the string {layers!r}; write [{layers!r}]")
    for layer in find_layers(target, layers):
        recompute_layer(layer, enabled=enabled)
    _forget_functions(target)
    return target


def recompute_layer(layer: Any, *, enabled: Enabled = True) -> Any:
    """Make one layer recompute; see ``recompute``."""
    if not isinstance(layer, keras.layers.Layer):
        return _recompute_tf_keras_layer(layer, enabled)
    if keras.backend.backend() != "tensorflow":
        raise UnsupportedStep(
            f"recompute supports Keras on TensorFlow, and the active backend is {keras.backend.backend()!r}; set "
            "KERAS_BACKEND=tensorflow before keras is imported"
        )
    plain: type = getattr(type(layer), "_remat_plain_class", type(layer))
    # Keras tracks attributes; the class is none.
    object.__setattr__(layer, "__class__", plain if enabled is False else _recomputing(plain))
    object.__setattr__(layer, "_remat_enabled", enabled)
    _forget_functions(layer)
    return layer


def is_recomputed(layer: Any) -> bool:
    """Does ``layer`` recompute?"""
    return hasattr(type(layer), "_remat_plain_class") or hasattr(layer, "_remat_plain_call")


def find_layers(model: Any, wanted: Sequence[Any]) -> list[Any]:
    """The layers of a model with these names, at any depth.

    Raises:
        ValueError: where there is none, or more than one.
    """
    known: dict[str, list[Any]] = {}
    for layer in model._flatten_layers(include_self=False):
        known.setdefault(layer.name, []).append(layer)
    found = []
    for name in wanted:
        if not isinstance(name, str):
            found.append(name)
        elif len(known.get(name, [])) == 1:
            found += known[name]
        elif name in known:
            raise ValueError(
                f"{model.name!r} has {len(known[name])} layers named {name!r}; give the layer itself, not its name"
            )
        else:
            raise ValueError(f"{model.name!r} has no layer {name!r}; it has {', '.join(sorted(known))}")
    return found


def _forget_functions(model: Any) -> None:
    """What a compiled model has traced already holds the old layers."""
    for name in ("train_function", "test_function", "predict_function"):
        if getattr(model, name, None) is not None:
            setattr(model, name, None)


class RecomputedLayer:
    """What a saved model names in place of a recomputed layer's class; its config tells the class."""

    @staticmethod
    def from_config(config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None) -> Any:
        """The layer of the class that the config names, recomputing."""
        config = dict(config)
        plain = config.pop(_CONFIG_KEY)
        described = {**plain, "config": config}
        return recompute_layer(keras.saving.deserialize_keras_object(described, custom_objects=custom_objects))


keras.saving.get_custom_objects()[f"{_PACKAGE}>{_NAME}"] = RecomputedLayer


@functools.cache
def _recomputing(plain: type) -> type:
    """The class of a recomputed layer: a subclass with the same name, whose ``call`` is recomputed."""
    from remat.tensorflow.recomputation import recompute as recompute_function

    recomputed_call = recompute_function(plain.call)  # type: ignore[attr-defined]

    @functools.wraps(plain.call)  # type: ignore[attr-defined]
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        enabled = self._remat_enabled
        on = enabled() if callable(enabled) else enabled
        return (recomputed_call if on else plain.call)(self, *args, **kwargs)  # type: ignore[attr-defined]

    def get_config(self: Any) -> dict[str, Any]:
        return {**plain.get_config(self), _CONFIG_KEY: _described(plain)}  # type: ignore[attr-defined]

    def from_config(cls: type, config: Mapping[str, Any], custom_objects: Any = None) -> Any:
        if _CONFIG_KEY not in config:
            return recompute_layer(plain.from_config(dict(config)))  # type: ignore[attr-defined]
        return RecomputedLayer.from_config(config, custom_objects)

    members: dict[str, Any] = {
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
        "__doc__": plain.__doc__,
        "call": call,
        "get_config": get_config,
        "from_config": classmethod(from_config),
        "_remat_plain_class": plain,
    }
    # The same name keeps the paths of weights in files the same.
    made = type(plain.__name__, (plain,), members)
    keras.saving.register_keras_serializable(_PACKAGE, _NAME)(made)
    keras.saving.get_custom_objects()[f"{_PACKAGE}>{_NAME}"] = RecomputedLayer
    return made


def _described(plain: type) -> dict[str, Any]:
    """How Keras names a class in a file."""
    registered = keras.saving.get_registered_name(plain)
    return {
        "module": plain.__module__,
        "class_name": plain.__name__,
        "registered_name": registered if registered != plain.__name__ else None,
    }


def _recompute_tf_keras_layer(layer: Any, enabled: Enabled) -> Any:
    legacy = sys.modules.get("tf_keras")
    if legacy is None or not isinstance(layer, legacy.layers.Layer):
        raise TypeError(f"recompute takes a Keras layer or model, not {layer!r}")
    from remat.tensorflow.recomputation import recompute as recompute_function

    plain_call = getattr(layer, "_remat_plain_call", layer.call)
    layer.call = plain_call if enabled is False else recompute_function(plain_call, enabled=enabled)
    layer._remat_plain_call = plain_call
    _forget_functions(layer)
    return layer
