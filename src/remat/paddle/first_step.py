"""The first step under a plan, held against its budget by Paddle's own counter.

A plan knows a layer. What else lies in memory while the layer's step runs is seen when it runs: the loss that is
computed outside of the layer, gradients that ``clear_grad`` keeps as zeros, the state of an optimizer.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterable
from typing import Any, Final, Protocol

from remat.core.budget import format_bytes
from remat.core.errors import InfeasibleBudget
from remat.core.plan import Plan
from remat.fit.first_step import broken_budget, exceeds, no_room_for_excess, tell
from remat.paddle import _private
from remat.paddle.emit.fences import settled_bytes
from remat.paddle.tensors import bytes_of

_log = logging.getLogger("remat")

_ATTEMPTS: Final = 3
"""Calls that are measured until one of them has a backward pass of its own. A judgement: each costs a collection of
garbage, and a step that goes another way three times will not change."""

MOST_CORRECTIONS: Final = 3
"""How often a signature is planned again for what a step took. What lies beside a layer may be there only for a part of
the step, or grow after it: an optimizer makes its state in its first update. One correction does in most models of
``tests/paddle``. Fewer, a step stays over its budget; more, a trace and a plan each for little."""

_newest: weakref.ref[FirstStep] | None = None
"""That of the call which began last. Where another layer is called before it is over, it would count that layer."""


class Training(Protocol):
    """What trains a layer, as ``paddle.Model`` does.

    Attributes:
        gradients_are_cleared: were the gradients set to zero after the last step, and will this step make new ones?
    """

    gradients_are_cleared: bool

    def state_bytes(self) -> int:
        """Bytes of the optimizer's state at this moment."""


class FirstStep:
    """The first step under a plan: from the call of a layer to the last gradient that its backward pass makes.

    Args:
        plan: that the step follows; what it takes is noted there.
        there_bytes: what the plan counts beside the layer: gradients and the like that were there when it was made.
        counted_bytes: what lies there before the call and is part of the plan's peak.
        plans_again: will whoever made the plan make another where the budget is broken? Then nothing is said.
        strict: is a broken budget an error?
    """

    def __init__(
        self, plan: Plan, there_bytes: int, counted_bytes: int, *, plans_again: bool = False, strict: bool = False
    ) -> None:
        self.plan = plan
        self._there_bytes = there_bytes
        self._counted_bytes = counted_bytes
        self._plans_again = plans_again
        self._strict = strict
        self._attempts = 0
        self._before: int | None = None
        self._taken_bytes = 0
        self._message: str | None = None
        self._is_told = False
        self._is_judged = False

    def begin(self, more_counted_bytes: int = 0) -> None:
        """Start to measure, if that is still wanted.

        Args:
            more_counted_bytes: what else lies there before this step and is part of the plan's peak.
        """
        global _newest
        other = None if _newest is None else _newest()
        if other is not None and other is not self:
            other.cancel()
        _newest = weakref.ref(self)
        if self._taken_bytes or self._is_judged or self._attempts >= _ATTEMPTS:
            self._before = None
            return
        self._attempts += 1
        if _private.is_on_gpu():
            self._attempts = _ATTEMPTS  # Paddle's counter of the host's memory says nothing there.
            return
        gc.collect()  # What an earlier step left in circles is no part of this one.
        self._before = settled_bytes() - more_counted_bytes
        _private.reset_peak()

    def cancel(self) -> None:
        """Measure nothing, as another limited layer runs within this step; each budget is that of its own layer."""
        if not self._taken_bytes:
            self._before = None

    def note(self, _: Any = None) -> None:
        """Note what the step has taken so far: called with each gradient that the backward pass makes."""
        if self._before is None:
            return
        self._taken_bytes = max(self._taken_bytes, self._so_far(self._before))
        self.plan.set_measured_peak(self._taken_bytes)
        if not self._plans_again and exceeds(self.plan, self._taken_bytes):
            self._tell(broken_budget(self.plan, self._taken_bytes, None, compared=False))

    def note_update(self) -> None:
        """Note what the update of the parameters took, where it ended within the same step.

        Raises:
            PlanMismatch: where it took more than the budget, and ``strict`` is set.
        """
        if self._before is None or not self._taken_bytes:
            return
        so_far = self._so_far(self._before)
        self._before = None
        self.plan.set_measured_peak(so_far)
        if so_far > self._taken_bytes and exceeds(self.plan, so_far):
            self._tell(
                f"The optimizer's update took {format_bytes(so_far)}, more than the budget of "
                f"{format_bytes(self.plan.budget_bytes)}, and no recomputation makes it smaller. Ask for as much, or "
                "take an optimizer that keeps less"
            )
        self.raise_if_strict()

    def excess_bytes(self, there_bytes: int) -> int:
        """What the next step is expected to take beyond the prediction, where that breaks the budget; else 0.

        Args:
            there_bytes: what lies beside the layer now.

        Raises:
            PlanMismatch: where the budget is broken, ``strict`` is set, and nobody plans again.
        """
        if self._is_judged or not (self._taken_bytes or self._attempts >= _ATTEMPTS):
            return 0
        self._is_judged = True
        taken_bytes = self._taken_bytes or self.plan.peak_bytes
        expected_bytes = taken_bytes + max(0, there_bytes - self._there_bytes)
        # Another plan may well be had for less than is worth a word.
        if self._plans_again and expected_bytes > self.plan.budget_bytes:
            return expected_bytes - self.plan.peak_bytes
        if exceeds(self.plan, expected_bytes):
            self._tell(broken_budget(self.plan, expected_bytes, None, compared=False))
            self.raise_if_strict()
        return 0

    def tell_no_room(self, excess_bytes: int, there_bytes: int, error: InfeasibleBudget) -> None:
        """Say that no plan leaves room for what the step took, so that the next ones stay over the budget.

        Args:
            excess_bytes: as ``excess_bytes`` returned it.
            there_bytes: how much of that lay there before the step: gradients, mostly.
            error: what the planner said.

        Raises:
            InfeasibleBudget: that, with ``strict``.
        """
        if not exceeds(self.plan, self.plan.peak_bytes + excess_bytes):
            return
        if self._strict:
            raise error
        message = no_room_for_excess(excess_bytes, error.minimum_bytes)
        if there_bytes:
            message = (
                f"{message} {format_bytes(there_bytes)} lay there before the step: an optimizer's state, or gradients "
                "that clear_grad() keeps as zeros and clear_grad(set_to_zero=False) frees."
            )
        _log.warning("%s", message)

    def raise_if_strict(self) -> None:
        """Raise what was found in a backward pass, where Paddle would hide an error.

        Raises:
            PlanMismatch: where the budget was broken, and ``strict`` is set.
        """
        if self._message is not None:
            message, self._message = self._message, None
            tell(message, strict=True)

    def _so_far(self, before: int) -> int:
        return self._counted_bytes + _private.peak_bytes() - before

    def _tell(self, message: str) -> None:
        if self._is_told:
            return
        self._is_told = True
        if self._strict:
            self._message = message
        else:
            tell(message, strict=False)


def gradient_bytes(parameters: Iterable[Any]) -> int:
    """What the gradients of parameters hold at this moment, zeros included."""
    gradients = (parameter.grad for parameter in parameters)
    return bytes_of(one for one in gradients if one is not None)
