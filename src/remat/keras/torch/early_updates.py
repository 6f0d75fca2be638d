"""Keras on PyTorch: the optimizer's update of a variable inside of the backward pass, as soon as its gradient is there.

Each such update is a call of ``apply`` for one variable. ``apply`` counts an iteration, which is taken back, so that
all updates of a step have the learning rate and the bias correction of that step. ``finish`` counts it in the end.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Final

import keras
import numpy as np
import torch

from remat.core.errors import UnsupportedStep
from remat.keras import _private
from remat.torch import _private as torch_private
from remat.torch.early_updates import worth_moving
from remat.torch.emit.first_step import StorageMeter
from remat.torch.graph_mode.taken_gradients import TakenGradient, UsedGradient, places_alone

_EACH_BY_ITSELF: Final = ("Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "Lion", "RMSprop", "SGD")
"""Keras' optimizers whose update of a variable reads nothing of the others, and counts nothing but iterations."""

_SAMPLE: Final = 1 << 16
"""Elements of the variable with which an update is measured: small beside any step, large beside a few scalars."""


class KerasUpdates:
    """The updates of a Keras optimizer that captured steps run themselves.

    Args:
        optimizer: built.

    Raises:
        UnsupportedStep: for an optimizer of which it is not known that it updates each variable by itself.
    """

    has_state = True  # It is built.

    def __init__(self, optimizer: keras.optimizers.Optimizer) -> None:
        name = type(optimizer).__name__
        # A loss scale looks at all gradients, whatever the optimizer inside of it does.
        self._scales_loss = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        if not self._scales_loss and not (
            name in _EACH_BY_ITSELF and type(optimizer).__module__.startswith("keras.src.")
        ):
            raise UnsupportedStep(
                f"of {name} it is not known that it updates each variable by itself, as the lever 'update' does on "
                f"PyTorch; leave 'update' out of levers=, or use one of {', '.join(_EACH_BY_ITSELF)}"
            )
        self._optimizer = weakref.ref(optimizer)
        self._updated: set[int] = set()
        self._scratch_per_byte = 0.0 if self.bound_by else _scratch_per_byte(optimizer)

    @property
    def bound_by(self) -> str:
        """What needs all gradients together, so that no update can run early; "" where nothing does."""
        optimizer = self._of()
        if self._scales_loss:
            return "the loss scale, which looks for infinities in all gradients"
        for option in ("global_clipnorm", "use_ema", "gradient_accumulation_steps"):
            if getattr(optimizer, option, None):
                return f"{option} of the optimizer"
        return ""

    def scratch_bytes_together(self, updates: Sequence[UsedGradient]) -> int:
        """What these updates need beside variables, gradients and state where all of them run at once."""
        return sum(update.scratch_bytes for update in updates)

    def scratch_bytes_of(self, parameter: torch.Tensor) -> int:
        """What the update of one variable makes and lets go of."""
        return int(self._scratch_per_byte * parameter.numel() * parameter.element_size())

    def takers_for(self, inputs: Sequence[Any]) -> dict[int, TakenGradient]:
        """Which inputs of a captured graph are variables that the step updates itself, by their places."""
        if self.bound_by:
            return {}
        optimizer = self._of()
        variables = {id(one.value): one for one in _private.updated_alike(optimizer) if one.value.requires_grad}
        places = places_alone(inputs, worth_moving(one.value for one in variables.values()))
        return {place: _VariableUpdate(self, inputs[place], variables[id(inputs[place])]) for place in places}

    def update(self, variable: Any, gradient: torch.Tensor) -> None:
        """Update one variable."""
        optimizer = self._of()
        with torch.no_grad():
            optimizer.apply([gradient], [variable])
            optimizer.iterations.assign_sub(1)
        self._updated.add(id(variable))

    def finish(self, variables: Sequence[Any]) -> None:
        """After the backward pass: update the variables that were not yet, and count the iteration.

        Args:
            variables: all that the step trains.
        """
        optimizer, updated = self._of(), self._updated
        self._updated = set()
        rest = [one for one in variables if id(one) not in updated]
        gradients = [one.value.grad for one in rest]
        with torch.no_grad():
            if updated and all(gradient is None for gradient in gradients):
                optimizer.iterations.assign_add(1)  # ``apply`` refuses to be called for no gradient at all.
            else:
                optimizer.apply(gradients, rest)

    def _of(self) -> Any:
        optimizer = self._optimizer()
        assert optimizer is not None, "whoever trains a model holds its optimizer"
        return optimizer


class _VariableUpdate(UsedGradient):
    """The update of one variable.

    Args:
        updates: of its optimizer.
        parameter: its value when the step is captured.
        variable: the variable, which the optimizer holds.
    """

    def __init__(self, updates: KerasUpdates, parameter: torch.Tensor, variable: Any) -> None:
        super().__init__(parameter)
        self._updates = updates
        self._variable = weakref.ref(variable)

    @property
    def scratch_bytes(self) -> int:
        """What the update needs beside the variable, its gradient and the optimizer's state."""
        return self._updates.scratch_bytes_of(self.parameter)

    def _take(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        variable = self._variable()
        assert variable is not None, "whoever trains a variable holds it"
        if parameter.grad is not None or torch_private.has_gradient_hooks(parameter):
            super()._take(parameter, gradient)
            gradient, parameter.grad = parameter.grad, None  # type: ignore[assignment]
        self._updates.update(variable, gradient)


def _scratch_per_byte(optimizer: Any) -> float:
    """Bytes that an update makes and lets go of, for each byte of a variable; measured with a small one."""
    # A schedule gives one number, and a schedule of the user's may not come out of a configuration.
    copy = type(optimizer).from_config({**optimizer.get_config(), "learning_rate": 1e-3})
    variable = keras.Variable(np.zeros(_SAMPLE), dtype="float32")
    copy.build([variable])
    gradient = torch.zeros_like(variable.value)
    with torch.no_grad(), StorageMeter() as meter:
        copy.apply([gradient], [variable])
    meter.stop()
    scratch_per_byte: float = meter.peak_bytes / gradient.nbytes
    return scratch_per_byte
