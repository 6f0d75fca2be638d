"""Keras on PyTorch: a checkpoint is a storage that the traced step keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import keras

from remat.core.errors import UnsupportedStep
from remat.keras.shared.kept_layers import NamedLayers
from remat.torch.kept_results import KeptResults


class KeptLayers(NamedLayers, KeptResults):
    """What named layers return while a training step is traced or captured.

    Args:
        model: the model.
        wanted: names of layers, or layers.

    Raises:
        ValueError: where the model has no layer of a name.
        UnsupportedStep: for the name of a tensor, of which PyTorch has none.
    """

    _leaves: ClassVar[Callable[[Any], Iterable[Any]]] = staticmethod(keras.tree.flatten)

    def __init__(self, model: keras.Model, wanted: Sequence[Any]) -> None:
        super().__init__(model, wanted)
        if self.tensor_names:
            raise UnsupportedStep(
                f"the checkpoint {self.tensor_names[0]!r} names a tensor, and tensors have no names on PyTorch; name "
                "layers, or give the layers themselves"
            )

    @property
    def _count(self) -> int:
        return len(self.layers)
