"""More of a budget for the steps behind the first ones: a plan for what these have shown of TensorFlow's heap.

Before a step has run, its plan has to fit the worst order in which its operations may run, and a typical step leaves 4
to 14 % of the budget unused. Steps that have run show what they take in this process. Where the same budget holds a
cheaper plan then, the step is traced once more. The seconds that this takes have to come in again.
"""

from __future__ import annotations

import dataclasses
import logging
import statistics
from typing import Any, Final

import keras

from remat.core.budget import format_bytes
from remat.core.errors import InfeasibleBudget
from remat.core.plan import Plan
from remat.fit.fit import fit
from remat.fit.request import Request
from remat.fit.variants import Variants
from remat.tensorflow.emit.emit import Rewritten
from remat.tensorflow.loops.variants import Variant
from remat.tensorflow.peak.allocator import AllocatorModel
from remat.tensorflow.peak.candidates import ExecutedFunction

_log = logging.getLogger("remat")

_LEAST_UNUSED: Final = 0.05
"""The share of a budget that has to be left unused, else the step stays as it is. A judgement: less buys a point of
extra time at most budgets."""

_LEAST_GAIN: Final = 0.01
"""The share of a step's time that the cheaper plan has to save. A judgement: steps differ by more from run to run."""

_LEAST_EXTRA: Final = 0.03
"""The extra time that the plan in force has to cost, as a share of the plain step. A judgement: what could be won of
less is not worth a search of some seconds."""

_SAME: Final = 0.01
"""Peaks of two steps that differ by a smaller share are the same."""


class WholeBudget:
    """Watches the first steps under a plan, and then decides, once, whether the step is planned again.

    Attributes:
        follows: the plan that the next trace is to follow; None before the decision.
    """

    def __init__(self) -> None:
        self.follows: Plan | None = None
        self._before: Plan | None = None
        self._is_over = False
        self.begin()

    def begin(self) -> None:
        """The step has been traced: the steps that follow are the first under its plan."""
        self._seconds: list[float] = []
        self._peaks: list[int] = []

    def add_step(self, seconds: float, peak_bytes: int) -> None:
        """Note what a step took.

        Args:
            seconds: the first step's are those of its trace and its plan, too.
            peak_bytes: the device's largest peak by its end, which never falls.
        """
        self._seconds.append(seconds)
        self._peaks.append(peak_bytes)

    def finds_cheaper(
        self, rewritten: Rewritten, allocator: AllocatorModel, request: Request, fitted: keras.Model | None
    ) -> bool:
        """Is there a cheaper plan within the budget on the heap that the steps have shown? ``follows`` is that plan.

        Args:
            rewritten: the plan in force, and the step that it is for.
            allocator: of the device.
            request: what was asked for.
            fitted: the model in whose ``fit`` this is; None where nobody knows how many steps will follow.
        """
        plan = rewritten.plan
        if self._is_over or plan.split is not None or len(self._seconds) < 2:
            return False
        plain_s = statistics.median(self._seconds[1:]) / (1 + plan.expected_overhead)
        left = None if fitted is None else _calls_left(fitted)

        def is_worth(gain: float, cost_s: float) -> bool:
            return gain > _LEAST_GAIN and (left is None or gain * plain_s * left > cost_s)

        if plan.expected_overhead < _LEAST_EXTRA or not is_worth(plan.expected_overhead, self._seconds[0]):
            return False  # Asked again after the next step: another training may be longer.
        self._is_over = True
        found = self._plan_on_shown_heap(rewritten, allocator, request)
        retrace_s = self._seconds[0] - plan.plan_seconds
        if found is None or not is_worth(plan.expected_overhead - found.expected_overhead, retrace_s):
            return False
        _log.info(
            "The first %d steps took %s of the budget of %s. The step is planned again for what is left: %+.1f %% of "
            "the plain step's time, in place of %+.1f",
            *(len(self._peaks), format_bytes(self._peaks[-1]), format_bytes(plan.budget_bytes)),
            *(100 * found.expected_overhead, 100 * plan.expected_overhead),
        )
        self.follows, self._before = found, dataclasses.replace(plan, measured_peak_bytes=None)
        return True

    def takes_back(self, plan: Plan, measured_bytes: int) -> bool:
        """Has a step under the cheaper plan taken more than its budget? Then ``follows`` is the plan before it."""
        if self._before is None or measured_bytes <= plan.budget_bytes:
            return False
        _log.warning(
            "A step under the plan for the whole budget of %s took %s. The plan before it is in force again.",
            *(format_bytes(plan.budget_bytes), format_bytes(measured_bytes)),
        )
        self.follows, self._before = self._before, None
        return True

    def _plan_on_shown_heap(self, rewritten: Rewritten, allocator: AllocatorModel, request: Request) -> Plan | None:
        plan, step = rewritten.plan, rewritten.step
        beside_bytes = plan.peak_bytes - allocator.peak_range(step.graph, plan.schedule).expected_bytes
        peak_bytes, differed = self._peaks[-1] - beside_bytes, self._peaks[-1] > (1 + _SAME) * self._peaks[0]
        shown = allocator.after_steps(step.graph, plan.schedule, peak_bytes, differed=differed)
        candidate = ExecutedFunction(Variants([lambda: Variant(step)]), shown, beside_bytes)
        target_bytes = candidate.target_bytes(plan.budget_bytes)
        if candidate.real_peak(plan).highest_bytes > (1 - _LEAST_UNUSED) * target_bytes:
            return None
        again = Request(
            plan.budget_bytes, planner=request.planner, time_limit_s=request.time_limit_s, options=request.options
        )
        try:
            return fit(candidate, again, share_of_bytes=plan.baseline_peak_bytes)
        except InfeasibleBudget:  # A planner within a time limit may find less than it did before.
            return None


def _calls_left(model: keras.Model) -> int | None:
    """How many calls of its training function a model's ``fit`` still makes, about; None where nobody knows."""
    history: Any = getattr(model, "history", None)
    params: dict[str, Any] = getattr(history, "params", None) or {}
    epochs, steps = params.get("epochs"), params.get("steps")
    if not epochs or not steps:
        return None
    done = history.epoch[-1] + 1 if history.epoch else 0
    return max(0, (int(epochs) - int(done)) * int(steps) // int(model.steps_per_execution))
