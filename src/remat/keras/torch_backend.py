"""Keras on PyTorch: the forward pass of Keras' own training step runs under a plan."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import keras
import torch

from remat.errors import InvalidBudget, UnsupportedStep
from remat.graph import Graph
from remat.plan import Plan
from remat.torch.emit import Applied, apply
from remat.torch.planning import StepPlan, plan

_GPU_MARGIN = 0.08


class TorchLimit:
    """A memory limit on one model: its ``train_step`` is replaced on the instance, and runs inside of ``apply``."""

    def __init__(
        self,
        model: keras.Model,
        budget: int | str,
        planner: str,
        time_limit_s: float | None,
        options: Mapping[str, Any],
    ) -> None:
        if type(model).train_step is not keras.Model.train_step or "train_step" in vars(model):
            raise UnsupportedStep(
                f"{model.name!r} has a train_step of its own, whose loss limit_memory cannot tell on PyTorch; put its "
                "forward pass into a function and use remat.torch.plan and remat.torch.apply inside of train_step"
            )
        self._model = weakref.ref(model)
        self._budget = budget
        self._options = {"planner": planner, "time_limit_s": time_limit_s, **options}
        self._applied: dict[Any, Applied] = {}
        self._main: StepPlan | None = None
        model.train_step = self._train_step
        model.train_function = None

    @property
    def plan(self) -> Plan | None:
        """The plan in force, None before the first training step."""
        return self._main

    @property
    def graph(self) -> Graph | None:
        """The step that the plan is for, None before the first training step."""
        return None if self._main is None else self._main.graph

    def detach(self) -> None:
        """Give the model its own training step back."""
        model = self._model()
        if model is not None:
            vars(model).pop("train_step", None)
            model.train_function = None

    def _train_step(self, data: Any) -> Any:
        model = self._model()
        assert model is not None, "a model whose train_step runs is alive"
        if model.jit_compile:
            raise UnsupportedStep(
                f"{model.name!r} was compiled with jit_compile=True, where torch.compile plans memory itself; compile "
                "it without that option, or do not limit its memory"
            )
        key = tuple(tuple(leaf.shape) for leaf in keras.tree.flatten(data) if hasattr(leaf, "shape"))
        if key not in self._applied:
            self._applied[key] = apply(self._plan_for(model, data))
        with self._applied[key]:
            return keras.Model.train_step(model, data)

    def _plan_for(self, model: keras.Model, data: Any) -> StepPlan:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)

        # A share means one of the largest batch seen: the first, as a rule.
        budget = self._budget if self._main is None else self._main.budget_bytes
        if budget == "auto":
            budget = _device_budget_bytes()
        state = []
        if model.optimizer is not None:
            if not model.optimizer.built:
                model.optimizer.build(model.trainable_variables)
            state = [variable.value for variable in model.optimizer.variables]
        found = plan(loss_of(model), x, y, sample_weight, budget=budget, resident=state, **self._options)
        if self._main is None or found.baseline_peak_bytes > self._main.baseline_peak_bytes:
            self._main = found
        return found


def loss_of(model: keras.Model) -> Callable[[Any, Any, Any], Any]:
    """What Keras' own training step differentiates, as a function of x, y and sample weights."""

    def loss_fn(x: Any, y: Any, sample_weight: Any) -> Any:
        predicted = model(x, training=True) if model._call_has_training_arg else model(x)
        loss = model._compute_loss(x=x, y=y, y_pred=predicted, sample_weight=sample_weight, training=True)
        return loss if model.optimizer is None else model.optimizer.scale_loss(loss)

    return loss_fn


def _device_budget_bytes() -> int:
    """The memory of the GPU less a margin for the context, libraries' workspaces and fragmentation."""
    if not torch.cuda.is_available():
        raise InvalidBudget(
            "budget 'auto' means a GPU's memory less a margin, but the step runs on a CPU; give a number of bytes such "
            'as "4GiB", or a share of the plain step such as "60%"'
        )
    return int(torch.cuda.get_device_properties(0).total_memory * (1 - _GPU_MARGIN))
