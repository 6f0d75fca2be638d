"""The operations of PyTorch that a calibration times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class TimedOps:
    """See ``remat.running.calibration.TimedOps``."""

    def dtypes(self) -> Sequence[str]:
        """Half precision where the device computes in it."""
        return ("float32", "float16", "bfloat16") if self.on_gpu() else ("float32",)

    def on_gpu(self) -> bool:
        """Is CUDA there?"""
        return _DEVICE == "cuda"

    def product(self, edge: int, dtype: str) -> Callable[[], Any]:
        """A product of two square matrices."""
        a, b = (torch.randn(edge, edge, device=_DEVICE).to(getattr(torch, dtype)) for _ in range(2))
        return lambda: torch.mm(a, b)

    def addition(self, elements: int) -> Callable[[], Any]:
        """A sum of two vectors."""
        a, b = torch.randn(elements, device=_DEVICE), torch.randn(elements, device=_DEVICE)
        return lambda: torch.add(a, b)

    def chain(self, edge: int, length: int) -> Callable[[], Any]:
        """Products one after the other, launched from Python as an eager step launches them."""
        a, b = torch.zeros(edge, edge, device=_DEVICE), torch.randn(edge, edge, device=_DEVICE)

        def products() -> torch.Tensor:
            result = a
            for _ in range(length):
                result = torch.mm(result, b)
            return result

        return products

    def wait(self, result: Any) -> None:
        """Until the device is done."""
        if _DEVICE == "cuda":
            torch.cuda.synchronize()
