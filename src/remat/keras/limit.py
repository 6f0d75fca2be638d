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
    budget: int | str | None = "default",
    *,
    micro_batches: int | str = 1,
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
            predicted peak, "auto" for a GPU's memory less a margin. With micro-batches it is the peak of one of them,
            and None recomputes nothing; otherwise None takes a limit off again. Not given, it is "60%", or None with
            micro-batches.
        micro_batches: into how many pieces a batch is cut, for one update with the full batch's numbers; see
            docs/micro_batches.md for what each part of a model does.
        planner: a planner's name.
        time_limit_s: wall seconds that an anytime planner may use.
        options: passed on to the planner.

    Returns:
        The same model.

    Raises:
        InvalidBudget: if the budget cannot be read.
        ValueError: unless ``micro_batches`` is a whole number of at least 1.
        UnsupportedStep: for another backend than TensorFlow, or ``run_eagerly``; with micro-batches for a model with
            its own ``train_step``, and by ``fit`` for a loss of which it cannot be known what it divides by.
        InfeasibleBudget: by ``fit``, at the first step, if no schedule fits; it names the smallest budget.
    """
    if not isinstance(model, keras.Model):
        raise TypeError(f"limit_memory takes a keras.Model, not {type(model).__name__}")
    if micro_batches == "auto":
        raise UnsupportedStep("micro_batches='auto' is not part of this version; give a number")
    count = _count(micro_batches)
    if budget == "default":
        budget = "60%" if count == 1 else None
    if budget is None and count == 1:
        if model in _limits:
            _limits.pop(model).detach()
        return model
    if budget not in ("auto", None):
        parse_budget(budget, baseline_peak_bytes=1 << 60)
    if keras.backend.backend() != "tensorflow":
        raise UnsupportedStep(
            f"limit_memory supports Keras on TensorFlow, and the active backend is {keras.backend.backend()!r}; set "
            "KERAS_BACKEND=tensorflow before keras is imported"
        )
    from remat.keras.tensorflow_backend import TensorFlowLimit
    from remat.tensorflow.rewrite import Request

    if model in _limits:
        _limits.pop(model).detach()
    request = None if budget is None else Request(budget, None, planner, time_limit_s, options)
    _limits[model] = TensorFlowLimit(model, request, count)
    return model


def _count(micro_batches: object) -> int:
    if isinstance(micro_batches, bool) or not isinstance(micro_batches, int) or micro_batches < 1:
        raise ValueError(f"micro_batches must be a whole number of at least 1, not {micro_batches!r}")
    return micro_batches


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
