"""Lets torchvision of the index be imported beside PyTorch's CPU build.

Its compiled part does not load there, and its import asks for two of its operators by name. No classifier runs them.
Libraries import torchvision where they find it (transformers, timm), so this comes before all of them.
"""

from __future__ import annotations

import importlib.util
from typing import Any, Final

import torch

_NAMES: Final = ("nms", "qnms")
_KEPT: Final[list[Any]] = []  # An operator goes with the library that defined it.


def define() -> None:
    """Declare the operators where torchvision is installed and nobody has."""
    if importlib.util.find_spec("torchvision") is None:
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    _KEPT.append(library)
    for name in _NAMES:
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
