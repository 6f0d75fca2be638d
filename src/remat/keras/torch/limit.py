"""Keras on PyTorch: a training step runs in graph mode where it can be captured, else Keras' own runs under a plan."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import keras
import torch

from remat.core.errors import UnsupportedStep
from remat.core.graph import Graph
from remat.core.plan import Plan
from remat.fit.auto_budget import auto_budget_bytes
from remat.fit.request import Request
from remat.keras.shared.limit import ModelLimit, in_bytes, is_share
from remat.keras.torch.choose import choose_micro_batches
from remat.keras.torch.graph_step import GraphSteps, NotCaptured
from remat.keras.torch.kept_layers import KeptLayers
from remat.keras.torch.step import MicroBatchedStep
from remat.keras.torch.trace import loss_of, traced_step
from remat.torch.api.apply import Applied, apply
from remat.torch.api.plan import StepPlan

_log = logging.getLogger("remat")

Mode = Literal["auto", "graph", "eager"]
"""How a training step is carried out: "graph" captures it, "eager" watches its operators, as ``remat.torch.apply``
does; "auto" is "graph" where that can be had."""


class Limit(ModelLimit):
    """A memory limit on one model: its training step is captured, or its forward pass runs inside of ``apply``.

    Args:
        model: see ``ModelLimit``.
        request: the same.
        micro_batches: the same.
        mode: how steps are carried out. In "graph" mode what cannot be captured runs eagerly as well, with a warning.
        **on_broken: see ``ModelLimit``.

    Raises:
        UnsupportedStep: for a model with its own ``train_step``.
    """

    step_in_micro_batches = MicroBatchedStep
    kept_layers = KeptLayers

    def __init__(
        self,
        model: keras.Model,
        request: Request,
        micro_batches: int | None,
        *,
        mode: Mode = "auto",
        **on_broken: bool,
    ) -> None:
        super().__init__(model, request, micro_batches, **on_broken)
        self._graph_steps: GraphSteps | None = None
        self._why_eager = "" if mode != "eager" else 'mode="eager" was asked for'
        self._said_eager = mode == "eager"
        self._applied: dict[Any, Applied] = {}
        self._main: StepPlan | None = None
        self._largest_bytes = -1
        self._whole_peak_bytes = 0

    @property
    def plan(self) -> Plan | None:
        """The plan in force, None before the first training step."""
        return self._graph_steps.plan if self._graph_steps is not None else self._main

    @property
    def graph(self) -> Graph | None:
        """The step that the plan is for, None before the first training step; with micro-batches, one piece of it."""
        if self._graph_steps is not None:
            return self._graph_steps.graph
        return None if self._main is None else self._main.graph

    def _set_micro_batches(self, model: keras.Model, count: int) -> None:
        super()._set_micro_batches(model, count)
        if count == 1:
            _check_train_step(model)

    def _auto_budget_bytes(self) -> int:
        if not torch.cuda.is_available():
            return auto_budget_bytes("CPU", None)
        return auto_budget_bytes("cuda:0", torch.cuda.get_device_properties(0).total_memory)

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
        model.zero_grad()  # Keras does so later, when the forward pass lies in memory beside the gradients.
        batch = keras.utils.unpack_x_y_sample_weight(data)
        leaves = [leaf for leaf in keras.tree.flatten(data) if leaf is not None]
        data_bytes = sum(int(leaf.nbytes) for leaf in leaves)
        if data_bytes > self._largest_bytes:
            self._largest_bytes = data_bytes
            self._plan_anew(model, data, batch, leaves)
        if self._micro_step is not None:
            self._say_eager(model, "its batches are cut into micro-batches")
            return self._micro_step(model, data, lambda loss_fn, args: self._applied_to(model, loss_fn, args))
        _check_train_step(model)
        if self._is_captured(model):
            try:
                return self._captured_step(model, batch)
            except NotCaptured as error:
                self._graph_steps, self._why_eager = None, str(error)
                _log.warning(
                    "%s trains eagerly within its budget, not in graph mode, since its training step cannot be "
                    "captured: %s",
                    *(model.name, error),
                )
        if self._kept is not None:
            self._say_eager(model, "it is planned by checkpoints")
        elif model.run_eagerly:
            self._say_eager(model, "it was compiled with run_eagerly=True")
        with self._applied_to(model, loss_of(model), batch):
            return keras.Model.train_step(model, data)

    def _say_eager(self, model: keras.Model, why: str) -> None:
        """Say once why a plan is carried out eagerly, where graph mode could not be asked for."""
        if self._request.plans and not self._said_eager:
            self._said_eager = True
            _log.warning(
                '%s trains eagerly within its plan, not in graph mode, since %s; with mode="eager" this is not said',
                *(model.name, why),
            )

    def _is_captured(self, model: keras.Model) -> bool:
        """Does the whole batch's step run in graph mode? Checkpoints are places of the eager step."""
        return self._request.plans and not (self._why_eager or self._kept is not None or model.run_eagerly)

    def _captured_step(self, model: keras.Model, batch: Sequence[Any]) -> Any:
        """A training step in graph mode.

        Raises:
            NotCaptured: where it cannot be captured.
        """
        key = _shapes_of(batch)
        if self._graph_steps is None or not self._graph_steps.knows(key):
            whole = traced_step(model, loss_of(model), batch)
            if self._graph_steps is None:
                state = () if model.optimizer is None else model.optimizer.variables
                self._graph_steps = GraphSteps(
                    in_bytes(self._request_in_force(), whole.plain_peak.expected_bytes),
                    sum(variable.value.nbytes for variable in state),
                    strict=self._strict,
                    replans=self._replans,
                )
            self._graph_steps.add(key, whole)
        return self._graph_steps.run(model, key, batch)

    def _plan_anew(self, model: keras.Model, data: Any, batch: Sequence[Any], leaves: Sequence[Any]) -> None:
        """For a batch that is larger than those before: choose again, or learn again what a percentage is one of."""
        if self._chooses:
            choice = choose_micro_batches(model, data, self._budgeted())
            self._chosen(model, choice)
            self._graph_steps = None
            assert isinstance(choice.chosen.plan, StepPlan)
            self._main = choice.chosen.plan
            shapes = tuple((choice.chosen.size, *leaf.shape[1:]) for leaf in leaves)
            self._applied = {shapes: apply(self._main, strict=self._strict)}
        elif is_share(self._request.budget):
            self._applied, self._main, self._graph_steps = {}, None, None
            if self._micro_step is not None:
                self._whole_peak_bytes = traced_step(model, loss_of(model), batch).plain_peak.expected_bytes

    def _applied_to(
        self, model: keras.Model, loss_fn: Callable[..., Any], args: Sequence[Any]
    ) -> AbstractContextManager[Any]:
        """What the forward pass of a step, or of one micro-batch, runs in."""
        if not self._request.plans:
            return nullcontext()
        key = _shapes_of(args)
        if key not in self._applied:
            self._applied[key] = apply(self._plan_for(model, loss_fn, args), strict=self._strict)
        return self._applied[key]

    def _plan_for(self, model: keras.Model, loss_fn: Callable[..., Any], args: Sequence[Any]) -> StepPlan:
        accumulates = self._micro_step is not None
        if self._kept is not None:
            traced = traced_step(model, self._kept.marking(loss_fn), args, accumulates=accumulates)
            found = traced.keeping(self._kept.storages_in(traced.step.recording))
        else:
            found = traced_step(model, loss_fn, args, accumulates=accumulates).fitted(self._request_in_force())
        if self._whole_peak_bytes:
            found = dataclasses.replace(found, baseline_peak_bytes=self._whole_peak_bytes)
        if self._main is None or found.baseline_peak_bytes > self._main.baseline_peak_bytes:
            self._main = found
        return found

    def _request_in_force(self) -> Request:
        """The request, its budget in bytes where a plan or the whole batch has told what a percentage is one of."""
        if self._main is not None:
            return dataclasses.replace(self._request, budget=self._main.budget_bytes)
        return in_bytes(self._budgeted(), self._whole_peak_bytes) if self._whole_peak_bytes else self._budgeted()


def _shapes_of(batch: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(leaf.shape) for leaf in keras.tree.flatten(batch) if hasattr(leaf, "shape"))


def _check_train_step(model: keras.Model) -> None:
    if type(model).train_step is not keras.Model.train_step or "train_step" in vars(model):
        raise UnsupportedStep(
            f"{model.name!r} has a train_step of its own, whose loss limit_memory cannot tell on PyTorch; put its "
            "forward pass into a function and use remat.torch.plan and remat.torch.apply inside of train_step"
        )
