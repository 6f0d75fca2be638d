"""The optimizer's update on fake tensors: its state and its temporary memory count, and nothing of it changes."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from typing import TYPE_CHECKING, Any

import torch

from remat.torch import _private

if TYPE_CHECKING:
    from remat.torch.trace.recorder import StepRecorder


def record_update(recorder: StepRecorder, optimizer: torch.optim.Optimizer) -> None:
    """Record ``optimizer.step()`` after the gradients of the step.

    State that the optimizer makes at its first step counts as resident: it is there from the second step on.
    """
    fakes: dict[int, torch.Tensor] = {}
    with recorder.paused():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                fakes[id(parameter)] = torch.nn.Parameter(recorder.stand_in(parameter), parameter.requires_grad)
        clone = _clone(optimizer, fakes, recorder)
        for parameter in _parameters(clone):
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        if not clone.state:
            type(clone).step(clone)
    recorder.begin_update(fakes)
    state = [t for t in _private.tree_leaves(list(clone.state.values())) if isinstance(t, torch.Tensor)]
    recorder.pin(state, "optimizer_state")
    type(clone).step(clone)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _clone(optimizer: torch.optim.Optimizer, fakes: dict[int, torch.Tensor], recorder: StepRecorder) -> Any:
    """An optimizer of the same kind over fake parameters, without the hooks of schedulers and scalers."""

    def stand_in(tensor: torch.Tensor) -> torch.Tensor:
        # Optimizers read their step counts as numbers, which a fake tensor has only if it was made from one.
        return recorder.stand_in(tensor) if tensor.dim() else torch.tensor(1.0, dtype=tensor.dtype)

    clone: Any = copy.copy(optimizer)
    clone.__dict__.pop("step", None)
    clone._optimizer_step_pre_hooks = OrderedDict()
    clone._optimizer_step_post_hooks = OrderedDict()
    clone.param_groups = [
        {**group, "params": [fakes[id(parameter)] for parameter in group["params"]]} for group in optimizer.param_groups
    ]
    clone.state = defaultdict(dict)
    for parameter, state in optimizer.state.items():
        known = fakes.get(id(parameter), parameter)
        clone.state[known] = _private.tree_map_only(torch.Tensor, stand_in, dict(state))
    return clone
