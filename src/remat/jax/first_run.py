"""The compiled program that really runs, held against its plan before its first run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Final

from remat.core.errors import InfeasibleBudget, PlanMismatch
from remat.core.plan import Plan
from remat.fit.first_step import broken_budget, exceeds
from remat.jax.peak import peak_of
from remat.jax.planned import Follower

_log = logging.getLogger("remat")


@dataclass(frozen=True)
class OnBroken:
    """What to do about a program that takes more than its budget.

    Attributes:
        replans: is it planned again, once, for as much less as it took too much?
        strict: is it an error where the budget does not hold then either? Else it is logged.
    """

    replans: bool = True
    strict: bool = False


REPLAN: Final = OnBroken()
"""What is done where the user says nothing."""


class FirstRun:
    """Holds what a compiled program takes against the plan that was written into it.

    A plan's predicted peak is what the compiler said of the planned function. The program that runs may hold more: it
    is compiled once more, with all of its options, and around the planned function there may be others.

    Args:
        follower: whose plan is in the program.
        on_broken: what to do where the program takes more than the plan's budget.
    """

    def __init__(self, follower: Follower, on_broken: OnBroken) -> None:
        self._follower = follower
        self._on_broken = on_broken
        self._seen: set[Hashable] = set()

    def forget(self) -> None:
        """Look at every program again."""
        self._seen.clear()

    def check(self, key: Hashable, compiled: Callable[[], Any], trace_again: Callable[[], None]) -> None:
        """Look at the program for arguments of one kind, the first time that they come.

        Args:
            key: of the arguments.
            compiled: the program, as ``jax.stages.Compiled``. JAX keeps it, so that the call that follows compiles
                nothing.
            trace_again: makes JAX trace and compile the function anew.

        Raises:
            PlanMismatch: where the program takes more than the budget and this is to be an error; nothing ran.
        """
        if key in self._seen:
            return
        program = compiled()
        self._seen.add(key)
        plan = self._follower.plan
        if plan is None or not self._judge(plan, program):
            return
        if self._on_broken.replans and self._follower.has_budget:
            promised = plan.budget_bytes
            lowered = max(1, 2 * promised - plan.measured_peak_bytes) if plan.measured_peak_bytes is not None else 1
            try:
                with self._follower.planning_for(lowered, promised):
                    trace_again()
                    program = compiled()
            except InfeasibleBudget:
                trace_again()
                compiled()
            else:
                assert self._follower.plan is not None
                plan = self._follower.plan
                if not self._judge(plan, program):
                    return
        assert plan.measured_peak_bytes is not None
        message = broken_budget(plan, plan.measured_peak_bytes, None, compared=False)
        if self._on_broken.strict:
            self._seen.discard(key)
            raise PlanMismatch(message)
        _log.warning(message)

    @staticmethod
    def _judge(plan: Plan, program: Any) -> bool:
        """Note what a program takes. Is it more than the plan's budget?"""
        memory = program.memory_analysis()
        if memory is None:  # This platform does not say; a plan that was given needs no such figure.
            return False
        plan.set_measured_peak(peak_of(memory))
        assert plan.measured_peak_bytes is not None
        return exceeds(plan, plan.measured_peak_bytes)
