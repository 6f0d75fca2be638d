"""How a limit sits on a model: it replaces ``make_train_function`` of this one object until it is taken off."""

from __future__ import annotations

import weakref
from typing import Any

import keras

from remat.core.errors import UnsupportedStep


class Attachment:
    """A limit on one model; each backend makes its own training function.

    Raises:
        UnsupportedStep: where something else has replaced the model's ``make_train_function``.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = weakref.ref(model)
        if "make_train_function" in vars(model):
            raise UnsupportedStep(f"something else has replaced make_train_function of {model.name!r}; undo that first")
        model.make_train_function = self._make_train_function
        model.train_function = None

    def detach(self) -> None:
        """Give the model its own training step back."""
        model = self._model()
        if model is not None:
            vars(model).pop("make_train_function", None)
            model.train_function = None

    def _make_train_function(self, force: bool = False) -> Any:
        raise NotImplementedError

    def _required_model(self) -> keras.Model:
        model = self._model()
        if model is None:
            raise ReferenceError("the model of this memory limit is gone")
        return model
