"""A loss and an optimizer for models that were not compiled."""

from __future__ import annotations

from typing import Any

import keras


def compile_if_needed(model: keras.Model, loss: str | None = None, optimizer: str | None = None) -> None:
    """Compile a model that is not compiled, or that is to have another loss or optimizer.

    Args:
        model: the model.
        loss: name of a Keras loss; None keeps the model's own, else takes cross-entropy after a softmax and mean
            squared error otherwise.
        optimizer: name of a Keras optimizer; None keeps the model's own, else takes Adam.
    """
    if model.compiled and loss is None and optimizer is None:
        return
    on_jax = keras.backend.backend() == "jax"
    model.compile(
        optimizer=optimizer or (model.optimizer if model.compiled else "adam"),
        loss=loss or (model.loss if model.compiled else _default_loss(model)),
        jit_compile=on_jax,
    )


def _default_loss(model: keras.Model) -> Any:
    if len(getattr(model, "outputs", None) or ()) == 1 and _ends_in_softmax(model):
        return "sparse_categorical_crossentropy"
    return "mean_squared_error"


def _ends_in_softmax(model: keras.Model) -> bool:
    last = model.layers[-1]
    return isinstance(last, keras.layers.Softmax) or getattr(last, "activation", None) is keras.activations.softmax
