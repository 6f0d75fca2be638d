"""Gradients that leave a captured step while its backward pass goes on.

All that autograd knows of a captured step is one node, whose gradients arrive together at its end. So the step is given
a stand-in for a parameter whose gradient somebody waits for, and the backward pass itself hands the gradient over.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, Protocol

import torch

from remat.core.errors import UnsupportedStep
from remat.torch import _backward_pass, _private
from remat.torch.early_updates import check_optimizer, hook_before_step, update_of, updater_of, worth_moving
from remat.torch.emit.first_step import StorageMeter


class TakenGradient:
    """The gradient of one parameter, which is added to ``grad`` while the backward pass goes on.

    The parameter's own hooks run then: a reducer sends a bucket while later gradients are computed. The step still
    holds the gradient meanwhile, so that it is copied.

    Attributes:
        is_left_out: does the gradient arrive at the end of the step after all?
    """

    def __init__(self) -> None:
        self._parameter: weakref.ref[torch.Tensor] | None = None
        self.is_left_out = False
        self.__name__ = "take_gradient"
        self.__module__ = __name__
        self.__qualname__ = self.__name__

    def stand_in(self, parameter: torch.Tensor) -> torch.Tensor:
        """What the captured graph is given in place of the parameter: the same values."""
        if self.is_left_out:
            return parameter
        self._parameter = weakref.ref(parameter)
        found = parameter.detach().requires_grad_()
        setattr(found, _private.STANDS_FOR, parameter)
        return found

    def __call__(self, gradient: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
        """Add the gradient, or its parts, to the parameter's, and run its hooks.

        Where the backward passes of several calls run at once, the gradients of all are added up first, as autograd
        does: hooks run once.
        """
        parameter = None if self._parameter is None else self._parameter()
        if parameter is None:
            return
        parts = gradient if isinstance(gradient, tuple) else (gradient,)
        key, running = _backward_pass.stand_in_key(parameter), _backward_pass.backward_pass()
        if running is not None and running.edges[id(parameter)]:
            self._meets_others(parameter)
        if running is None or not self.waits:
            self._take(parameter, functools.reduce(torch.add, parts))
            return
        total, calls = running.sums.get(key, (None, 0))
        for part in parts:
            total = part.clone() if total is None else total.add_(part)
        if calls + 1 < running.edges[key]:
            running.sums[key] = total, calls + 1
        else:
            running.sums.pop(key, None)
            self._take(parameter, total)

    def _meets_others(self, parameter: torch.Tensor) -> None:
        """Code outside of the captured function adds to the gradient as well.

        Raises:
            UnsupportedStep: since hooks would run for each of the two.
        """
        raise UnsupportedStep(
            f"a parameter of shape {tuple(parameter.shape)} under DistributedDataParallel gets gradients from the "
            "captured function and from code outside of it, which the reducer would take for two steps. Move that code "
            'into the function, or use limit_memory with mode="eager"'
        )

    @property
    def waits(self) -> bool:
        """Inside a backward pass: does it run those of several calls, whose gradients are added up first?"""
        parameter = None if self._parameter is None else self._parameter()
        running = _backward_pass.backward_pass()
        if parameter is None or running is None:
            return False
        return running.edges[_backward_pass.stand_in_key(parameter)] > 1

    def _take(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        torch.autograd.backward((parameter,), (gradient,))


class UsedGradient(TakenGradient):
    """The gradient of one parameter that its update uses at once, and then nobody needs any more.

    Args:
        parameter: as it is when the step is captured.
    """

    def __init__(self, parameter: torch.Tensor) -> None:
        super().__init__()
        self._parameter = weakref.ref(parameter)
        self.__name__ = self.__qualname__ = "update"

    def _meets_others(self, parameter: torch.Tensor) -> None:
        """The optimizer's step does what is left."""

    @property
    def scratch_bytes(self) -> int:
        """What the update needs beside the parameter, its gradient and the optimizer's state."""
        raise NotImplementedError

    @property
    def parameter(self) -> torch.Tensor:
        """The parameter, which whoever captures a step holds."""
        parameter = None if self._parameter is None else self._parameter()
        assert parameter is not None, "the parameter of an update is gone"
        return parameter


class Updates(Protocol):
    """The updates that captured steps run as soon as a gradient is final, whoever's optimizer it is."""

    @property
    def bound_by(self) -> str:
        """What needs all gradients together, so that no update can run early; "" where nothing does."""

    @property
    def has_state(self) -> bool:
        """Has the optimizer made its state? Else its first update makes it, inside of the first step."""

    def scratch_bytes_together(self, updates: Sequence[UsedGradient]) -> int:
        """What these updates need beside the parameters where all of them run at the end of the step."""

    def takers_for(self, inputs: Sequence[Any]) -> dict[int, TakenGradient]:
        """Which inputs of a captured graph are parameters that the step updates itself, by their places."""


class OptimizerUpdate(UsedGradient):
    """The update of one parameter by an optimizer of ``torch.optim``.

    Args:
        optimizer: of the parameter.
        parameter: as it is when the step is captured.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
        super().__init__(parameter)
        self._optimizer = weakref.ref(optimizer)

    @cached_property
    def scratch_bytes(self) -> int:
        """What the update needs beside the parameter, its gradient and the optimizer's state."""
        optimizer, parameter = self._optimizer(), self.parameter
        assert optimizer is not None, "whoever captures a step holds the optimizer"
        copied_bytes = parameter.numel() * parameter.element_size() if _private.has_gradient_hooks(parameter) else 0
        return scratch_bytes(optimizer, [parameter]) + copied_bytes

    def _take(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        optimizer = self._optimizer()
        if optimizer is None or parameter.grad is not None or _private.has_gradient_hooks(parameter):
            super()._take(parameter, gradient)
        else:
            parameter.grad = gradient  # Without a copy: the step reads it no more.
        if optimizer is not None:
            updater_of(optimizer).update(parameter)


class EarlyUpdates:
    """The updates of one optimizer that captured steps run as soon as a gradient is final.

    Args:
        optimizer: of the parameters.
        accumulates: do gradients of earlier micro-batches exist?

    Raises:
        UnsupportedStep: for an optimizer that does not update each parameter by itself, and in several processes.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, accumulates: bool) -> None:
        check_optimizer(optimizer)
        self._optimizer = optimizer
        self._accumulates = accumulates

    @property
    def bound_by(self) -> str:
        """What needs all gradients together, so that no update can run early; "" where nothing does."""
        return "the gradients of earlier micro-batches" if self._accumulates else hook_before_step(self._optimizer)

    @property
    def has_state(self) -> bool:
        """Has the optimizer made its state? Its first update makes it, inside of the first step."""
        return bool(self._optimizer.state)

    def scratch_bytes_together(self, updates: Sequence[UsedGradient]) -> int:
        """What these updates need beside the parameters where ``optimizer.step()`` runs them."""
        return scratch_bytes(self._optimizer, [one.parameter for one in updates])

    def takers_for(self, inputs: Sequence[Any]) -> dict[int, TakenGradient]:
        """Which inputs of a captured graph the optimizer updates, by their places.

        Small ones, and those that share their memory with another input, are left to ``optimizer.step()``.
        """
        if self.bound_by:
            return {}
        mine = [one for group in self._optimizer.param_groups for one in group["params"] if one.requires_grad]
        places = places_alone(inputs, worth_moving(mine))
        return {place: OptimizerUpdate(self._optimizer, inputs[place]) for place in places}


def scratch_bytes(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> int:
    """Bytes that an update of some parameters together makes and lets go of.

    Args:
        optimizer: of the parameters; nothing is changed.
        parameters: what is updated.
    """
    if not parameters or optimizer.defaults.get("fused"):
        return 0  # One kernel, which writes in place. The meta device has none.
    peak_bytes = 0
    with _private.no_modes():
        # On the meta device, with state of its own: nothing is allocated.
        likes = {one: torch.nn.Parameter(torch.empty_like(one, device="meta")) for one in parameters}
        update = update_of(optimizer, likes, defaultdict(dict))
        for _ in range(2):  # The first makes the state.
            for like in likes.values():
                like.grad = torch.empty_like(like)
            with StorageMeter() as meter:
                update()
            meter.stop()
            peak_bytes = meter.peak_bytes
    return peak_bytes


def places_alone(inputs: Sequence[Any], parameters: Iterable[torch.Tensor]) -> list[int]:
    """Where the inputs of a captured graph are these parameters, but for those that share their memory."""
    mine = set(map(id, parameters))
    keys = Counter(_private.storage_key(one.untyped_storage()) for one in inputs if _has_storage(one))
    return [
        place
        for place, one in enumerate(inputs)
        if id(one) in mine and _has_storage(one) and keys[_private.storage_key(one.untyped_storage())] == 1
    ]


def _has_storage(one: Any) -> bool:
    return isinstance(one, torch.Tensor) and one.layout is torch.strided
