"""BatchNormalization under micro-batches: each normalises by its own statistics, the moving ones move once per update.

They move by the mean and the variance of the whole batch's inputs to the layer, put together from those of the
micro-batches: the variance within and between them (Chan, Golub, LeVeque 1979, doi:10.1007/978-3-642-51461-6_3).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
from keras import ops

from remat.core.errors import UnsupportedStep
from remat.keras import _private


def coupling_layers(model: keras.Model) -> list[str]:
    """Names of the layers for whose sake a batch should stay whole: those of ``BatchStatistics``.

    Of a model whose layers cannot be asked there are no micro-batches either, so that nothing has to be preferred.
    """
    return [layer.name for layer in BatchStatistics(model, refuse=False).layers]


class BatchStatistics:
    """The BatchNormalization layers of a model that learn statistics.

    Args:
        model: the model.
        refuse: raise for what micro-batches cannot do.

    Raises:
        UnsupportedStep: for batch renormalisation, which corrects by statistics that each micro-batch would move.
    """

    def __init__(self, model: keras.Model, *, refuse: bool = True) -> None:
        found = [layer for layer in _private.all_layers(model) if isinstance(layer, keras.layers.BatchNormalization)]
        self.layers = [layer for layer in dict.fromkeys(found) if layer.trainable]
        renormalised = [layer.name for layer in self.layers if getattr(layer, "renorm", False)]
        if renormalised and refuse:
            raise UnsupportedStep(
                f"BatchNormalization with renorm=True ({renormalised[0]!r}) is not supported with micro-batches; leave "
                "micro_batches at 1 and give a budget"
            )

    @contextlib.contextmanager
    def raw(self) -> Iterator[None]:
        """Inside the block a layer's moving statistics become those of the batch that it is called on."""
        momenta = [layer.momentum for layer in self.layers]
        for layer in self.layers:
            layer.momentum = 0.0
        try:
            yield
        finally:
            for layer, momentum in zip(self.layers, momenta, strict=True):
                layer.momentum = momentum

    def values(self) -> list[tuple[Any, Any]]:
        """Mean and variance per layer, as its variables hold them now."""
        return [(ops.copy(layer.moving_mean.value), ops.copy(layer.moving_variance.value)) for layer in self.layers]

    def empty(self) -> list[Any]:
        """Nothing seen: no share of the batch; per layer a mean and a variance of 0."""
        zeros = [ops.zeros_like(value) for pair in self.values() for value in pair]
        return [ops.zeros(()), *zeros]

    def merged(self, seen: Sequence[Any], share: Any) -> list[Any]:
        """``seen`` and a micro-batch that has just been run, which is ``share`` of the batch."""
        before, *totals = seen
        share = ops.cast(share, before.dtype)
        together = before + share
        result = [together]
        for number, (mean, variance) in enumerate(self.values()):
            total_mean, total_variance = totals[2 * number : 2 * number + 2]
            part = ops.cast(share / together, mean.dtype)
            difference = mean - total_mean
            result.append(total_mean + difference * part)
            within = total_variance + (variance - total_variance) * part
            result.append(within + difference**2 * part * (1 - part))
        return result

    def move(self, before: Sequence[tuple[Any, Any]], seen: Sequence[Any]) -> None:
        """One move of the moving statistics, from what they were before the micro-batches."""
        for number, (layer, old) in enumerate(zip(self.layers, before, strict=True)):
            for variable, was, now in zip(
                (layer.moving_mean, layer.moving_variance), old, seen[1 + 2 * number : 3 + 2 * number], strict=True
            ):
                variable.assign(was * layer.momentum + now * (1.0 - layer.momentum))
