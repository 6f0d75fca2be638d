"""What Keras before 3.14 does otherwise, for tests of both (docs/versions.md)."""

from __future__ import annotations

from importlib.metadata import version
from typing import Final

IS_BEFORE_3_14: Final = tuple(map(int, version("keras").split(".")[:2])) < (3, 14)

ACTIVITY_REGULARIZER: Final = None if IS_BEFORE_3_14 else "l2"
"""For models that train in micro-batches: earlier Keras sums it over the samples of a batch, and remat refuses that."""

FOLLOWED: Final = "eager" if IS_BEFORE_3_14 else "graph"
"""How the PyTorch backend runs steps that Dynamo is asked to follow: it stops at what earlier Keras does with NumPy."""
