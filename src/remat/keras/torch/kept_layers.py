"""Finds what named layers return on PyTorch, where a checkpoint is a storage that a traced step keeps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import torch

from remat.core.errors import UnsupportedStep
from remat.keras.recompute import find_layers
from remat.keras.shared.layer_calls import calls_pass, is_tensor_name, not_called
from remat.torch.trace.recording import Recording
from remat.torch.trace.watcher import mark


class KeptLayers:
    """What named layers return while a training step is traced.

    Args:
        model: the model.
        wanted: names of layers, or layers.

    Raises:
        ValueError: where the model has no layer of a name.
        UnsupportedStep: for the name of a tensor, of which PyTorch has none.
    """

    def __init__(self, model: keras.Model, wanted: Sequence[Any]) -> None:
        for name in wanted:
            if is_tensor_name(name):
                raise UnsupportedStep(
                    f"the checkpoint {name!r} names a tensor, and tensors have no names on PyTorch; name layers, or "
                    "give the layers themselves"
                )
        self._layers = find_layers(model, wanted)

    def marking(self, loss_fn: Callable[..., Any]) -> Callable[..., Any]:
        """The loss function, in which what the layers return is marked where it is traced."""

        @functools.wraps(loss_fn)
        def marked(*args: Any) -> Any:
            with calls_pass(self._layers, _marked):
                return loss_fn(*args)

        return marked

    def storages_in(self, recording: Recording) -> list[int]:
        """The storages that hold what the layers returned.

        Raises:
            UnsupportedStep: where a layer was not called.
        """
        for number, layer in enumerate(self._layers):
            if number not in recording.marked:
                raise not_called(layer)
        return [storage for found in recording.marked.values() for storage in found]


def _marked(number: int, result: Any) -> Any:
    for leaf in keras.tree.flatten(result):
        if isinstance(leaf, torch.Tensor):
            mark(leaf, number)
    return result
