"""Updates of parameters inside of the backward pass: each as soon as its gradient is there, which is then let go.

The user's loop stays as it is. ``optimizer.step()`` finds no gradient of what has been updated, and does nothing for
it; its hooks and the schedulers see one step. What is left in ``grad`` meanwhile holds no numbers and takes no memory.
Who reads it (clipping, a gradient scaler, a second backward pass that adds to it) gets an error that says why.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final

import torch

from remat.core.errors import UnsupportedStep
from remat.torch import _private

_TOGETHER: Final = ("LBFGS",)
"""Optimizers of ``torch.optim`` that make an update from all gradients together."""

_SMALL_SHARE: Final = 0.01
"""Of all gradients' bytes: what the smallest parameters may hold together to be left to ``optimizer.step()``. They are
most of the parameters of many models, and each update by itself takes as long on the host, whatever its size."""


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that does not update each parameter by itself.

    Raises:
        UnsupportedStep: for such an optimizer, for one with a ``step`` of its own, of which that cannot be known, and
            in training by several processes.
    """
    name = type(optimizer).__name__
    maker = next(kind for kind in type(optimizer).__mro__ if "step" in vars(kind))
    if not maker.__module__.startswith("torch.optim") or maker.__name__ in _TOGETHER:
        why = "makes its update from all gradients together" if maker.__name__ in _TOGETHER else "has its own step()"
        raise UnsupportedStep(
            f"{name} {why}, and the lever 'update' runs the update of each parameter by itself, as the other "
            "optimizers of torch.optim do; leave 'update' out of levers="
        )
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise UnsupportedStep(
            "several processes average their gradients when the backward pass is over, and the lever 'update' uses "
            "each as soon as it is there; leave 'update' out of levers="
        )


def hook_before_step(optimizer: torch.optim.Optimizer) -> str:
    """The name of a hook that sees all gradients before an update, clipping say; "" where there is none."""
    for hook in _private.step_pre_hooks(optimizer):
        if not isinstance(getattr(hook, "__self__", None), EarlyUpdater):
            return str(getattr(hook, "__qualname__", type(hook).__name__))
    return ""


def worth_moving(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The parameters whose updates save memory inside of the backward pass: all but small ones, in their order."""
    parameters = list(parameters)
    sizes = [one.numel() * one.element_size() for one in parameters]
    left_bytes, small = _SMALL_SHARE * sum(sizes), set()
    for place in sorted(range(len(sizes)), key=sizes.__getitem__):
        left_bytes -= sizes[place]
        if left_bytes < 0:
            break
        small.add(place)
    return [one for place, one in enumerate(parameters) if place not in small]


def update_alone(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
    """Run the optimizer's update of one parameter, as its ``step`` does it, without any hooks.

    Args:
        optimizer: one that ``check_optimizer`` lets through.
        parameter: one of its parameters, with a gradient.
    """
    update_of(optimizer, {parameter: parameter})()


def update_of(
    optimizer: torch.optim.Optimizer, targets: Mapping[torch.Tensor, torch.Tensor], state: Any = None
) -> Callable[[], Any]:
    """What runs the optimizer's update of some parameters, without any hooks.

    Args:
        optimizer: one that ``check_optimizer`` lets through.
        targets: what is updated as each of these parameters is: the parameter itself, say.
        state: a dictionary in place of the optimizer's own state.
    """
    # Another object with the same state: the optimizer's own groups may be read by another thread meanwhile.
    alone: Any = object.__new__(type(optimizer))
    alone.__dict__.update(optimizer.__dict__)
    groups = [
        {**group, "params": [targets[one] for one in group["params"] if one in targets]}
        for group in optimizer.param_groups
    ]
    alone.param_groups = [group for group in groups if group["params"]]
    if state is not None:
        alone.state = state
    return functools.partial(_private.step_without_hooks(type(optimizer)), alone)


class SpentGradient(torch.Tensor):
    """What stands in ``grad`` of a parameter that has been updated, up to the optimizer's step. It holds no numbers."""

    @staticmethod
    def __new__(cls, parameter: torch.Tensor) -> SpentGradient:
        """Of this parameter."""
        made: SpentGradient = _private.wrapper_like(cls, parameter)
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse whatever would read it, or add to it.

        Raises:
            UnsupportedStep: always.
        """
        raise UnsupportedStep(
            f"a gradient is asked for ({func}) that the lever 'update' has used and let go of: the parameter was "
            "updated inside of the backward pass. Clipping, gradient scalers and a second backward pass before "
            "optimizer.step() need all gradients: leave 'update' out of levers=, or clip in a hook of the optimizer "
            "(register_step_pre_hook) before planning, which the plan then sees"
        )


class EarlyUpdater:
    """Runs updates of one optimizer inside of backward passes, those for which it is armed.

    Args:
        optimizer: one that ``check_optimizer`` lets through.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._armed: frozenset[int] = frozenset()
        self._spent: list[torch.Tensor] = []
        self._hooked: dict[int, Any] = {}
        # Its name is that of this class, by which ``hook_before_step`` knows it.
        optimizer.register_step_pre_hook(self._before_step)

    def arm(self, parameters: Collection[torch.Tensor]) -> None:
        """Until the optimizer's next step, gradients of these parameters are used as soon as they are there."""
        for parameter in parameters:
            if id(parameter) not in self._hooked:
                self._hooked[id(parameter)] = parameter.register_post_accumulate_grad_hook(self._on_gradient)
        self._armed = frozenset(map(id, parameters))

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        optimizer = self._optimizer()
        if id(parameter) not in self._armed or optimizer is None:
            return
        self.update(parameter)

    def update(self, parameter: torch.Tensor) -> None:
        """Update a parameter whose gradient is there, and let go of the gradient."""
        optimizer = self._optimizer()
        assert optimizer is not None, "whoever asks for an update holds the optimizer"
        update_alone(optimizer, parameter)
        parameter.grad = SpentGradient(parameter)
        self._spent.append(parameter)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Leave nothing to do for what has been updated.

        Raises:
            UnsupportedStep: for a step that runs the backward pass itself.
        """
        if (len(args) > 1 and args[1] is not None) or kwargs.get("closure") is not None:
            raise UnsupportedStep(
                "optimizer.step(closure) runs the backward pass inside of the step, where the lever 'update' has "
                "nothing to move; call the closure's lines in front of step(), or leave 'update' out of levers="
            )
        self._armed = frozenset()
        for parameter in self._spent:
            if isinstance(parameter.grad, SpentGradient):
                parameter.grad = None
        self._spent.clear()


_updaters: Final[weakref.WeakKeyDictionary[torch.optim.Optimizer, EarlyUpdater]] = weakref.WeakKeyDictionary()


def updater_of(optimizer: torch.optim.Optimizer) -> EarlyUpdater:
    """The one that runs the updates of an optimizer, whatever plan they are in."""
    if optimizer not in _updaters:
        _updaters[optimizer] = EarlyUpdater(optimizer)
    return _updaters[optimizer]
