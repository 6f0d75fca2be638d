"""A function that returns a loss, run eagerly within a budget: planned at its first call, and when it changes."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from remat.core.errors import InfeasibleBudget, UnsupportedStep
from remat.fit.first_step import no_room_for_excess
from remat.torch import _private
from remat.torch.api.apply import Applied
from remat.torch.api.plan import StepPlan, plan
from remat.torch.new_shapes import NewShapes
from remat.torch.trace.watcher import answered_as

_log = logging.getLogger("remat")

_MOST_PLANS: Final = 3
"""Plans for one combination of shapes. A judgement, not measured: a step that departs from all of them branches too
often to be planned. With more, such a step is planned over and over; with fewer, one with a rare branch is not limited
there."""

_THOROUGH_SHAPES: Final = 3
"""Combinations of shapes that are planned with all the work that there is; of later ones a plan is taken that is found
with little. Where batches have ever other shapes, such as texts padded to their longest, no shape comes often enough
for the rest to pay: a BERT of six layers, 50 to 160 tokens, took 10 s of processor time for each at 150 MiB, and takes
1.5 to 2.7, where a plain step takes .4 to .8."""

_MOST_SHAPES: Final = 256
"""Combinations of shapes whose plans are kept; those of the one that was not met for longest go first. A judgement:
plans of that BERT take 3.3 MiB each. With more, pictures of any size fill the memory; with fewer, what comes again is
planned again."""


def eagerly(
    function: Callable[..., Any],
    budget: int | str | None,
    plans_again: bool,
    strict: bool,
    options: dict[str, Any],
    plans: list[Any],
) -> Any:
    """What ``limit_memory`` returns in eager mode; the arguments are its own.

    Args:
        function: returns the loss.
        budget: in bytes or as a share; None where ``options`` name what is kept.
        plans_again: is a step that departs from its plan planned?
        strict: is a step over its budget an error?
        options: passed on to ``plan``.
        plans: where plans are added as they are made.
    """
    limit = EagerLimit(function, budget, plans_again, strict, options, plans)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        with limit.applied_for(args, kwargs):
            return function(*args, **kwargs)

    run.plans = plans  # type: ignore[attr-defined]
    return run


class EagerLimit:
    """The plans of one function, made as calls come; the arguments are those of ``eagerly``, and one more.

    Args:
        met_before: combinations of shapes that are planned in another way.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        budget: int | str | None,
        replans: bool,
        strict: bool,
        options: dict[str, Any],
        plans: list[Any],
        met_before: int = 0,
    ) -> None:
        self._loss_fn = loss_fn
        self._budget = budget
        self._replans = replans
        self._strict = strict
        self._options = options
        self._corrected: set[Any] = set()
        # Calls whose steps depart from their plan, and cannot be traced through the branch that they take.
        self._given_up: set[Any] = set()
        # By shapes; what was met last stands last.
        self._applied: dict[Any, list[Applied]] = {}
        self._met_before = met_before
        self._shapes = NewShapes(met_before)
        # What the steps planned so far do with the gradients of sharded modules.
        self._accumulations: list[Any] = []
        self.plans = plans

    def applied_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Applied:
        """The plan for a call with these arguments.

        Raises:
            InfeasibleBudget: if no plan fits.
            UnsupportedStep: where the step needs numbers that are not known before it runs. Where that comes up once a
                step has departed from its plan, it keeps that plan and says so, unless ``strict``.
        """
        key = self._key(args, kwargs)
        known = self._applied.get(key, [])
        if known:
            self._applied[key] = self._applied.pop(key)
        if key in self._given_up:
            return known[-1]
        try:
            return self._planned_for(args, kwargs, key, known)
        except UnsupportedStep as error:
            if not known or self._strict:
                raise
            self._given_up.add(key)
            _log.warning(
                "A step took another branch than was planned, which cannot be planned: %s. It runs on under the plan "
                "that it has: its numbers are right, its memory is not limited. This is said once.",
                error,
            )
            return known[-1]

    def _planned_for(self, args: tuple[Any, ...], kwargs: dict[str, Any], key: Any, known: list[Applied]) -> Applied:
        followed = [applied for applied in known if not applied.departures]
        excess = known[-1].excess_bytes if known else 0
        # A step that branched on values that nobody knew beforehand is traced again through the branch that it took.
        answers = known[-1].answers if known else ()
        if self._replans and excess and key not in self._corrected:
            # What the step took more than was simulated counts as there from the start. If it went through another
            # branch, the trace of this one may say it all.
            self._corrected.add(key)
            another_branch = known[-1].first_difference is not None
            excess = 0 if another_branch else excess
            known.append(self._applied_with(args, kwargs, excess, plans_again=False, answers=answers))
        elif not known or (self._replans and not followed and len(known) < _MOST_PLANS):
            plans_again = self._replans and key not in self._corrected
            found = self._applied_with(args, kwargs, 0, plans_again=plans_again, answers=answers)
            key = self._key(args, kwargs)  # The plan knows which modules of the step are sharded.
            known = self._applied.setdefault(key, [])
            known.append(found)
            if key is not None:
                self._plan_last(args, kwargs, *key)
            self._shapes.count(len(self._applied))
            self._forget_oldest()
        return known[-1]

    def _forget_oldest(self) -> None:
        """Let go of plans for shapes that were not met for long; the first plan stays, which a share is one of."""
        while len(self._applied) > _MOST_SHAPES:
            key = next(iter(self._applied))
            forgotten = [id(applied.plan) for applied in self._applied.pop(key)]
            self._corrected.discard(key)
            self._given_up.discard(key)
            self.plans[1:] = [plan for plan in self.plans[1:] if id(plan) not in forgotten]

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Of the plans for a call with these arguments; None for all calls."""
        if not self._replans:
            return None
        shapes = tuple((tuple(t.shape), t.dtype) for t in _tensors((args, kwargs)))
        return shapes, _private.reduction(self._accumulations)

    def _plan_last(self, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Any, reduction: Any) -> None:
        """Before the first of several steps that reduce gradients once: plan the last of them, which may need more.

        Raises:
            InfeasibleBudget: if it cannot keep the budget.
        """
        with _private.last_of_several(self._accumulations) as last:
            if last == reduction or (shapes, last) in self._applied:
                return
            try:
                found = self._applied_with(args, kwargs, 0, plans_again=True)
            except InfeasibleBudget as error:
                raise error.saying(f"of several steps that reduce gradients once, the last: {error}") from error
        self._applied[shapes, last] = [found]

    def _applied_with(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        excess_bytes: int,
        *,
        plans_again: bool,
        answers: Sequence[bool] = (),
    ) -> Applied:
        try:
            found = self._plan(args, kwargs, excess_bytes, answers)
        except InfeasibleBudget as error:
            if not excess_bytes:
                raise
            _log.warning("%s", no_room_for_excess(excess_bytes, error.minimum_bytes))
            return Applied(self.plans[-1], strict=self._strict)
        return Applied(found, strict=self._strict, uncounted_bytes=excess_bytes, plans_again=plans_again)

    def _plan(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], excess_bytes: int, answers: Sequence[bool]
    ) -> StepPlan:
        def loss_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return loss_in(self._loss_fn(*args, **kwargs))

        # Later steps may be smaller; a share stays one of the first.
        budget = self.plans[0].budget_bytes if self.plans and self._budget is not None else self._budget
        options = {**self._options, "resident_bytes": self._options.get("resident_bytes", 0) + excess_bytes}
        with answered_as(answers):
            found = self._with_less_work(loss_of, args, kwargs, budget, options)
            if found is None:
                found = plan(loss_of, args, kwargs, budget=budget, **options)
        self.plans.append(found)
        if found.step.recording.accumulation is not None:
            self._accumulations.append(found.step.recording.accumulation)
        if len(self.plans) > 1:
            _log.info("Planned again, for a step that the earlier plans are not for:\n%s", found)
        return found

    def _with_less_work(
        self,
        loss_of: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        budget: int | str | None,
        options: dict[str, Any],
    ) -> StepPlan | None:
        """The plan for one of many shapes; None where there are few, where the user says how to plan, or none fits."""
        says_how = options.get("planner", "auto") != "auto" or options.get("time_limit_s") is not None
        are_few = self._met_before + len(self._applied) < _THOROUGH_SHAPES
        if budget is None or says_how or "thorough" in options or are_few:
            return None
        with contextlib.suppress(InfeasibleBudget):
            return plan(loss_of, args, kwargs, budget=budget, **options, thorough=False)
        return None


def loss_in(result: Any) -> Any:
    """The loss in what a function returned: the loss itself, a mapping with "loss", or a tuple that begins with it."""
    if isinstance(result, Mapping):
        return result["loss"]
    return result[0] if isinstance(result, tuple) else result


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors among arguments, in mappings of any kind too."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _tensors(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
