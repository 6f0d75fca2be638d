"""``limit_memory``: a function that returns a loss, within a budget, in whatever loop or trainer calls it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

from remat.core.budget import check_budget
from remat.fit.first_step import OnChange, replans
from remat.torch.api.compile import compile
from remat.torch.api.eager_limit import eagerly


def limit_memory(
    loss_fn: Callable[..., Any] | None = None,
    budget: int | str = "60%",
    *,
    mode: Literal["eager", "graph"] = "eager",
    on_change: OnChange = "replan",
    strict: bool = False,
    **options: Any,
) -> Any:
    """Run a function that returns a loss within a byte budget, with the same numbers.

    One line for trainers that call such a function themselves::

        trainer.compute_loss = remat.torch.limit_memory(trainer.compute_loss, "4GiB")   # Hugging Face

        @remat.torch.limit_memory(budget="4GiB")                                        # a method of a module
        def loss(self, x, y): ...

    The first call plans, which runs the function once on tensors without values: what it does beside computing (a log,
    a counter) happens then as well. Calls without gradients (evaluation) are left alone.

    Args:
        loss_fn: returns the loss, a mapping with "loss", or a tuple that begins with it. None gives a decorator.
        budget: as ``plan`` takes it. A share means one of the first plan's plain step.
        mode: "eager" watches the operators of the step, as ``apply`` does; "graph" captures the function and runs the
            plan itself, as ``compile(backend="aten")`` does, with the same numbers at less cost on the host. What
            cannot be captured then runs as with "eager", and a warning says why.
        on_change: what happens to a step that departs from its plan, with tensors of other shapes or through another
            branch: "replan" plans such steps too, up to three plans for the same shapes; "keep" runs them under the
            first plan, where they keep what plain PyTorch keeps from the place on where they depart. "replan" also
            plans once more, for what it really took, a step whose first run takes more than the budget.
        strict: raise an error where the budget does not hold then either; else this is logged as a warning, once.
        **options: passed on to ``plan``; with mode="graph" to ``compile``.

    Returns:
        A function like ``loss_fn``, with the plans made so far in ``plans``. Each plan's ``mode`` says how it is
        carried out.

    Raises:
        InvalidBudget: if the budget cannot be read.
        PlanMismatch: with ``strict``, from the backward pass of a step that takes more than the budget.
        InfeasibleBudget: if no plan fits; with ``strict``, also where none leaves room for what a first step took.
        ValueError: for another ``on_change`` or ``mode``, and for "keep" in graph mode, which plans what it captures.
    """
    if mode not in ("eager", "graph"):
        raise ValueError(f'mode={mode!r} is unknown; it is "eager" or "graph"')
    plans_again = replans(on_change)
    if mode == "graph" and on_change == "keep":
        raise ValueError(
            'on_change="keep" needs mode="eager"; graph mode plans each combination of shapes that it meets'
        )
    check_budget(budget)
    if loss_fn is None:
        return functools.partial(limit_memory, budget=budget, mode=mode, on_change=on_change, strict=strict, **options)
    if mode == "graph":
        return _in_graph_mode(loss_fn, budget, strict, options)
    return eagerly(loss_fn, budget, plans_again, strict, options, [])


def _in_graph_mode(function: Callable[..., Any], budget: int | str, strict: bool, options: dict[str, Any]) -> Any:
    resident = {id(t.untyped_storage()): t.untyped_storage().nbytes() for t in options.pop("resident", ())}
    options["resident_bytes"] = options.get("resident_bytes", 0) + sum(resident.values())
    compiled: Any = compile(function, budget=budget, backend="aten", strict=strict, first_share=True, **options)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return compiled(*args, **kwargs)

    run.plans = compiled.plans  # type: ignore[attr-defined]
    return run
