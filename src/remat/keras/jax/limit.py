"""Keras on JAX: the step that Keras compiles is planned as a whole, optimizer's update and metrics included."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import keras

from remat.core.errors import UnsupportedStep
from remat.core.graph import Graph
from remat.core.plan import Plan
from remat.fit.auto_budget import auto_budget_bytes
from remat.fit.request import FIT_LEVERS, Request
from remat.jax.api.jit import Jitted
from remat.jax.first_run import OnBroken
from remat.jax.planned_part import PartlyPlanned, Transform
from remat.keras import _private
from remat.keras.jax.choose import choose_micro_batches
from remat.keras.jax.kept_layers import KeptLayers
from remat.keras.jax.step import MicroBatchedStep
from remat.keras.shared.first_step import Ran, checked_first_step
from remat.keras.shared.limit import ModelLimit, is_share
from remat.keras.shared.variables import Variables
from remat.running.workload import Array


class Limit(ModelLimit):
    """A memory limit on one model: its training step is compiled by ``remat.jax.jit``."""

    step_in_micro_batches = MicroBatchedStep
    kept_layers = KeptLayers
    levers = FIT_LEVERS
    levers_of_pieces = ("recompute", "micro_batches", "split")

    def __init__(self, model: keras.Model, request: Request, micro_batches: int | None, **on_broken: bool) -> None:
        super().__init__(model, request, micro_batches, **on_broken)
        self._on_broken = OnBroken(self._replans, self._strict)
        # A step that has been compiled is not traced again, so that each number of micro-batches has one.
        self._steps: dict[int, MicroBatchedStep] = {}
        if self._micro_step is not None:
            self._steps[self._micro_batches] = self._micro_step
        self._jit_options: dict[str, Any] = {}
        self._forget()

    @property
    def plan(self) -> Plan | None:
        """The plan in force, None before the first training step."""
        return self._main.plan if self._main is not None else None

    @property
    def graph(self) -> Graph | None:
        """The step that the plan is for, None before the first training step; with micro-batches, one piece of it."""
        return self._main.graph if self._main is not None else None

    def _auto_budget_bytes(self) -> int:
        device = jax.devices()[0]
        memory_bytes = None if device.platform == "cpu" else int((device.memory_stats() or {}).get("bytes_limit", 0))
        return auto_budget_bytes(str(device), memory_bytes)

    def _forget(self) -> None:
        self._main: Jitted | PartlyPlanned | None = None
        self._smaller: Jitted | PartlyPlanned | None = None
        self._largest_bytes = -1

    def _make_train_function(self, force: bool = False) -> None:
        model = self._required_model()
        if model.train_function is not None and not force:
            return
        if model.run_eagerly or not model.jit_compile:
            option = "run_eagerly=True" if model.run_eagerly else "jit_compile=False"
            cause, instead = f"was compiled with {option}", "compile it without that option"
            layer = next((one for one in _private.all_layers(model) if not one.supports_jit), None)
            if layer is not None and not model.run_eagerly:
                cause = f"is not compiled by Keras, since its layer {layer.name!r} does not support it"
                instead = "leave that layer out of it, and do its work on the data before"
            raise UnsupportedStep(
                f"{model.name!r} {cause}, so that operations run at once and nothing can be planned; {instead}, or do "
                "not limit its memory"
            )
        if (self._chooses or self._micro_batches > 1) and keras.distribution.distribution() is not None:
            raise UnsupportedStep(
                f"{model.name!r} trains under a keras.distribution, where micro_batches are not supported; give a "
                "budget with micro_batches=1, or train on one device"
            )
        self._forget()
        # They can be asked for now only: while it trains, Keras takes the values out of the variables.
        self._jit_options = _private.jit_options_of_distribution(model)
        model.train_function = model._make_function(self._train_step)

    def _train_step(self, state: Any, data: Any) -> Any:
        """Keras' compiled training step."""
        try:
            step = self._step_for(state, data)
            if self._checks_first_step:
                self._checks_first_step = False
                return self._run_checked(step, state, data)
            return step(state, data)
        except Exception:
            # While it trains, Keras takes the values out of the variables; whoever catches InfeasibleBudget and asks
            # for more wants them back.
            _private.give_state_back(self._required_model(), state)
            raise

    def _run_checked(self, step: Callable[[Any, Any], Any], state: Any, data: Any) -> Any:
        """A training step, plainly and planned; what the two leave behind is compared.

        Raises:
            PlanMismatch: if they differ, where the limit is strict.
        """
        model = self._required_model()
        plain = jax.jit(model.train_step, **self._jit_options)
        owners = (model.trainable_variables, model.non_trainable_variables, model.optimizer.variables)

        def by_variable(state: Any) -> dict[int, Any]:
            return {
                id(owner): value
                for part, values in zip(owners, state, strict=False)
                for owner, value in zip(part, values, strict=True)
            }

        before = by_variable(state)
        variables = Variables(model, lambda variable: before[id(variable)])

        def run(planned: bool, values: Sequence[Array]) -> Ran:
            # Copies: the planned step consumes what it is given, and a step that fails gives its state back.
            given = {id(variable): value for variable, value in zip(variables.all, values, strict=True)}
            start = [
                [jax.device_put(given[id(owner)], before[id(owner)].sharding) for owner in part] for part in owners
            ]
            metrics = [jax.numpy.copy(value) for value in state[3]]
            logs, after = (step if planned else plain)((*start, metrics), data)
            left = by_variable(after)
            return (logs, after), logs, [left[id(variable)] for variable in variables.all]

        return checked_first_step(model.name, variables, run, strict=self._strict)

    def _step_for(self, state: Any, data: Any) -> Jitted | PartlyPlanned:
        """The step for a batch. It is planned for the largest one, of whose plain peak a percentage is one."""
        data_bytes = sum(int(getattr(leaf, "nbytes", 0)) for leaf in jax.tree.leaves(data))
        if data_bytes > self._largest_bytes:
            self._largest_bytes = data_bytes
            self._smaller = None
            if self._chooses:
                self._main = self._step_chosen_for(state, data)
            else:
                self._main = self._compiled(self._micro_batches, self._budgeted().budget)
        assert self._main is not None
        if data_bytes == self._largest_bytes:
            return self._main
        if self._smaller is None:
            plan = self.plan if self._kept is None else None
            self._smaller = self._compiled(self._micro_batches, plan.budget_bytes if plan is not None else None)
        return self._smaller

    def _step_chosen_for(self, state: Any, data: Any) -> Jitted | PartlyPlanned:
        """The step with the number of micro-batches that costs least for batches of this size."""
        model, budget = self._required_model(), self._budgeted().budget
        assert budget is not None
        choice, step = choose_micro_batches(model, state, data, budget, self._compiled)
        self._chosen(model, choice)
        if choice.micro_batches > 1:
            self._steps[choice.micro_batches].warn(model)
        return step

    def _compiled(self, count: int, budget: int | str | None) -> Jitted | PartlyPlanned:
        """The training step that cuts a batch into so many pieces, within a budget."""
        model = self._required_model()
        request = dataclasses.replace(self._request, budget=budget, checkpoints=None)
        naming: Transform = lambda function: function  # noqa: E731
        if self._kept is not None:
            naming = self._kept.naming
            request = dataclasses.replace(request, checkpoints=self._kept.names)
        if count == 1:
            return Jitted(
                naming(model.train_step), request, {"donate_argnums": 0, **self._jit_options}, self._on_broken
            )
        micro_step = self._steps.setdefault(count, MicroBatchedStep(model, count, warns=not self._chooses))

        def whole(transform: Transform) -> Callable[..., Any]:
            # The part is traced by itself, later than the whole.
            return lambda state, data: micro_step(model, state, data, lambda part: transform(naming(part)))

        plain = model.train_step if is_share(budget) else None
        return PartlyPlanned(whole, request, donate_argnums=(0,), plain=plain, on_broken=self._on_broken)
