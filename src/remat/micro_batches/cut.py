"""How many samples a batch holds: the first axis of every array in the arguments that hold it."""

from __future__ import annotations

from collections.abc import Sequence

from remat.core.errors import UnsupportedStep


def count_samples(shapes: Sequence[Sequence[tuple[int, ...]]], batch_argnums: Sequence[int]) -> int:
    """The samples in a batch that is to be split, 1 or more.

    Args:
        shapes: of the arrays in each positional argument.
        batch_argnums: positions of the arguments that hold the batch.

    Raises:
        ValueError: for a position that has no argument, or a batch without arrays or samples.
        UnsupportedStep: for an array without axes, or where the arrays do not agree.
    """
    sizes: dict[int, str] = {}
    for place in batch_argnums:
        if not 0 <= place < len(shapes):
            raise ValueError(f"batch_argnums names argument {place}, but {len(shapes)} positional arguments were given")
        for shape in shapes[place]:
            if not shape:
                raise UnsupportedStep(
                    f"argument {place} holds a value without a batch axis to split; name the arguments that hold "
                    "the batch with batch_argnums="
                )
            sizes.setdefault(shape[0], f"argument {place} of shape {shape}")
    if not sizes:
        raise ValueError("micro_batches needs an argument that holds the batch; name it with batch_argnums=")
    if len(sizes) > 1:
        raise UnsupportedStep(
            f"the batch has several sizes: {' and '.join(list(sizes.values())[:2])}; their first axes must agree. Name "
            "the arguments that hold the batch with batch_argnums="
        )
    (samples,) = sizes
    if samples == 0:
        raise ValueError("the batch has no samples")
    return samples
