"""``RecomputeOptimizer``: any optimizer of Paddle, whose ``minimize`` makes a program that keeps a budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import paddle

from remat.core.errors import UnsupportedStep
from remat.fit.request import Request
from remat.paddle.api.plan_program import plan_program
from remat.paddle.candidate import ProgramPlan
from remat.paddle.sequential import plan_at_first_run, plan_in
from remat.paddle.trace.sizes import has_open_sizes


class RecomputeOptimizer:
    """An optimizer for static programs that drops activations and makes them again, as Paddle's own of this name did.

    ::

        optimizer = remat.paddle.RecomputeOptimizer(paddle.optimizer.Adam(), budget="4GiB")
        optimizer.minimize(loss)

        optimizer = remat.paddle.RecomputeOptimizer(paddle.optimizer.Adam())
        optimizer._set_checkpoints([hidden, prediction])        # or checkpoints= above
        optimizer.minimize(loss)

    Everything else that the inner optimizer has (its schedule, ``set_lr``, ``state_dict``) is reached through this one.

    Args:
        inner: an optimizer of Paddle, or what ``paddle.static.amp.decorate`` made of one.
        budget: as ``plan_program`` takes it.
        checkpoints: values to keep, or names of inputs and parameters; all else is recomputed.
        batch_size: what an open first dimension is in a step. Without it such a program is planned at its first
            ``exe.run``, whose feed says so; errors then come from there.
        **planning: ``planner``, ``time_limit_s``, ``resident_bytes`` and what else ``plan_program`` takes.

    Raises:
        TypeError: for what is no optimizer, and for checkpoints that are no list.
        ValueError: for both a budget and checkpoints.
        InvalidBudget: for a budget that cannot be read.
    """

    def __init__(
        self,
        inner: Any,
        budget: int | str | None = None,
        checkpoints: Sequence[Any] | None = None,
        *,
        batch_size: int | None = None,
        **planning: Any,
    ) -> None:
        Request(budget).check("remat.paddle.RecomputeOptimizer", takes_auto=False)
        if not callable(getattr(inner, "minimize", None)):
            raise TypeError(
                f"RecomputeOptimizer wraps an optimizer of Paddle, not {type(inner).__name__} ({inner!r}); such as "
                "paddle.optimizer.Adam(1e-3)"
            )
        self._inner = inner
        self._budget = budget
        self._checkpoints: Sequence[Any] | None = None
        if checkpoints is not None:
            self._set_checkpoints(checkpoints)
        self._batch_size = batch_size
        self._planning = planning
        self._program: Any = None

    def __getattr__(self, name: str) -> Any:
        inner = self.__dict__.get("_inner")  # A copy that is being made has none yet.
        if inner is None:
            raise AttributeError(name)
        return getattr(inner, name)

    def _set_checkpoints(self, checkpoints: Sequence[Any]) -> None:
        """Name what is kept: values as layers returned them, or names of inputs and parameters.

        Raises:
            TypeError: for what is no list.
            ValueError: beside a budget.
        """
        if not isinstance(checkpoints, list | tuple):
            raise TypeError(f"_set_checkpoints takes a list of values, not {type(checkpoints).__name__}")
        Request(self._budget, checkpoints=checkpoints).check("remat.paddle.RecomputeOptimizer", takes_auto=False)
        self._checkpoints = checkpoints

    @property
    def plan(self) -> ProgramPlan | None:
        """The plan of the program that was minimized last; None before it was planned."""
        found: ProgramPlan | None = None if self._program is None else plan_in(self._program)
        return found

    def minimize(self, loss: Any, *args: Any, **kwargs: Any) -> Any:
        """Append the backward pass and the update as the inner optimizer does, then plan the program.

        Args:
            loss: what is minimized.
            *args: further arguments of the inner optimizer's ``minimize``.
            **kwargs: those by name.

        Returns:
            What the inner ``minimize`` returns.

        Raises:
            ValueError: where neither a budget nor checkpoints were given.
            InfeasibleBudget: where no schedule fits; it names the smallest budget.
            UnsupportedStep: outside of static programs, and as ``plan_program`` says.
        """
        self._check_is_told()
        result = self._inner.minimize(loss, *args, **kwargs)
        self._plan(loss, [])
        return result

    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> Any:
        """Append the backward pass and plan it; ``apply_gradients`` follows, with what you do to the gradients between.

        Between the two, gradients may be reduced over processes, clipped or scaled: that is neither planned nor moved.

        Returns:
            Pairs of a parameter and its gradient, as the inner ``backward`` returns them.
        """
        self._check_is_told()
        pairs = self._inner.backward(loss, *args, **kwargs)
        self._plan(loss, [gradient for _, gradient in pairs if gradient is not None])
        return pairs

    def _check_is_told(self) -> None:
        if paddle.in_dynamic_mode():
            raise UnsupportedStep(
                "RecomputeOptimizer is for static programs (paddle.enable_static()); for a layer in an ordinary loop "
                "call remat.paddle.limit_memory(layer, budget) and keep your optimizer"
            )
        if self._budget is None and self._checkpoints is None:
            raise ValueError(
                'RecomputeOptimizer was given neither budget= nor checkpoints=; give budget="60%", or call '
                "_set_checkpoints([...]) before minimize"
            )

    def _plan(self, loss: Any, kept: Sequence[Any]) -> None:
        program = self._program = loss.block.program

        def plan(**known: Any) -> ProgramPlan:
            fetched = {"fetch_list": [loss, *kept, *known.pop("fetch_list", ())]}
            return plan_program(
                program, self._budget, checkpoints=self._checkpoints, **{**self._planning, **fetched, **known}
            )

        if self._batch_size is None and has_open_sizes(program):
            plan_at_first_run(program, plan)
        else:
            plan(batch_size=self._batch_size)
