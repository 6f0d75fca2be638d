"""``limit_memory``: a function that returns a loss, within a budget, in whatever loop or trainer calls it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast, get_args

import torch

from remat.core.budget import check_budget
from remat.fit.first_step import OnChange, replans
from remat.torch.api.compile import compile
from remat.torch.api.eager_limit import eagerly

Mode = Literal["auto", "graph", "eager"]
"""How a step is carried out: "graph" captures it, "eager" watches its operators; "auto" is "graph" where that can be
had."""


def limit_memory(
    loss_fn: Callable[..., Any] | None = None,
    budget: int | str | None = None,
    *,
    mode: Mode = "auto",
    on_change: OnChange = "replan",
    strict: bool = False,
    levers: Sequence[str] = ("recompute",),
    **options: Any,
) -> Any:
    """Run a function that returns a loss within a byte budget, with the same numbers.

    One line for trainers that call such a function themselves::

        trainer.compute_loss = remat.torch.limit_memory(trainer.compute_loss, "4GiB")   # Hugging Face

        @remat.torch.limit_memory(budget="4GiB")                                        # a method of a module
        def loss(self, x, y): ...

    The first call plans. Calls without gradients (evaluation) are left alone. In eager mode, planning runs the function
    once on tensors without values: what it does beside computing (a log, a counter) happens then as well.

    Args:
        loss_fn: returns the loss, a mapping with "loss", or a tuple that begins with it. None gives a decorator.
        budget: as ``plan`` takes it; "60%" where neither this nor ``checkpoints=`` is given. A share means one of the
            first plan's plain step.
        mode: "graph" captures the function and runs the plan itself, as ``compile(backend="aten")`` does. What cannot
            be captured runs eagerly, and one warning says why and where. "eager" watches the operators of each step, as
            ``apply`` does: the same numbers, at a higher cost on the host. "auto" is "graph" wherever ``on_change``
            allows it.
        on_change: what happens to a step that departs from its plan, with tensors of other shapes or through another
            branch: "replan" plans such steps too, up to three plans for the same shapes; "keep" runs them under the
            first plan, where they keep what plain PyTorch keeps from the place on where they depart. "replan" also
            plans once more, for what it really took, a step whose first run takes more than the budget.
        strict: raise an error where the budget does not hold then either; else this is logged as a warning, once.
        levers: what a plan may do. "recompute" runs operators again. "split" runs the widest region of the step in
            slices, see ``compile``; it needs graph mode. "update", with ``optimizer=``, runs the update of each
            parameter inside of the backward pass.
        **options: passed on to ``compile``; in eager mode to ``plan``. ``checkpoints=``, for one, names modules whose
            results are kept, in place of a budget.

    Returns:
        A function like ``loss_fn``, with the plans made so far in ``plans``. Each plan's ``mode`` says how it is
        carried out. In graph mode, what is made of a module has the module's attributes (``parameters``, ``train``).

    Raises:
        InvalidBudget: if the budget cannot be read.
        PlanMismatch: with ``strict``, from the backward pass of a step that takes more than the budget.
        InfeasibleBudget: if no plan fits; with ``strict``, also where none leaves room for what a first step took.
        ValueError: for another ``on_change`` or ``mode``, for "keep" with ``mode="graph"``, and for levers that are
            none, unknown, or not there in this mode.
    """
    mode = check_mode(mode)
    if "split" in levers and mode == "eager":
        raise ValueError("the lever 'split' needs graph mode: leave it out of levers=, or mode=\"eager\"")
    plans_again = replans(on_change)
    if mode == "graph" and on_change == "keep":
        raise ValueError(
            'on_change="keep" needs mode="eager" or "auto"; graph mode plans each combination of shapes that it meets'
        )
    if budget is None and options.get("checkpoints") is None:
        budget = "60%"
    if budget is not None:
        check_budget(budget)
    if loss_fn is None:
        return functools.partial(
            limit_memory, budget=budget, mode=mode, on_change=on_change, strict=strict, levers=levers, **options
        )
    options["levers"] = tuple(levers)
    if mode == "graph" or (mode == "auto" and plans_again):
        return _in_graph_mode(loss_fn, budget, strict, options)
    return eagerly(loss_fn, budget, plans_again, strict, options, [])


def check_mode(mode: str) -> Mode:
    """A mode, if there is one of this name.

    Raises:
        ValueError: if there is none.
    """
    if mode not in get_args(Mode):
        raise ValueError(f'mode={mode!r} is unknown; it is "auto", "graph" or "eager"')
    return cast("Mode", mode)


def _in_graph_mode(
    function: Callable[..., Any], budget: int | str | None, strict: bool, options: dict[str, Any]
) -> Any:
    resident = {id(t.untyped_storage()): t.untyped_storage().nbytes() for t in options.pop("resident", ())}
    options["resident_bytes"] = options.get("resident_bytes", 0) + sum(resident.values())
    compiled: Any = compile(function, budget=budget, backend="aten", strict=strict, first_share=True, **options)
    if isinstance(function, torch.nn.Module):
        return compiled  # It has the module's parameters.

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return compiled(*args, **kwargs)

    run.plans = compiled.plans  # type: ignore[attr-defined]
    return run
