"""``limit_memory``, ``plan_of`` and ``graph_of``: one entry for every backend of Keras."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

import keras

from remat.core.errors import UnsupportedStep
from remat.core.graph import Graph
from remat.core.plan import Plan
from remat.fit.first_step import OnChange, replans
from remat.fit.request import FIT_LEVERS, Request
from remat.keras.shared.backend import of_backend
from remat.micro_batches.cut import AUTO, check_count_or_auto
from remat.micro_batches.options import MicroBatchChoice

if TYPE_CHECKING:
    from remat.keras.shared.limit import ModelLimit

_NAME: Final = "_remat_limit"
"""Where a model holds its limit. A limit holds functions that hold the model, so that in a dictionary of weak keys both
would live as long as the program."""

_NOT_GIVEN: Final = "not given"
"""The default of ``budget``, which None is not: None takes a limit off. It is no budget that anybody would write."""


def limit_memory(
    model: keras.Model,
    budget: int | str | None = _NOT_GIVEN,
    *,
    checkpoints: Sequence[Any] | None = None,
    micro_batches: int | str = 1,
    planner: str = "auto",
    time_limit_s: float | None = None,
    on_change: OnChange = "replan",
    strict: bool = False,
    check_first_step: bool = False,
    mode: Literal["auto", "graph", "eager"] = "auto",
    levers: Sequence[str] | None = None,
    **options: Any,
) -> keras.Model:
    """Make ``fit`` and ``train_on_batch`` keep a memory budget; everything else stays as it is.

    The first training step is traced, planned and rewritten; that takes seconds once. The numbers are those of
    plain training. The limit belongs to this object: it survives ``compile`` but is not saved with the
    model, so call this again after loading.

    Args:
        model: a Functional, Sequential or subclassed model, compiled or not. Its own ``train_step`` is kept.
        budget: peak device bytes of a training step, everything counted: an int, "4GiB", "60%" of the predicted peak of
            the plain step of a whole batch, with micro-batches too, or "auto" for a GPU's memory less a margin. None
            takes a limit off again; with a number of micro-batches or with checkpoints it recomputes nothing for a
            budget. Not given, it is "60%", or None with a number of micro-batches or with checkpoints.
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
        on_change: what happens where the first planned step takes more than the budget by more than 1 %: "replan" plans
            it once more, for what it took; "keep" leaves the plan. On TensorFlow its memory is read from the device's
            counter, where there is one; on JAX the compiler says it beforehand; on PyTorch nothing is planned again
            outside of graph mode.
        strict: raise an error where the budget does not hold then either; else this is logged as a warning, once.
        check_first_step: run the first training step without the plan, too, from the same weights and random numbers,
            and compare weights, optimizer state, statistics, seeds and loss. What differs by more than rounding is
            logged as a warning, or with ``strict`` raised. It needs the memory of the plain step, and time for two of
            them; the step that counts is the planned one.
        mode: on PyTorch: "graph" captures the training step and runs the plan itself, with the same numbers at less
            cost on the host; "eager" watches its operators. "auto", the only one elsewhere, is "graph" where that can
            be had: not where the step cannot be captured, nor with ``micro_batches="auto"`` where more than one was
            chosen; a warning says so. ``plan_of(model).mode`` tells which it is.
        levers: what a plan may do to keep the budget. "recompute" runs operations again. "micro_batches" means
            ``micro_batches="auto"`` where no number is given. "split" runs the widest part of the step that can be cut
            along an axis, such as the head of a language model, slice by slice; sums over slices are made in another
            order, so that numbers differ by rounding. On PyTorch it needs graph mode. "update" runs each update of the
            optimizer as soon as its gradient is final; the plan says what forbids it. On PyTorch it needs graph mode,
            too. It is for the whole batch: with micro-batches the update waits for all of them. On TensorFlow and JAX
            each micro-batch may run in slices, on PyTorch only a whole batch. None is ("recompute",), on TensorFlow
            ("recompute", "update"): what changes no number.
        options: passed on to the planner.

    Returns:
        The same model. On TensorFlow with a counter, and on PyTorch, ``plan_of(model).measured_peak_bytes`` is what
        the first planned step took.

    Raises:
        InvalidBudget: if the budget cannot be read.
        ValueError: for both a budget and checkpoints, a layer that the model does not have, an unknown planner or
            mode, ``micro_batches`` that is neither a whole number of at least 1 nor "auto" with a budget,
            ``mode="graph"`` with ``micro_batches="auto"``, and for levers that are none, unknown, or given without
            a budget.
        UnsupportedStep: for a lever that the backend does not have, or not together with the others; for another
            backend than TensorFlow, JAX and PyTorch, or ``run_eagerly`` on the first two; by ``fit`` on several
            replicas for what docs/tensorflow.md says is not there;
            on PyTorch for a model with its own ``train_step``, or a checkpoint that names a tensor; with a number of
            micro-batches likewise, and by ``fit`` for a loss of which it cannot be known what it divides by. By ``fit``
            for a checkpoint that the training step lacks.
        InfeasibleBudget: by ``fit``, at the first step, if no schedule fits; it names the smallest budget.
        PlanMismatch: with ``strict``, by ``fit``, after a first step that took more than the budget, or that was not
            the plain one.
    """
    if not isinstance(model, keras.Model):
        raise _no_model(model)
    if checkpoints is not None:
        _check_checkpoints(checkpoints, budget)
    if budget == _NOT_GIVEN:
        budget = "60%" if micro_batches in (1, AUTO) and checkpoints is None else None
    request = Request(
        budget,
        checkpoints=checkpoints,
        planner=planner,
        time_limit_s=time_limit_s,
        options=options,
        levers=("recompute",) if levers is None else levers if isinstance(levers, str) else tuple(levers),  # type: ignore[arg-type]
    ).check("limit_memory", takes_levers=FIT_LEVERS)
    if request.levers != ("recompute",) and budget is None:
        raise ValueError(
            f"levers={request.levers!r} say how a budget is kept, and there is none; give one, or no levers"
        )
    if "micro_batches" in request.levers and micro_batches == 1:
        micro_batches = AUTO
    count = check_count_or_auto(micro_batches, budget)
    plans_again = replans(on_change)
    in_mode = _checked_mode(mode, micro_batches)
    if request.plans or count != 1:
        limits = of_backend("limit", "limit_memory")
        if levers is None and budget is not None and count in (1, None):
            request = dataclasses.replace(request, levers=limits.Limit.default_levers)
        _take_off(model)
        # Past Keras, which looks at what is assigned to a model for layers and variables.
        vars(model)[_NAME] = limits.Limit(
            *(model, request, count),
            replans=plans_again,
            strict=strict,
            checks_first_step=check_first_step,
            **in_mode,
        )
    else:
        _take_off(model)
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


def micro_batch_choice_of(model: keras.Model) -> MicroBatchChoice | None:
    """What ``micro_batches="auto"`` has chosen, and from what; None before the first training step, or with a number.

    Raises:
        ValueError: if the model has no limit.
    """
    return _limit_of(model).choice


joint_plan_of = micro_batch_choice_of
"""The earlier name of ``micro_batch_choice_of``; it stays for programs that call it."""


def is_limited(model: keras.Model) -> bool:
    """Has ``limit_memory`` been called on the model?"""
    return _limit_on(model) is not None


def _limit_on(model: keras.Model) -> ModelLimit | None:
    limit: ModelLimit | None = vars(model).get(_NAME)
    return limit if limit is not None and limit.is_of(model) else None  # A shallow copy shares what a model holds.


def _limit_of(model: keras.Model) -> ModelLimit:
    limit = _limit_on(model)
    if limit is None:
        raise ValueError(f"{model.name!r} has no memory limit; call remat.keras.limit_memory(model, budget=...) first")
    return limit


def _take_off(model: keras.Model) -> None:
    if (limit := _limit_on(model)) is not None:
        del vars(model)[_NAME]
        limit.detach()


def _checked_mode(mode: str, micro_batches: int | str) -> dict[str, str]:
    """The mode as an argument of PyTorch's ``Limit``; nothing where the backend decides."""
    if mode not in ("auto", "graph", "eager"):
        raise ValueError(f'mode={mode!r} is unknown; it is "auto", "graph" or "eager"')
    if mode == "auto":
        return {}
    if keras.backend.backend() != "torch":
        raise ValueError(f"mode={mode!r} is for Keras on PyTorch; on {keras.backend.backend()} leave it out")
    if mode == "graph" and micro_batches == AUTO:
        raise ValueError(
            'mode="graph" takes a number of micro_batches: "auto" chooses by the times of eager steps; leave one out'
        )
    return {"mode": mode}


def _check_checkpoints(checkpoints: Sequence[Any], budget: int | str | None) -> None:
    if budget not in (None, _NOT_GIVEN):
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
