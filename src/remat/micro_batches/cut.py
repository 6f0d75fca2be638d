"""How a batch is cut into micro-batches: how many, how many samples each has, and where it starts.

The sizes are those of ``numpy.array_split`` in every front end: where the count does not divide the batch, the first
micro-batches have one sample more. A batch of fewer samples than the count is cut into single samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from remat.core.errors import UnsupportedStep

AUTO: Final = "auto"
"""In place of a number of micro-batches: the number that costs least within the budget. See ``choose``."""


@dataclass(frozen=True)
class EqualPieces:
    """Micro-batches of one size that follow each other in a batch.

    Attributes:
        size: samples of each.
        times: how many there are.
        first: the number of the first one's first sample.
    """

    size: int
    times: int
    first: int

    @property
    def starts(self) -> range:
        """The number of each micro-batch's first sample."""
        return range(self.first, self.first + self.times * self.size, self.size)


def cut(samples: int, count: int) -> tuple[EqualPieces, ...]:
    """The micro-batches of a batch: those of the larger size first, then those of the smaller, if there are two sizes.

    Args:
        samples: of the batch, 1 or more.
        count: of micro-batches, 1 or more; there are never more than samples.
    """
    pieces = min(count, samples)
    small, larger = divmod(samples, pieces)
    found = EqualPieces(small + 1, larger, 0), EqualPieces(small, pieces - larger, larger * (small + 1))
    return tuple(group for group in found if group.times)


def largest_size(samples: int, count: int) -> int:
    """Samples of the largest micro-batch."""
    return cut(samples, count)[0].size


def check_count(micro_batches: object) -> int:
    """The number of micro-batches that a user gave.

    Raises:
        ValueError: unless it is a whole number of at least 1.
    """
    if isinstance(micro_batches, bool) or not isinstance(micro_batches, int) or micro_batches < 1:
        raise ValueError(f"micro_batches must be a whole number of at least 1, not {micro_batches!r}")
    return micro_batches


def check_count_or_auto(micro_batches: object, budget: object) -> int | None:
    """The number of micro-batches that a user gave, where "auto" is one, too; None for "auto".

    Raises:
        ValueError: for "auto" without a budget, or what is neither "auto" nor a whole number of at least 1.
    """
    if micro_batches != AUTO:
        return check_count(micro_batches)
    if budget is None:
        raise ValueError("micro_batches='auto' chooses what a budget costs least with; give one, for example \"4GiB\"")
    return None


def batch_places(
    batch_argnums: int | Sequence[int] | None, arguments: int, otherwise: Sequence[int]
) -> tuple[int, ...]:
    """Positions of the arguments that hold the batch, in rising order.

    Args:
        batch_argnums: as the user gave them; negative ones count from the end.
        arguments: how many positional arguments there are.
        otherwise: the positions where the user gave None.

    Raises:
        UnsupportedStep: for a position that no argument has.
    """
    if batch_argnums is None:
        return tuple(otherwise)
    places = (batch_argnums,) if isinstance(batch_argnums, int) else tuple(batch_argnums)
    for place in places:
        if not -arguments <= place < arguments:
            raise UnsupportedStep(
                f"batch_argnums={batch_argnums!r} names argument {place}, and the function got {arguments} positional "
                "arguments; what holds the batch must be passed by position"
            )
    return tuple(sorted({place % arguments for place in places}))


def names_of_tensors(name: str, count: int) -> list[str]:
    """What each tensor of an argument is called in an error: "argument 1", or "argument 1 (its tensor 0)" and so on."""
    return [name] if count == 1 else [f"{name} (its tensor {number})" for number in range(count)]


def count_samples(shapes: Sequence[Sequence[int | None] | None], names: Sequence[str]) -> int | None:
    """The samples of a batch that is to be cut, 1 or more; None where the first axis of some tensor is not known yet.

    Args:
        shapes: of the batch's tensors. None stands for a tensor without a shape, or for one of its axes.
        names: what each tensor is called in an error.

    Raises:
        UnsupportedStep: where there is no tensor, one has no axis to cut, they do not agree, or there is no sample.
    """
    if not names:
        raise UnsupportedStep(
            "there is no tensor to split into micro-batches; say with batch_argnums= which arguments hold the batch"
        )
    known: list[tuple[int, str]] = []
    for shape, name in zip(shapes, names, strict=True):
        if not shape:
            described = "no known shape" if shape is None else "the shape ()"
            raise UnsupportedStep(
                f"{name} has {described}, so it cannot be split into micro-batches; give it a first dimension of the "
                "batch's size, or leave it out of what is batched (batch_argnums=)"
            )
        if shape[0] is not None:
            known.append((shape[0], name))
    for samples, name in known[1:]:
        if samples != known[0][0]:
            raise UnsupportedStep(
                f"{known[0][1]} has {known[0][0]} samples and {name} has {samples}; everything that is split into "
                "micro-batches must have the same number. Say with batch_argnums= which arguments hold the batch"
            )
    if known and known[0][0] == 0:
        raise UnsupportedStep("the batch has no samples")
    return known[0][0] if len(known) == len(names) else None
