"""The compiled program that really runs, held against its plan before its first run."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Final

from remat.core.errors import InfeasibleBudget
from remat.core.plan import Plan
from remat.fit.first_step import broken_budget, exceeds, tell
from remat.jax.peak import peak_of
from remat.jax.planned import Follower


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
        # For each kind of arguments: why its program is refused, None where it may run.
        self._verdicts: dict[Hashable, str | None] = {}

    def forget(self) -> None:
        """Look at every program again."""
        self._verdicts.clear()

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
        if key not in self._verdicts:
            message = self._broken(compiled, trace_again)
            self._verdicts[key] = message if self._on_broken.strict else None
        else:
            message = self._verdicts[key]
        if message is not None:
            tell(message, strict=self._on_broken.strict)

    def _broken(self, compiled: Callable[[], Any], trace_again: Callable[[], None]) -> str | None:
        """What to say of a program that takes more than its budget, also when it was planned again."""
        plan, measured_bytes = self._measured(compiled())
        if plan is None or not exceeds(plan, measured_bytes):
            return None
        if self._on_broken.replans and self._follower.has_budget:
            lowered_bytes = max(1, 2 * plan.budget_bytes - measured_bytes)
            try:
                with self._follower.planning_for(lowered_bytes, plan.budget_bytes):
                    trace_again()
                    program = compiled()
            except InfeasibleBudget:
                trace_again()
                program = compiled()
            plan, measured_bytes = self._measured(program)
            if plan is None or not exceeds(plan, measured_bytes):
                return None
        return broken_budget(plan, measured_bytes, None, compared=False)

    def _measured(self, program: Any) -> tuple[Plan | None, int]:
        """The plan in a program, and what the program takes; no plan where that is not known."""
        plan, memory = self._follower.plan, program.memory_analysis()
        if plan is None or memory is None:  # Not every platform says; a plan that was given needs no such figure.
            return None, 0
        measured_bytes = peak_of(memory)
        plan.set_measured_peak(measured_bytes)
        return plan, measured_bytes
