"""Axes that a tensor's first axes make together.

Logits of shape (samples, tokens, words) can be cut between any two tokens. So beside a tensor's own axes its first two,
its first three, and so on, count as one axis each, a *merged* one. Their numbers follow those of the tensor's own. A
slice along a merged axis has one axis in the place of those, and so has what is made of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

Shape: TypeAlias = tuple[int, ...]


def with_merged(shape: Shape) -> Shape:
    """The lengths of a tensor's own axes, then those of its first two taken together, of its first three, and so on."""
    return (*shape, *(math.prod(shape[:count]) for count in range(2, len(shape) + 1)))


def merged(shape: Shape, count: int) -> int:
    """The number of the axis that the first ``count`` axes make."""
    return 0 if count == 1 else len(shape) + count - 2


def count_merged(shape: Sequence[int], axis: int) -> int:
    """How many of the first axes a merged axis stands for; 1 for one of the tensor's own."""
    return axis - len(shape) + 2 if axis >= len(shape) else 1


def merged_shape(shape: Sequence[int], count: int) -> Shape:
    """The shape with its first axes as one."""
    return (math.prod(shape[:count]), *shape[count:])


def reshaped_ways(before: Shape, after: Shape) -> list[tuple[int, int]]:
    """Pairs of axes, merged ones among them, of the first axes of a tensor before and after its shape changes."""
    return [
        (merged(before, count), merged(after, other))
        for count in range(1, len(before) + 1)
        for other in range(1, len(after) + 1)
        if math.prod(before[:count]) == math.prod(after[:other]) > 1
    ]
