"""Keras on PyTorch: a checkpoint is a storage that the traced step keeps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import torch

from remat.core.errors import UnsupportedStep
from remat.keras.shared.kept_layers import NamedLayers
from remat.torch.trace.recording import Recording
from remat.torch.trace.watcher import mark


class KeptLayers(NamedLayers):
    """What named layers return while a training step is traced.

    Args:
        model: the model.
        wanted: names of layers, or layers.

    Raises:
        ValueError: where the model has no layer of a name.
        UnsupportedStep: for the name of a tensor, of which PyTorch has none.
    """

    def __init__(self, model: keras.Model, wanted: Sequence[Any]) -> None:
        super().__init__(model, wanted)
        if self.tensor_names:
            raise UnsupportedStep(
                f"the checkpoint {self.tensor_names[0]!r} names a tensor, and tensors have no names on PyTorch; name "
                "layers, or give the layers themselves"
            )

    def marking(self, loss_fn: Callable[..., Any]) -> Callable[..., Any]:
        """The loss function, in which what the layers return is marked where it is traced."""

        @functools.wraps(loss_fn)
        def marked(*args: Any) -> Any:
            with self._calls_pass(_marked):
                return loss_fn(*args)

        return marked

    def marking_captured(self) -> AbstractContextManager[None]:
        """A context in which what the layers return is marked in what is captured there."""
        return self._calls_pass(_marked_in_graph)

    def storages_in(self, recording: Recording) -> list[int]:
        """The storages that hold what the layers returned.

        Raises:
            UnsupportedStep: where a layer was not called.
        """
        return [storage for number in self.called(recording.marked) for storage in recording.marked[number]]

    def called(self, marked: Collection[Any]) -> range:
        """The numbers of the layers, given those that a step was marked with.

        Raises:
            UnsupportedStep: where a layer was not called.
        """
        for number in range(len(self.layers)):
            if number not in marked:
                raise self._not_called(number)
        return range(len(self.layers))


def _marked(number: int, result: Any) -> Any:
    for leaf in keras.tree.flatten(result):
        if isinstance(leaf, torch.Tensor):
            mark(leaf, number)
    return result


def _marked_in_graph(number: int, result: Any) -> Any:
    for leaf in keras.tree.flatten(result):
        if isinstance(leaf, torch.Tensor):
            torch.ops.remat.mark(leaf, number)
    return result
