"""Lets torchvision of the index be imported beside PyTorch's CPU build.

Its compiled part does not load there, and its import asks for two of its operators by name. No classifier runs them.
Libraries import torchvision where they find it (transformers, timm), so this comes before all of them. Where the
compiled part loads, it is loaded: it ends a process in which somebody else has declared its operators.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, Final

import torch

_NAMES: Final = ("nms", "qnms")
_KEPT: Final[list[Any]] = []  # An operator goes with the library that defined it.


def define() -> None:
    """Declare the operators where torchvision is installed and its compiled part does not load."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None or _loads(Path(spec.origin).parent):
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    _KEPT.append(library)
    for name in _NAMES:
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _loads(package: Path) -> bool:
    """Load the package's compiled part, if that is possible here."""
    for compiled in package.glob("_C*.so"):
        try:
            torch.ops.load_library(str(compiled))
        except OSError:  # It asks for CUDA's libraries.
            return False
        return True
    return False
