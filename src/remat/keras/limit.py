"""``limit_memory``, ``plan_of`` and ``graph_of``: one entry for every backend of Keras."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import keras

from remat.budget import parse_budget
from remat.errors import UnsupportedStep
from remat.graph import Graph
from remat.plan import Plan


class Limit(Protocol):
    """What a backend attaches to a model."""

    @property
    def plan(self) -> Plan | None:
        """The plan in force, None before the first training step."""

    @property
    def graph(self) -> Graph | None:
        """The step that the plan is for, None before the first training step."""

    def detach(self) -> None:
        """Give the model its own training step back."""


_limits: weakref.WeakKeyDictionary[Any, Limit] = weakref.WeakKeyDictionary()


def limit_memory(
    model: keras.Model,
    budget: int | str | None = "60%",
    *,
    micro_batches: int = 1,
    planner: str = "auto",
    time_limit_s: float | None = None,
    **options: Any,
) -> keras.Model:
    """Make ``fit`` and ``train_on_batch`` keep a memory budget; everything else stays as it is.

    The first training step is traced, planned and rewritten; that takes seconds once. The numbers are those of
    plain training. The limit belongs to this object: it survives ``compile`` but is not saved with the
    model, so call this again after loading.

    Args:
        model: a Functional, Sequential or subclassed model, compiled or not. Its own ``train_step`` is kept.
        budget: peak device bytes of a training step, everything counted: an int, "4GiB", "60%" of the plain step's
            predicted peak, "auto" for a GPU's memory less a margin, or None to take a limit off again.
        micro_batches: 1; splitting the batch is not part of this version.
        planner: a planner's name.
        time_limit_s: wall seconds that an anytime planner may use.
        options: passed on to the planner.

    Returns:
        The same model.

    Raises:
        InvalidBudget: if the budget cannot be read.
        UnsupportedStep: for another backend than TensorFlow and JAX, or ``run_eagerly``.
        InfeasibleBudget: by ``fit``, at the first step, if no schedule fits; it names the smallest budget.
    """
    if not isinstance(model, keras.Model):
        raise TypeError(f"limit_memory takes a keras.Model, not {type(model).__name__}")
    if budget is None:
        if model in _limits:
            _limits.pop(model).detach()
        return model
    if micro_batches != 1:
        raise UnsupportedStep(
            f"micro_batches={micro_batches!r} is not supported by this version of remat; leave it at 1, give a budget"
        )
    if budget != "auto":
        parse_budget(budget, baseline_peak_bytes=1 << 60)
    backend = keras.backend.backend()
    if backend not in ("tensorflow", "jax"):
        raise UnsupportedStep(
            f"limit_memory supports Keras on TensorFlow and on JAX, and the active backend is {backend!r}; set "
            "KERAS_BACKEND=tensorflow or KERAS_BACKEND=jax before keras is imported"
        )
    if model in _limits:
        _limits.pop(model).detach()
    if backend == "tensorflow":
        from remat.keras.tensorflow_backend import TensorFlowLimit
        from remat.tensorflow.rewrite import Request

        _limits[model] = TensorFlowLimit(model, Request(budget, None, planner, time_limit_s, options))
    else:
        from remat.jax.planned import Request as JaxRequest
        from remat.keras.jax_backend import JaxLimit

        _limits[model] = JaxLimit(model, JaxRequest(budget, None, planner, time_limit_s, options))
    return model


def plan_of(model: keras.Model) -> Plan | None:
    """The plan that ``model`` trains by; None before its first training step.

    Raises:
        ValueError: if the model has no limit.
    """
    return _limit_of(model).plan


def graph_of(model: keras.Model) -> Graph | None:
    """The training step that ``plan_of(model)`` is for; None before the first training step.

    With it ``remat.simulate`` gives the memory over the step, under the plan and without it.

    Raises:
        ValueError: if the model has no limit.
    """
    return _limit_of(model).graph


def _limit_of(model: keras.Model) -> Limit:
    if model not in _limits:
        raise ValueError(f"{model.name!r} has no memory limit; call remat.keras.limit_memory(model, budget=...) first")
    return _limits[model]
