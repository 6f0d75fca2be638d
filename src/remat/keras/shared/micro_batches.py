"""What micro-batches need to know of a Keras model, on every backend."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, ClassVar

import keras

from remat.core.errors import UnsupportedStep
from remat.keras.shared.batch_statistics import BatchStatistics, coupling_layers
from remat.keras.shared.loss_terms import LossTerm


class CheckedStep:
    """What every backend's training step in micro-batches begins with.

    Args:
        model: the model.
        count: how many micro-batches.
        is_tried: is that only being tried? Then nothing is said of layers that couple the samples of a batch, until
            ``warn`` is called.

    Raises:
        UnsupportedStep: for a model with its own ``train_step``, ``compute_loss`` or ``compute_metrics``.
    """

    _instead: ClassVar[str]
    """What a train_step of one's own can use."""

    def __init__(self, model: keras.Model, count: int, *, is_tried: bool = False) -> None:
        self._count = count
        self._warned = is_tried
        self._check(model)

    def _check(self, model: keras.Model) -> None:
        """Refuse what a training step of our own would silently leave out; it may have come since."""
        for name, advice in (
            ("train_step", f"use {self._instead} inside it"),
            ("compute_loss", "give the loss to compile() or add_loss()"),
            ("compute_metrics", "give the metrics to compile()"),
        ):
            if getattr(type(model), name) is not getattr(keras.Model, name) or name in vars(model):
                raise UnsupportedStep(
                    f"{model.name!r} has its own {name}, of which micro_batches={self._count} cannot know what it does "
                    f"to a part of a batch; {advice}, or leave micro_batches at 1"
                )

    def _statistics(self, model: keras.Model) -> BatchStatistics:
        """The layers that couple the samples of a batch; the first time, said aloud."""
        statistics = BatchStatistics(model)
        if not self._warned:
            self._warned = True
            self.warn(model)
        return statistics

    def warn(self, model: keras.Model) -> None:
        """Say which layers make micro-batches differ from full batches, if there are any."""
        if names := ", ".join(coupling_layers(model)):
            warnings.warn(
                f"micro_batches={self._count} is not the same as full batches for the BatchNormalization layers "
                f"{names}: each micro-batch is normalised by its own statistics; their moving statistics move once per "
                "update, by those of the whole batch. Recomputation (a budget with micro_batches=1) changes nothing",
                stacklevel=3,
            )


def check_variables(variables: list[Any]) -> None:
    """Refuse gradients that do not add up.

    Raises:
        UnsupportedStep: for a variable that its gradient overwrites.
    """
    for variable in variables:
        if getattr(variable, "overwrite_with_gradient", False):
            raise UnsupportedStep(
                f"{variable.path!r} is overwritten by its gradient (float8), which cannot be accumulated; leave "
                "micro_batches at 1"
            )


def groups_of(terms: list[LossTerm], *, has_additional: bool) -> tuple[list[list[int]], list[int]]:
    """Which terms of the loss share an accumulator, and which have a denominator that is known at the end only.

    Terms whose denominator is known beforehand (samples, none) are the first group; each further term, which divides
    by what a mask or weights count, is one of its own.

    Raises:
        UnsupportedStep: for a model with no loss.
    """
    counted = [number for number, term in enumerate(terms) if term.denominator is not None]
    known = [number for number in range(len(terms)) if number not in counted]
    groups = ([known] if known or has_additional else []) + [[number] for number in counted]
    return groups, counted


def summand(term: LossTerm, share: Any) -> Any:
    """What a term adds to the sum over the micro-batches; ``share`` is that of its samples."""
    if term.is_sum:
        return term.value
    return term.value * (share if term.denominator is None else term.denominator)


def names_of(data: Any) -> list[str]:
    """What each tensor of a batch (x, y, sample_weight) is called in an error."""
    names = []
    for part, name in zip(data, ("x", "y", "sample_weight"), strict=True):
        present = [leaf for leaf in keras.tree.flatten(part) if leaf is not None]
        names += [name if len(present) == 1 else f"{name} (its tensor {n})" for n in range(len(present))]
    return names


def batch_size_of(leaves: Sequence[Any], names: Sequence[str]) -> int:
    """Samples of a batch whose shapes are known.

    Raises:
        UnsupportedStep: where its tensors have none, or do not agree.
    """
    if not leaves:
        raise UnsupportedStep("there is no array to split into micro-batches")
    for leaf, name in zip(leaves, names, strict=True):
        if not leaf.shape:
            raise UnsupportedStep(
                f"{name} has the shape {tuple(leaf.shape)}, so it cannot be split into micro-batches; give it a first "
                "dimension of the batch's size, or leave it out of what is batched"
            )
        if leaf.shape[0] != leaves[0].shape[0]:
            raise UnsupportedStep(
                f"{names[0]} has {leaves[0].shape[0]} samples and {name} has {leaf.shape[0]}; everything that is split "
                "into micro-batches must have the same number"
            )
    return int(leaves[0].shape[0])


def sizes_of_pieces(batch_size: int, count: int) -> list[tuple[int, int, int]]:
    """The pieces of ``numpy.array_split``: size, number and first sample of those of each size, larger ones first."""
    pieces = min(count, batch_size)
    small, larger = divmod(batch_size, pieces)
    sizes = [(small + 1, larger, 0), (small, pieces - larger, larger * (small + 1))]
    return [entry for entry in sizes if entry[1]]
