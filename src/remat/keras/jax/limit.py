"""Keras on JAX: the step that Keras compiles is planned as a whole, optimizer's update and metrics included."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import keras

from remat.core.errors import InvalidBudget, UnsupportedStep
from remat.core.graph import Graph
from remat.core.plan import Plan
from remat.jax.api.jit import Jitted
from remat.jax.planned_part import InnerJitted, Transform
from remat.fit.request import Request
from remat.keras import _private
from remat.keras.jax.choose import choose_micro_batches
from remat.keras.jax.kept_layers import NamedLayers
from remat.keras.jax.step import JaxMicroBatchedStep
from remat.keras.shared.attachment import Attachment
from remat.micro_batches.options import JointPlan

_GPU_MARGIN = 0.08


class JaxLimit(Attachment):
    """A memory limit on one model.

    Keras builds its training function in ``make_train_function``; this replaces that method on the instance. The
    model's own ``train_step``, whatever it is, is compiled by ``remat.jax.jit``; with micro-batches one that does the
    same as Keras' own.

    Args:
        model: the model.
        request: the budget; None plans nothing.
        checkpoints: layers or names of what to keep, instead of a budget.
        micro_batches: how many pieces a batch is cut into; None chooses that at the first step.
    """

    def __init__(
        self,
        model: keras.Model,
        request: Request | None,
        checkpoints: Sequence[Any] | None = None,
        micro_batches: int | None = 1,
    ) -> None:
        self._checkpoints = None if checkpoints is None else NamedLayers(model, checkpoints)
        self._micro_batches = micro_batches
        self._micro_steps: dict[int, JaxMicroBatchedStep] = {}
        if micro_batches is not None and micro_batches > 1:
            self._micro_steps[micro_batches] = JaxMicroBatchedStep(model, micro_batches)
        self._joint: JointPlan | None = None
        self._request = request
        self._jit_options: dict[str, Any] = {}
        self._forget()
        super().__init__(model)

    @property
    def plan(self) -> Plan | None:
        """The plan in force, None before the first training step."""
        return self._main.plan if self._main is not None else None

    @property
    def joint_plan(self) -> JointPlan | None:
        """What was chosen, and from what; None with a number of micro-batches or before the first training step."""
        return self._joint

    @property
    def graph(self) -> Graph | None:
        """The step that the plan is for, None before the first training step; with micro-batches, one piece of it."""
        return self._main.graph if self._main is not None else None

    def _forget(self) -> None:
        self._main: Jitted | InnerJitted | None = None
        self._smaller: Jitted | InnerJitted | None = None
        self._largest_bytes = -1

    def _make_train_function(self, force: bool = False) -> None:
        model = self._required_model()
        if model.train_function is not None and not force:
            return
        if model.run_eagerly or not model.jit_compile:
            option = "run_eagerly=True" if model.run_eagerly else "jit_compile=False"
            raise UnsupportedStep(
                f"{model.name!r} was compiled with {option}, where operations run at once and nothing can be planned; "
                "compile it without that option, or do not limit its memory"
            )
        if self._micro_batches != 1 and keras.distribution.distribution() is not None:
            raise UnsupportedStep(
                f"{model.name!r} trains under a keras.distribution, where micro_batches are not supported; give a "
                "budget with micro_batches=1, or train on one device"
            )
        self._forget()
        # Known now only: while it trains, Keras takes the values out of the variables.
        self._jit_options = _private.jit_options_of_distribution(model)
        model.train_function = model._make_function(self._train_step)

    def _train_step(self, state: Any, data: Any) -> Any:
        """Keras' compiled training step."""
        try:
            return self._planned_step(state, data)
        except Exception:
            # While it trains, Keras takes the values out of the variables; whoever catches InfeasibleBudget and asks
            # for more wants them back.
            _private.give_state_back(self._required_model(), state)
            raise

    def _planned_step(self, state: Any, data: Any) -> Any:
        """Plans for the largest batch, of whose plain peak a share is a share."""
        data_bytes = sum(int(getattr(leaf, "nbytes", 0)) for leaf in jax.tree.leaves(data))
        if data_bytes > self._largest_bytes:
            self._largest_bytes = data_bytes
            self._smaller = None
            if self._micro_batches is None:
                self._main = self._chosen(state, data)
            else:
                self._main = self._compiled(self._micro_batches, self._budget())
        elif data_bytes < self._largest_bytes:
            if self._smaller is None:
                plan = self.plan if self._checkpoints is None else None
                count = self._micro_batches if self._joint is None else self._joint.micro_batches
                assert count is not None
                self._smaller = self._compiled(count, plan.budget_bytes if plan is not None else None)
            return self._smaller(state, data)
        assert self._main is not None
        return self._main(state, data)

    def _chosen(self, state: Any, data: Any) -> Jitted | InnerJitted:
        """The step with the number of micro-batches that costs least for batches of this size, which is said why."""
        budget = self._budget()
        assert budget is not None
        self._joint, step = choose_micro_batches(self._required_model(), state, data, budget, self._compiled)
        print(self._joint, flush=True)
        if self._joint.micro_batches > 1:
            self._micro_steps[self._joint.micro_batches].warn(self._required_model())
        return step

    def _compiled(self, count: int, budget: int | str | None) -> Jitted | InnerJitted:
        model = self._required_model()
        request = dataclasses.replace(self._request or Request(), budget=budget)
        naming: Transform = lambda function: function  # noqa: E731
        if self._checkpoints is not None:
            naming = self._checkpoints.naming
            request = dataclasses.replace(request, checkpoints=self._checkpoints.names)
        if count > 1:
            is_tried = self._micro_batches is None
            micro_step = self._micro_steps.setdefault(count, JaxMicroBatchedStep(model, count, is_tried=is_tried))

            def whole(transform: Transform) -> Callable[..., Any]:
                # The part is traced by itself, later than the whole.
                return lambda state, data: micro_step(model, state, data, lambda part: transform(naming(part)))

            return InnerJitted(whole, request, donate_argnums=(0,))
        return Jitted(naming(model.train_step), request, {"donate_argnums": 0, **self._jit_options})

    def _budget(self) -> int | str | None:
        if self._request is None or self._request.budget != "auto":
            return None if self._request is None else self._request.budget
        device = jax.devices()[0]
        if device.platform == "cpu":
            raise InvalidBudget(
                f"budget 'auto' means a GPU's memory less a margin, but the step runs on {device}; give a number of "
                'bytes such as "4GiB", or a share of the plain step such as "60%"'
            )
        return int((device.memory_stats() or {}).get("bytes_limit", 0) * (1 - _GPU_MARGIN))
