"""What is noted of a forward pass while it runs operators that the plan does not have where they come.

Models branch in small ways on the values in a batch. Where the step is seen to go on as planned, what was noted is made
up for: calls become recipes, and what autograd saved meanwhile is let go of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from remat.torch import _private
from remat.torch.emit.backward_reads import MadeAgain
from remat.torch.emit.recipes import ActivationTable, Recipe, kept, read_kept, tensors_in
from remat.torch.trace import op_facts
from remat.torch.trace.draws import Draw


class UnplannedCall:
    """A call that the plan does not have where it came, with what it takes to make a recipe of it later.

    Attributes:
        func: the operator.
        shapes: of the tensors that it made.
        saved: what autograd had saved since the call before.
    """

    def __init__(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        made: list[torch.Tensor],
        places: list[int],
        draw: Draw | None,
        saved: list[SavedOutOfStep],
    ) -> None:
        self.func = func
        self.shapes = [tuple(tensor.shape) for tensor in made]
        self.saved = saved
        self.made = made
        self._args, self._kwargs, self._places = args, kwargs, places
        self._draw = draw
        self._grad_mode = torch.is_grad_enabled()
        self.written = op_facts.written(func, args, kwargs) if _private.is_mutable(func) else []
        self._versions = self._versions_now()

    def recipe(self, number: int, table: ActivationTable, later: Sequence[UnplannedCall]) -> Recipe | None:
        """How to make the call again; None where what it read was written since, or its draw was not noted.

        Args:
            number: of the op in the plan.
            table: of what was made so far.
            later: the calls that came after it. The newest is about to count its writes.
        """
        bumps = [call for call in (self, *later)[:-1] if call.written]
        changing = {_private.storage_key(tensor.untyped_storage()) for tensor in (*self.made, *self.written)}
        for (tensor, version), (_, now) in zip(self._versions, self._versions_now(), strict=True):
            key = _private.storage_key(tensor.untyped_storage())
            expected = sum(call.writes_to(key) for call in bumps) if key in changing else 0
            if now != version + expected:
                return None
        if self._draw is None and op_facts.is_random(self.func, self._args, self._kwargs):
            return None
        recipe = table.call(number, self.func, self._args, self._kwargs, self._draw)
        if recipe is not None:
            recipe.grad_mode, recipe.outputs = self._grad_mode, self._places
        return recipe

    def writes_to(self, key: int) -> bool:
        """Does the call write to the storage with this key?"""
        return any(_private.storage_key(tensor.untyped_storage()) == key for tensor in self.written)

    def _versions_now(self) -> list[tuple[torch.Tensor, int]]:
        return [
            (tensor, tensor._version)
            for tensor in tensors_in((*self._args, *self._kwargs.values(), self.made))
            if tensor.layout is torch.strided
        ]


class SavedOutOfStep:
    """A tensor that autograd saved while it was not known where the plan goes on.

    Attributes:
        tensor: kept, as in plain PyTorch; None once ``packed`` stands for it.
        packed: what makes it again.
    """

    __slots__ = ("_version", "packed", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None
        self.tensor, self._version = kept(tensor)
        self.packed: MadeAgain | None = None

    def read(self) -> torch.Tensor:
        """The tensor; called when a backward node needs it."""
        if self.packed is not None:
            return self.packed.read()
        assert self.tensor is not None
        return read_kept((self.tensor, self._version))
