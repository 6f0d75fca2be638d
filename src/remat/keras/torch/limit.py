"""Keras on PyTorch: the forward pass of Keras' own training step runs under a plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import torch

from remat.core.errors import UnsupportedStep
from remat.core.graph import Graph
from remat.core.plan import Plan
from remat.fit.auto_budget import auto_budget_bytes
from remat.fit.request import AUTO, Request
from remat.keras.shared.attachment import Attachment
from remat.keras.torch.choose import choose_micro_batches
from remat.keras.torch.kept_layers import KeptLayers
from remat.keras.torch.step import TorchMicroBatchedStep
from remat.keras.torch.training_step import loss_of, traced_step
from remat.micro_batches.options import JointPlan
from remat.torch.api.apply import Applied, apply
from remat.torch.api.plan import StepPlan


class TorchLimit(Attachment):
    """A memory limit on one model: the forward pass of its training step runs inside of ``apply``.

    Args:
        model: the model.
        budget: what a step may take, with micro-batches one of them; None plans nothing.
        checkpoints: layers or names of those whose outputs are kept, instead of a budget.
        micro_batches: how many pieces a batch is cut into; None to choose when the first batch comes, for which there
            is a budget.
        planner: a planner's name.
        time_limit_s: for each round of planning.
        options: passed on to the planner.

    Raises:
        UnsupportedStep: for a model with its own ``train_step``.
    """

    def __init__(
        self,
        model: keras.Model,
        budget: int | str | None,
        checkpoints: Sequence[Any] | None,
        micro_batches: int | None,
        planner: str,
        time_limit_s: float | None,
        options: Mapping[str, Any],
    ) -> None:
        self._chooses = micro_batches is None
        self._joint: JointPlan | None = None
        self._set_count(model, micro_batches or 1)
        _check_train_step(model)
        self._checkpoints = None if checkpoints is None else KeptLayers(model, checkpoints)
        super().__init__(model)
        self._budget = budget
        self._request = Request(planner=planner, time_limit_s=time_limit_s, options=options)
        self._applied: dict[Any, Applied] = {}
        self._main: StepPlan | None = None
        self._largest_bytes = -1

    @property
    def plan(self) -> Plan | None:
        """The plan in force, None before the first training step."""
        return self._main

    @property
    def joint_plan(self) -> JointPlan | None:
        """What was chosen from which numbers of micro-batches; None before the first step, or where it was given."""
        return self._joint

    @property
    def graph(self) -> Graph | None:
        """The step that the plan is for, None before the first training step; with micro-batches, one piece of it."""
        return None if self._main is None else self._main.graph

    def _set_count(self, model: keras.Model, count: int) -> None:
        self._micro_step = TorchMicroBatchedStep(model, count) if count > 1 else None

    def _make_train_function(self, force: bool = False) -> Any:
        model = self._required_model()
        if model.train_function is None or force:
            type(model).make_train_function(model, force=True)  # It refuses what Keras does not do on PyTorch.
            model.train_function = lambda data: self._train_step(data[0])
        return model.train_function

    def _train_step(self, data: Any) -> Any:
        model = self._required_model()
        if model.jit_compile:
            raise UnsupportedStep(
                f"{model.name!r} was compiled with jit_compile=True, where torch.compile plans memory itself; compile "
                "it without that option, or do not limit its memory"
            )
        model.zero_grad()  # Keras does so later, when the forward pass lies in memory beside them.
        if self._chooses:
            self._choose(model, data)
        if self._micro_step is not None:
            return self._micro_step(model, data, lambda loss_fn, leaves: self._applied_to(model, loss_fn, leaves))
        _check_train_step(model)
        with self._applied_to(model, loss_of(model), keras.utils.unpack_x_y_sample_weight(data)):
            return keras.Model.train_step(model, data)

    def _choose(self, model: keras.Model, data: Any) -> None:
        """Settle the number of micro-batches for a batch that is larger than those before, and say why."""
        leaves = [leaf for leaf in keras.tree.flatten(data) if leaf is not None]
        data_bytes = sum(int(leaf.nbytes) for leaf in leaves)
        if data_bytes <= self._largest_bytes:
            return
        assert self._budget is not None
        joint = choose_micro_batches(model, data, self._request_for(_in_bytes(self._budget)))
        print(joint, flush=True)
        self._joint, self._largest_bytes = joint, data_bytes
        self._set_count(model, joint.micro_batches)
        assert isinstance(joint.chosen.plan, StepPlan)
        self._main = joint.chosen.plan
        self._applied = {tuple((joint.chosen.size, *leaf.shape[1:]) for leaf in leaves): apply(self._main)}

    def _applied_to(
        self, model: keras.Model, loss_fn: Callable[..., Any], args: Sequence[Any]
    ) -> AbstractContextManager[Any]:
        """What the forward pass of a step, or of one micro-batch, runs in."""
        if self._budget is None and self._checkpoints is None:
            return nullcontext()
        key = tuple(tuple(leaf.shape) for leaf in keras.tree.flatten(args) if hasattr(leaf, "shape"))
        if key not in self._applied:
            self._applied[key] = apply(self._plan_for(model, loss_fn, args))
        return self._applied[key]

    def _plan_for(self, model: keras.Model, loss_fn: Callable[..., Any], args: Sequence[Any]) -> StepPlan:
        accumulates = self._micro_step is not None
        if self._checkpoints is not None:
            traced = traced_step(model, self._checkpoints.marking(loss_fn), args, accumulates=accumulates)
            found = traced.keeping(self._checkpoints.storages_in(traced.step.recording))
        else:
            assert self._budget is not None
            # A share means one of the largest batch seen: the first, as a rule.
            budget = _in_bytes(self._budget) if self._main is None else self._main.budget_bytes
            found = traced_step(model, loss_fn, args, accumulates=accumulates).fitted(self._request_for(budget))
        if self._main is None or found.baseline_peak_bytes > self._main.baseline_peak_bytes:
            self._main = found
        return found

    def _request_for(self, budget: int | str) -> Request:
        return dataclasses.replace(self._request, budget=budget)


def _check_train_step(model: keras.Model) -> None:
    if type(model).train_step is not keras.Model.train_step or "train_step" in vars(model):
        raise UnsupportedStep(
            f"{model.name!r} has a train_step of its own, whose loss limit_memory cannot tell on PyTorch; put its "
            "forward pass into a function and use remat.torch.plan and remat.torch.apply inside of train_step"
        )


def _in_bytes(budget: int | str) -> int | str:
    """The budget, "auto" being the memory of the GPU less a margin."""
    if budget != AUTO:
        return budget
    if not torch.cuda.is_available():
        return auto_budget_bytes("CPU", None)
    return auto_budget_bytes("cuda:0", torch.cuda.get_device_properties(0).total_memory)
