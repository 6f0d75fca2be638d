"""Keras on PyTorch: a training step runs in graph mode where it can be captured, else Keras' own runs under a plan."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import keras
import torch

from remat.core.errors import InfeasibleBudget, UnsupportedStep
from remat.core.graph import Graph
from remat.core.plan import Plan
from remat.fit.auto_budget import auto_budget_bytes
from remat.fit.request import Request
from remat.keras._private import outputs_released
from remat.keras.shared.first_step import Ran, checked_first_step
from remat.keras.shared.limit import ModelLimit, in_bytes, is_share
from remat.keras.shared.variables import Variables
from remat.keras.torch.choose import choose_micro_batches
from remat.keras.torch.graph_step import GraphSteps, NotCaptured
from remat.keras.torch.kept_layers import KeptLayers
from remat.keras.torch.step import CutBatch, MicroBatchedStep, Piece
from remat.keras.torch.trace import build, loss_of, traced_step
from remat.running.workload import Array
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
    levers = ("recompute", "micro_batches", "split", "update")

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
        in_graph = [lever for lever in ("split", "update") if lever in request.levers]
        if in_graph and (mode == "eager" or self._chooses):
            without = 'mode="eager"' if mode == "eager" else 'micro_batches="auto", whose pieces run eagerly'
            raise UnsupportedStep(f'on PyTorch the lever "{in_graph[0]}" needs graph mode; leave it out, or {without}')
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
        if self._checks_first_step:
            self._checks_first_step = False
            return self._run_checked(model, data, batch)
        return self._planned_step(model, data, batch)

    def _run_checked(self, model: keras.Model, data: Any, batch: Sequence[Any]) -> Any:
        """A training step, plainly and planned; what the two leave behind is compared.

        Raises:
            PlanMismatch: if they differ, where the limit is strict.
        """
        build(model, keras.utils.unpack_x_y_sample_weight(data)[:2])
        variables = Variables(model)
        metrics = {id(variable): variable.value.clone() for variable in model.metrics_variables}
        random_state = torch.get_rng_state()

        def start_from(values: Sequence[Array]) -> None:
            torch.set_rng_state(random_state)
            model.zero_grad()
            for variable, value in zip(variables.all, values, strict=True):
                variable.assign(value)
            for variable in model.metrics_variables:
                variable.assign(metrics.get(id(variable), torch.zeros_like(variable.value)))

        def run(planned: bool, values: Sequence[Array]) -> Ran:
            start_from(values)
            logs = self._planned_step(model, data, batch) if planned else keras.Model.train_step(model, data)
            return logs, logs, [variable.value for variable in variables.all]

        try:
            return checked_first_step(model.name, variables, run, strict=self._strict)
        except BaseException:
            start_from(variables.first_values(nudged=False))
            raise

    def _planned_step(self, model: keras.Model, data: Any, batch: Sequence[Any]) -> Any:
        if self._micro_step is not None:
            return self._micro_step(model, data, self._forward_of_piece)
        _check_train_step(model)
        if self._is_captured(model):
            try:
                return self._captured_step(model, batch)
            except NotCaptured as error:
                self._run_eagerly(model, error)
        self._say_eager(model)
        with self._applied_to(model, loss_of(model), batch):
            return keras.Model.train_step(model, data)

    def _forward_of_piece(self, cut: CutBatch, leaves: Sequence[Any]) -> Piece:
        """The forward pass of a micro-batch, in graph mode where it can be captured and the budget has room for it."""
        model = self._required_model()
        if self._is_captured(model):
            try:
                steps, key = self._steps_for(model, cut.loss_of_piece, leaves)
                return steps.run_piece(cut, key, leaves)
            except NotCaptured as error:
                self._run_eagerly(model, error)
            except InfeasibleBudget as error:
                self._run_eagerly(
                    model,
                    "there all gradients of a micro-batch arrive together, beside those of the micro-batches before, "
                    f"and need {error.minimum_bytes} bytes",
                )
        self._say_eager(model)
        with self._applied_to(model, cut.loss_of_piece, leaves):
            return cut.forward(leaves)

    def _run_eagerly(self, model: keras.Model, why: Any) -> None:
        """From now on. Nothing of the step that could not run in graph mode has run."""
        self._graph_steps, self._why_eager = None, str(why)
        cannot = "its training step cannot be captured: " if isinstance(why, NotCaptured) else ""
        _log.warning(
            "%s trains eagerly within its budget, not in graph mode, since %s%s", model.name, cannot, self._why_eager
        )

    def _say_eager(self, model: keras.Model) -> None:
        """Say once why a plan is carried out eagerly, where graph mode was not tried."""
        if model.run_eagerly:
            why = "it was compiled with run_eagerly=True"
        elif self._chooses and self._micro_step is not None:
            why = "its number of micro-batches was chosen by the times of eager steps"
        else:
            return
        if self._request.plans and not self._said_eager:
            self._said_eager = True
            _log.warning(
                '%s trains eagerly within its plan, not in graph mode, since %s; with mode="eager" this is not said',
                *(model.name, why),
            )

    def _is_captured(self, model: keras.Model) -> bool:
        """Does a step, or a micro-batch, run in graph mode?"""
        if self._chooses and self._micro_step is not None:
            return False
        return self._request.plans and not (self._why_eager or model.run_eagerly)

    def _captured_step(self, model: keras.Model, batch: Sequence[Any]) -> Any:
        """A training step in graph mode.

        Raises:
            NotCaptured: where it cannot be captured.
        """
        steps, key = self._steps_for(model, loss_of(model), batch)
        return steps.run(model, key, batch)

    def _steps_for(
        self, model: keras.Model, loss_fn: Callable[..., Any], args: Sequence[Any]
    ) -> tuple[GraphSteps, Any]:
        """Graph mode, which knows steps on tensors of these shapes, and their key."""
        key = _shapes_of(args)
        if self._graph_steps is None or not self._graph_steps.knows(key):
            in_pieces = self._micro_step is not None
            whole = traced_step(model, loss_fn, args, accumulates=in_pieces)
            if self._graph_steps is None:
                state = () if model.optimizer is None else model.optimizer.variables
                request = self._request_in_force()
                if self._kept is None:
                    request = in_bytes(request, whole.plain_peak.expected_bytes)
                self._graph_steps = GraphSteps(
                    model,
                    request,
                    sum(variable.value.nbytes for variable in state),
                    self._kept,
                    whole_bytes=self._whole_peak_bytes if in_pieces else None,
                    optimizer=model.optimizer,
                    strict=self._strict,
                    replans=self._replans,
                )
            self._graph_steps.add(key, whole)
        return self._graph_steps, key

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

    @contextmanager
    def _applied_to(self, model: keras.Model, loss_fn: Callable[..., Any], args: Sequence[Any]) -> Iterator[None]:
        """What the forward pass of a step, or of one micro-batch, runs in."""
        if not self._request.plans:
            yield
            return
        key = _shapes_of(args)
        if key not in self._applied:
            self._applied[key] = apply(self._plan_for(model, loss_fn, args), strict=self._strict)
        with outputs_released(), self._applied[key]:
            yield

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
