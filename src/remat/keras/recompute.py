"""``recompute`` for Keras layers: the layer stays the object it is, its ``call`` drops its activations."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from remat.core.errors import UnsupportedStep
from remat.keras import _private

_CONFIG_KEY = "remat_recompute"
_SEGMENTS_KEY = "in_segments"
_PACKAGE, _NAME = "remat", "RecomputedLayer"

Enabled = bool | Callable[[], bool]


def recompute(
    target: Any,
    layers: Sequence[str | keras.layers.Layer] | None = None,
    *,
    enabled: Enabled = True,
    in_segments: bool = False,
) -> Any:
    """Drop the activations inside of layers after the forward pass and recompute them in the backward pass.

    The layers stay the same objects, with the same weights, names and results; training gives the same numbers in less
    memory. What is inside one layer is recomputed as a whole and its inputs are kept, so choose the blocks of a
    network, not single operations. The setting is part of a layer's config: it survives ``save`` and ``load_model``
    (import ``remat.keras`` first), ``clone_model`` and ``from_config``.

    Args:
        target: a layer, or a model (compiled or not) whose ``layers`` are named.
        layers: names of layers of the model at any depth, or the layers themselves; None for ``target`` itself.
        enabled: False gives the layers their plain ``call`` back; or a function that says so at each call. In the
            environment ``REMAT_RECOMPUTE=0`` switches all off.
        in_segments: keep a few tensors on the way through each layer and recompute from one to the next, for a layer
            that is a whole network. A compiled model that is trained itself, not as a layer of another one, is
            recomputed in segments without being asked: as one piece nothing would be saved. (Not in tf_keras.)

    Returns:
        ``target``.

    Raises:
        ValueError: where the model has no layer of a name; it lists those that there are.
        UnsupportedStep: for another backend than TensorFlow.
    """
    if layers is None:
        return recompute_layer(target, enabled=enabled, in_segments=in_segments)
    if isinstance(layers, str):
        raise TypeError(f"layers takes a list of names, not the string {layers!r}; write [{layers!r}]")
    for layer in find_layers(target, layers):
        recompute_layer(layer, enabled=enabled, in_segments=in_segments)
    _forget_functions(target)
    return target


def recompute_layer(layer: Any, *, enabled: Enabled = True, in_segments: bool = False) -> Any:
    """Make one layer recompute; see ``recompute``."""
    if not isinstance(layer, keras.layers.Layer):
        return _recompute_tf_keras_layer(layer, enabled, in_segments)
    if keras.backend.backend() != "tensorflow":
        raise UnsupportedStep(
            f"recompute supports Keras on TensorFlow, and the active backend is {keras.backend.backend()!r}; set "
            "KERAS_BACKEND=tensorflow before keras is imported"
        )
    plain: type = getattr(type(layer), "_remat_plain_class", type(layer))
    # Keras tracks attributes; the class is none.
    object.__setattr__(layer, "__class__", plain if enabled is False else _recomputing(plain))
    object.__setattr__(layer, "_remat_enabled", enabled)
    object.__setattr__(layer, "_remat_in_segments", in_segments)
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
        plain = dict(config.pop(_CONFIG_KEY))
        in_segments = plain.pop(_SEGMENTS_KEY, False)
        described = {**plain, "config": config}
        layer = keras.saving.deserialize_keras_object(described, custom_objects=custom_objects)
        return recompute_layer(layer, in_segments=in_segments)


keras.saving.get_custom_objects()[f"{_PACKAGE}>{_NAME}"] = RecomputedLayer


@functools.cache
def _recomputing(plain: type) -> type:
    """The class of a recomputed layer: a subclass with the same name, whose ``call`` is recomputed."""
    from remat.tensorflow.recompute.function import recomputed_function

    in_one_piece = recomputed_function(plain.call)  # type: ignore[attr-defined]
    in_segments = recomputed_function(plain.call, in_segments=True)  # type: ignore[attr-defined]

    @functools.wraps(plain.call)  # type: ignore[attr-defined]
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        enabled = self._remat_enabled
        if not (enabled() if callable(enabled) else enabled):
            return plain.call(self, *args, **kwargs)  # type: ignore[attr-defined]
        is_whole = self._remat_in_segments or _private.is_trained_itself(self)
        return (in_segments if is_whole else in_one_piece)(self, *args, **kwargs)

    def get_config(self: Any) -> dict[str, Any]:
        described = _described(plain) | ({_SEGMENTS_KEY: True} if self._remat_in_segments else {})
        return {**plain.get_config(self), _CONFIG_KEY: described}  # type: ignore[attr-defined]

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


def _recompute_tf_keras_layer(layer: Any, enabled: Enabled, in_segments: bool) -> Any:
    legacy = sys.modules.get("tf_keras")
    if legacy is None or not isinstance(layer, legacy.layers.Layer):
        raise TypeError(f"recompute takes a Keras layer or model, not {layer!r}")
    from remat.tensorflow.recompute.function import recomputed_function

    plain_call = getattr(layer, "_remat_plain_call", layer.call)
    recomputed = recomputed_function(plain_call, enabled=enabled, in_segments=in_segments)
    layer.call = plain_call if enabled is False else recomputed
    layer._remat_plain_call = plain_call
    _forget_functions(layer)
    return layer
