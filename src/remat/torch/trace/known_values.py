"""Values of small whole numbers during a trace, for code that reads them: seeds, "is anything masked?"."""

from __future__ import annotations

from typing import Any, Final

import torch

from remat.torch import _private

_MOST_ELEMENTS: Final = 4096


class KnownValues:
    """For fake tensors of whole numbers or truth values whose every input is known, the real ones beside them."""

    def __init__(self) -> None:
        self._values = _private.by_tensor()

    def pin(self, fake: torch.Tensor, real: torch.Tensor) -> None:
        """Remember the value of a tensor from before the step. It is copied: the step may write to it."""
        if real.device.type == "cpu" and _is_small(real):
            with _private.no_modes():
                self._values[fake] = real.detach().clone()

    def item(self, fake: torch.Tensor) -> Any:
        """The number that a tensor of one element holds; None where it is not known."""
        value = self._values.get(fake)
        with _private.no_modes():
            return None if value is None else value.item()

    def follow(self, func: Any, args: Any, kwargs: Any, inputs: list[torch.Tensor], out: Any) -> None:
        """After an operator on fake tensors: do the same on the real ones, if all of them are known."""
        outputs = [t for t in _private.tree_leaves(out) if isinstance(t, torch.Tensor)]
        known = bool(inputs) and all(t in self._values for t in inputs)
        if not known or not outputs or not all(_is_small(t) for t in outputs):
            for tensor in outputs:
                # Written in place by something that is not known.
                self._values.pop(tensor, None)
            return
        args, kwargs = _private.tree_map_only(torch.Tensor, self._values.__getitem__, (args, kwargs))
        with _private.no_modes(), torch.no_grad():
            results = [t for t in _private.tree_leaves(func(*args, **kwargs)) if isinstance(t, torch.Tensor)]
        self._values.update(zip(outputs, results, strict=True))


def _is_small(tensor: torch.Tensor) -> bool:
    kind = tensor.dtype
    return tensor.numel() <= _MOST_ELEMENTS and not (kind.is_floating_point or kind.is_complex)
