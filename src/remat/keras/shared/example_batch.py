"""Batches for a model that nobody gave data for: their shapes, and random values that its loss can take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from remat.core.errors import UnsupportedStep
from remat.keras import _private
from remat.running.workload import Array, InputShape

_DEFAULT_WORDS = 2


def batch_spec(model: keras.Model, batch_size: int, inputs: Sequence[InputShape] = ()) -> tuple[Any, Any]:
    """The structure of a batch (inputs, targets), as ``keras.KerasTensor``.

    Args:
        model: compiled, so that its loss tells what the targets are.
        batch_size: samples.
        inputs: shapes without the batch; needed for a model that does not say what it takes, or leaves a size open.

    Raises:
        UnsupportedStep: where a size stays unknown, or the number of inputs is another.
    """
    x = _inputs(model, batch_size, inputs)
    outputs = _outputs(model, x, batch_size)
    name = model.loss if isinstance(model.loss, str) else getattr(model.loss, "name", "")
    if isinstance(outputs, keras.KerasTensor) and str(name).startswith("sparse_"):
        outputs = keras.KerasTensor(outputs.shape[:-1], "int64")
    return x, outputs


def random_batch(model: keras.Model, spec: tuple[Any, Any], seed: int) -> tuple[Any, Any]:
    """Arrays of the structure of ``batch_spec``: token ids below the vocabulary, class numbers below the classes."""
    random = np.random.default_rng(seed)
    x_spec, y_spec = spec
    words = min((layer.input_dim for layer in _embeddings(model)), default=_DEFAULT_WORDS)
    x = keras.tree.map_structure(lambda t: _values(random, t, words), x_spec)
    name = str(model.loss if isinstance(model.loss, str) else getattr(model.loss, "name", ""))
    classes = model.outputs[0].shape[-1] if getattr(model, "outputs", None) else _DEFAULT_WORDS

    def target(t: keras.KerasTensor) -> Array:
        if "categorical_crossentropy" in name and not name.startswith("sparse_"):
            return np.asarray(np.eye(t.shape[-1], dtype=t.dtype)[random.integers(0, t.shape[-1], t.shape[:-1])])
        if "crossentropy" in name and not name.startswith("sparse_"):
            return np.asarray(random.integers(0, 2, t.shape), dtype=t.dtype)
        return _values(random, t, classes)

    return x, keras.tree.map_structure(target, y_spec)


def _inputs(model: keras.Model, batch_size: int, given: Sequence[InputShape]) -> Any:
    known = getattr(model, "inputs", None)  # A subclassed model has no such attribute before it is built.
    if not known:
        if not given:
            raise UnsupportedStep(
                f"{model.name!r} does not say what it takes; build it from keras.Input, call it once on data, or give "
                "its input's shape (--input 224,224,3)"
            )
        specs = [keras.KerasTensor((batch_size, *i.shape), i.dtype or keras.config.floatx()) for i in given]
        return specs[0] if len(specs) == 1 else specs
    if given and len(given) != len(known):
        raise UnsupportedStep(f"{model.name!r} takes {len(known)} inputs, and the shapes of {len(given)} were given")
    wanted = iter(given)

    def spec(tensor: keras.KerasTensor) -> keras.KerasTensor:
        override = next(wanted, None)
        shape = (batch_size, *(tensor.shape[1:] if override is None else override.shape))
        if None in shape:
            raise UnsupportedStep(
                f"{tensor.name!r} of {model.name!r} has the shape {tensor.shape}; give every dimension but the first "
                "(--input 224,224,3)"
            )
        return keras.KerasTensor(shape, (override.dtype if override else None) or tensor.dtype, name=tensor.name)

    structure = getattr(model, "_inputs_struct", None)
    x = keras.tree.map_structure(spec, known if structure is None else structure)
    return x[0] if isinstance(x, list) and len(x) == 1 else x


def _outputs(model: keras.Model, x: Any, batch_size: int) -> Any:
    made = model.compute_output_spec(x) if not getattr(model, "outputs", None) or _is_open(model) else model.outputs
    outputs = keras.tree.map_structure(lambda t: keras.KerasTensor((batch_size, *t.shape[1:]), t.dtype), made)
    return outputs[0] if isinstance(outputs, list) and len(outputs) == 1 else outputs


def _is_open(model: keras.Model) -> bool:
    return any(None in tensor.shape[1:] for tensor in model.outputs)


def _values(random: np.random.Generator, spec: keras.KerasTensor, below: int) -> Array:
    if "int" in spec.dtype:
        return np.asarray(random.integers(0, below, spec.shape), dtype=spec.dtype)
    if spec.dtype == "bool":
        return np.ones(spec.shape, dtype=bool)
    return np.asarray(random.normal(size=spec.shape), dtype="float32" if spec.dtype == "bfloat16" else spec.dtype)


def _embeddings(model: keras.Model) -> list[Any]:
    return [layer for layer in _private.all_layers(model) if isinstance(layer, keras.layers.Embedding)]
