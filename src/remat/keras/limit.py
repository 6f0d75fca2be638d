"""``limit_memory``, ``plan_of`` and ``graph_of``: one entry for every backend of Keras."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import keras

from remat.core.budget import parse_budget
from remat.core.errors import UnsupportedStep
from remat.core.graph import Graph
from remat.core.plan import Plan
from remat.micro_batches.options import JointPlan


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


_DEFAULT = "default"


def limit_memory(
    model: keras.Model,
    budget: int | str | None = _DEFAULT,
    *,
    checkpoints: Sequence[Any] | None = None,
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
            predicted peak, "auto" for a GPU's memory less a margin. With a number of micro-batches a percentage is one
            of the plain peak of one of them, and None recomputes nothing; otherwise None takes a limit off again. Not
            given, it is "60%", or None with a number of micro-batches or with checkpoints.
        checkpoints: your own cut points instead of a budget: names of layers at any depth, layers, or names of tensors.
            What they return is kept and everything else between them is recomputed where that is exact, with any
            optimizer. On JAX, names of tensors are those of ``jax.ad_checkpoint.checkpoint_name``, with a slash or a
            colon in them; on PyTorch there are none.
        micro_batches: into how many pieces a batch is cut, for one update with the full batch's numbers; see
            docs/micro_batches.md for what each part of a model does. "auto" chooses at the first step what keeps the
            budget at the least predicted time, recomputation alone where BatchNormalization makes micro-batches
            inexact, and prints a line per possibility.
        planner: a planner's name.
        time_limit_s: wall seconds that an anytime planner may use.
        options: passed on to the planner.

    Returns:
        The same model.

    Raises:
        InvalidBudget: if the budget cannot be read.
        ValueError: for both a budget and checkpoints, a layer that the model does not have, or ``micro_batches`` that
            is neither a whole number of at least 1 nor "auto" with a budget.
        UnsupportedStep: for another backend than TensorFlow, JAX and PyTorch, a budget on several replicas, or
            ``run_eagerly`` on the first two; on PyTorch for a model with its own ``train_step``, or a checkpoint that
            names a tensor; with a number of micro-batches likewise, and by ``fit`` for a loss of which it cannot be
            known what it divides by. By ``fit`` for a checkpoint that the training step lacks.
        InfeasibleBudget: by ``fit``, at the first step, if no schedule fits; it names the smallest budget.
    """
    if not isinstance(model, keras.Model):
        raise _no_model(model)
    count = None if micro_batches == "auto" else _count(micro_batches)
    if checkpoints is not None:
        _check_checkpoints(checkpoints, budget)
    if budget == _DEFAULT:
        budget = "60%" if count in (1, None) and checkpoints is None else None
    if count is None and (budget is None or checkpoints is not None):
        raise ValueError("micro_batches='auto' chooses what a budget costs least with; give one, for example \"4GiB\"")
    if budget is None and count == 1 and checkpoints is None:
        if model in _limits:
            _limits.pop(model).detach()
        return model
    if budget not in (None, "auto"):
        parse_budget(budget, baseline_peak_bytes=1 << 60)
    backend = keras.backend.backend()
    if backend not in ("tensorflow", "jax", "torch"):
        raise UnsupportedStep(
            f"limit_memory supports Keras on TensorFlow, JAX and PyTorch, and the active backend is {backend!r}; set "
            "KERAS_BACKEND=tensorflow, jax or torch before keras is imported"
        )
    if model in _limits:
        _limits.pop(model).detach()
    if backend == "tensorflow":
        from remat.fit.request import Request
        from remat.keras.tensorflow.limit import TensorFlowLimit

        plans = budget is not None or checkpoints is not None
        request = Request(budget, planner=planner, time_limit_s=time_limit_s, options=options) if plans else None
        _limits[model] = TensorFlowLimit(model, request, checkpoints, count)
    elif backend == "torch":
        from remat.keras.torch.limit import TorchLimit

        _limits[model] = TorchLimit(model, budget, checkpoints, count, planner, time_limit_s, options)
    else:
        from remat.fit.request import Request as JaxRequest
        from remat.keras.jax.limit import JaxLimit

        jax_request = JaxRequest(budget, None, None, planner, time_limit_s, options) if budget is not None else None
        _limits[model] = JaxLimit(model, jax_request, checkpoints, count)
    return model


def joint_plan_of(model: keras.Model) -> JointPlan | None:
    """What ``micro_batches="auto"`` has chosen, and from what; None before the first training step, or with a number.

    Raises:
        ValueError: if the model has no limit.
    """
    return getattr(_limit_of(model), "joint_plan", None)


def _count(micro_batches: object) -> int:
    if isinstance(micro_batches, bool) or not isinstance(micro_batches, int) or micro_batches < 1:
        raise ValueError(f"micro_batches must be a whole number of at least 1, not {micro_batches!r}")
    return micro_batches


def _check_checkpoints(checkpoints: Sequence[Any], budget: int | str | None) -> None:
    if budget not in (None, _DEFAULT):
        raise ValueError(f"limit_memory takes a budget or checkpoints, not both (budget={budget!r}); leave one out")
    if isinstance(checkpoints, str):
        raise TypeError(f"checkpoints takes a list of names, not the string {checkpoints!r}; write [{checkpoints!r}]")


def _no_model(model: Any) -> Exception:
    if type(model).__module__.partition(".")[0] == "tf_keras" or any(
        base.__module__.partition(".")[0] == "tf_keras" for base in type(model).__mro__
    ):
        return UnsupportedStep(
            f"{getattr(model, 'name', model)!r} is a tf_keras model, and limit_memory needs Keras 3; build the model "
            "with keras, or use remat.tensorflow.recompute on its layers, or remat.tensorflow.GradientTape in its "
            "train_step"
        )
    return TypeError(f"limit_memory takes a keras.Model, not {type(model).__name__}")


def is_limited(model: keras.Model) -> bool:
    """Has ``limit_memory`` been called on the model?"""
    return model in _limits


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
