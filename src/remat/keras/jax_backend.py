"""Keras on JAX: the step that Keras compiles is planned as a whole, optimizer's update and metrics included."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import jax
import keras

from remat.errors import InvalidBudget, UnsupportedStep
from remat.graph import Graph
from remat.jax.jit import Jitted
from remat.jax.jit import jit as planned_jit
from remat.jax.planned import Request
from remat.plan import Plan

_GPU_MARGIN = 0.08


class JaxLimit:
    """A memory limit on one model.

    Keras builds its training function in ``make_train_function``; this replaces that method on the instance. The
    model's own ``train_step``, whatever it is, is compiled by ``remat.jax.jit``.
    """

    def __init__(self, model: keras.Model, request: Request) -> None:
        self._model = weakref.ref(model)
        self._request = request
        self._main: Jitted | None = None
        self._smaller: Jitted | None = None
        self._largest_bytes = -1
        if "make_train_function" in vars(model):
            raise UnsupportedStep(f"something else has replaced make_train_function of {model.name!r}; undo that first")
        model.make_train_function = self._make_train_function
        model.train_function = None

    @property
    def plan(self) -> Plan | None:
        """The plan in force, None before the first training step."""
        return self._main.plan if self._main is not None else None

    @property
    def graph(self) -> Graph | None:
        """The step that the plan is for, None before the first training step."""
        return self._main.graph if self._main is not None else None

    def detach(self) -> None:
        """Give the model its own training step back."""
        model = self._model()
        if model is not None:
            vars(model).pop("make_train_function", None)
            model.train_function = None

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
        if keras.distribution.distribution() is not None:
            raise UnsupportedStep(
                f"{model.name!r} trains under a keras.distribution; limit_memory supports one device. For several, "
                "write the step in JAX and use remat.jax.jit(step, budget=...)"
            )
        self._main = self._smaller = None
        self._largest_bytes = -1
        model.train_function = model._make_function(self._train_step)

    def _train_step(self, state: Any, data: Any) -> Any:
        """Keras' compiled training step; a share of the plain peak means that of the largest batch."""
        data_bytes = sum(int(getattr(leaf, "nbytes", 0)) for leaf in jax.tree.leaves(data))
        if data_bytes > self._largest_bytes:
            self._largest_bytes = data_bytes
            self._main = self._compiled(self._budget())
            self._smaller = None
        elif data_bytes < self._largest_bytes:
            if self._smaller is None:
                assert self._main is not None
                plan = self._main.plan
                assert plan is not None
                self._smaller = self._compiled(plan.budget_bytes)
            return self._smaller(state, data)
        assert self._main is not None
        return self._main(state, data)

    def _compiled(self, budget: int | str) -> Jitted:
        request, model = self._request, self._required_model()
        train_step: Callable[..., Any] = model.train_step
        return planned_jit(
            lambda state, data: train_step(state, data),
            budget=budget,
            planner=request.planner,
            time_limit_s=request.time_limit_s,
            options=request.options,
            donate_argnums=0,
        )

    def _budget(self) -> int | str:
        assert self._request.budget is not None
        if self._request.budget != "auto":
            return self._request.budget
        device = jax.devices()[0]
        if device.platform == "cpu":
            raise InvalidBudget(
                f"budget 'auto' means a GPU's memory less a margin, but the step runs on {device}; give a number of "
                'bytes such as "4GiB", or a share of the plain step such as "60%"'
            )
        return int((device.memory_stats() or {}).get("bytes_limit", 0) * (1 - _GPU_MARGIN))

    def _required_model(self) -> keras.Model:
        model = self._model()
        if model is None:
            raise ReferenceError("the model of this memory limit is gone")
        return model
