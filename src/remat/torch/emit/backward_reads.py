"""What the backward pass of a step under a plan reads, and when the plan makes it again and lets it go."""

from __future__ import annotations

import torch

from remat.torch import _private
from remat.torch.emit.eager_order import Directions, Rerun
from remat.torch.emit.recipes import Activation, Recipe, check_version, values_of


class StepState:
    """What one forward pass leaves behind for its backward pass, and which of the planned reads are still to come.

    Attributes:
        activations: by the number of their storage.
        recipes: by the number of the recorded op.
    """

    def __init__(self, directions: Directions) -> None:
        self._directions = directions
        self._pending = dict(directions.pending)
        self._read: set[int] = set()
        self._begun: set[int] = set()
        self.activations: dict[int, Activation] = {}
        self.recipes: dict[int, Recipe] = {}

    def __del__(self) -> None:
        for recipe in self.recipes.values():
            recipe.take_apart()

    def value_for(self, saved: int, activation: Activation) -> torch.Tensor:
        """The value that a saved tensor's storage has, once everything has run that the plan recomputes here.

        Args:
            saved: the number of the saved tensor that a backward node reads.
            activation: its storage.
        """
        self._read.add(saved)
        op = self._directions.begins.get(saved)
        if op is not None and op not in self._begun:
            self._begun.add(op)
            with _private.BelowAutograd():
                for rerun in self._directions.reruns[op]:
                    self._rerun(rerun)
        return activation.value if activation.value is not None else values_of([activation])[id(activation)]

    def released(self, saved: int) -> None:
        """Autograd let go of a saved tensor. If it was never read, its read may still come from another tensor."""
        if saved in self._read:
            self._release(self._directions.instance[saved])

    def _rerun(self, rerun: Rerun) -> None:
        recipe = self.recipes.get(rerun.op)
        if recipe is None:
            return  # The forward pass ended or departed before it.
        missing = recipe.missing()
        made = recipe.run(values_of(missing) if missing else {})
        for activation, tensor in zip(recipe.activations, made, strict=True):
            instance = rerun.keeps.get(activation.number)
            if instance is not None and not activation.is_settled and self._pending[activation.number, instance] > 0:
                activation.value, activation.instance = tensor, instance
        del made
        if not _private.keeps_graph():
            for used in rerun.uses:
                self._release(used)

    def _release(self, instance: tuple[int, int]) -> None:
        pending = self._pending
        pending[instance] -= 1
        number = instance[0]
        activation = self.activations.get(number)
        if activation is None or activation.is_settled or activation.value is None:
            return
        # Reads of earlier instances that are still to come read this one.
        for earlier in range(activation.instance, -1, -1):
            if pending.get((number, earlier), 0) > 0:
                return
        activation.value = None


class MadeAgain:
    """What stands in autograd's graph for a tensor that the plan makes again."""

    __slots__ = ("_activation", "_place", "_saved", "_state", "_version")

    def __init__(self, state: StepState, saved: int, activation: Activation, tensor: torch.Tensor) -> None:
        self._state = state
        self._saved = saved
        self._activation = activation
        activation.count_with(tensor)
        self._place = activation.place_of(tensor)
        self._version = activation.version_of(tensor)

    def read(self) -> torch.Tensor:
        """The tensor; called when a backward activation needs it."""
        activation = self._activation
        value = self._state.value_for(self._saved, activation)
        if (activation.instance == 0 or activation.is_settled) and value is activation.value:
            check_version(value, self._version, self._place[0])
        return activation.part(value, self._place)

    def __del__(self) -> None:
        self._state.released(self._saved)
