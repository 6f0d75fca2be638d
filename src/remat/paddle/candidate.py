"""A program as Paddle's executor runs it, the plan for it, and the plan carried out."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from remat.core.graph import Graph
from remat.core.plan import Plan
from remat.fit.candidate import Candidate
from remat.fit.fit import fit
from remat.fit.loop import Rounds
from remat.fit.peaks import PeakRange
from remat.fit.request import Request
from remat.paddle.emit.rewrite import rewrite
from remat.paddle.trace.program import TracedProgram
from remat.planning.checkpoints import plan_with_checkpoints

_RESERVE: Final = 0.01
"""The share of a peak that is left: half of it is what fences let wait (``emit.fences``), half is for scratch memory of
kernels that ``trace.scratch`` does not know and for what whoever starts the backward pass holds. The models of
``tests/paddle`` take at most .2 % more than is predicted. Too small, a step breaks its budget; too large, it recomputes
more than it has to."""


@dataclass(frozen=True)
class ProgramPlan(Plan):
    """A plan for a program of Paddle.

    Attributes:
        graph: the step that the plan is for: ``remat.simulate(plan.graph, plan.schedule)`` shows its memory over time.
    """

    graph: Graph = field(kw_only=True, repr=False, compare=False)

    __str__ = Plan.__str__


class ProgramCandidate(Candidate):
    """A traced program, run in the order of its block.

    Args:
        traced: the program and its graph.
        resident_bytes: what lies in memory beside the step and counts against the budget.
        mode: of its plans: "static" (a program that an executor runs) or "to_static" (a layer's program).
    """

    # The executor follows a schedule to the byte, so that there is little to correct.
    rounds = Rounds(3, 2)

    def __init__(self, traced: TracedProgram, resident_bytes: int = 0, mode: str = "static") -> None:
        self.traced = traced
        self.resident_bytes = resident_bytes
        self._mode = mode
        self._plain_peak = PeakRange.exactly(self._peak_bytes(self.graph.plain_schedule))

    @property
    def graph(self) -> Graph:
        """The traced program."""
        return self.traced.graph

    @property
    def plain_peak(self) -> PeakRange:
        """What the trace says."""
        return self._plain_peak

    def real_peak(self, plan: Plan) -> PeakRange:
        """The executor follows the schedule as it is; what the trace cannot see is in the reserve."""
        return PeakRange.with_reserve(self._peak_bytes(plan.schedule), _RESERVE)

    def _peak_bytes(self, schedule: Sequence[int]) -> int:
        return int(self.traced.alive_bytes(schedule).max(initial=0))

    def first_guess(self, target_bytes: int) -> int:
        """The planner counts what the executor does, but for the reserve."""
        return int(target_bytes / (1 + _RESERVE))

    def planned(self, request: Request, kept: Collection[Any] = (), share_of_bytes: int | None = None) -> ProgramPlan:
        """The plan that a request asks for: a given one, one by checkpoints, or one within a budget.

        Args:
            request: what was asked for.
            kept: the values of the program that ``request.checkpoints`` names.
            share_of_bytes: what "60%" is a share of; None for the plain peak of the program.

        Raises:
            InfeasibleBudget: where no schedule fits; it names the smallest budget.
            PlanMismatch: where the given plan is for another program.
        """
        if request.plan is not None:
            request.plan.check_graph(self.graph)
            found = request.plan
        elif request.checkpoints is not None:
            tensors = [t for value in kept for t in self.traced.tensors.get(value.id, ())]
            found = plan_with_checkpoints(self.graph, tensors)
            peak_bytes = found.peak_bytes + self.resident_bytes
            found = dataclasses.replace(
                found,
                peak_bytes=peak_bytes,
                budget_bytes=peak_bytes,
                baseline_peak_bytes=found.baseline_peak_bytes + self.resident_bytes,
            )
        else:
            found = fit(self, request, share_of_bytes=share_of_bytes)
        values = {one.name: getattr(found, one.name) for one in dataclasses.fields(Plan)}
        return ProgramPlan(**{**values, "mode": self._mode, "measured_peak_bytes": None}, graph=self.graph)

    def carry_out(self, plan: Plan) -> int:
        """Rewrite the program by a plan for it, as ``rewrite`` does; returns how many ops were copied."""
        return rewrite(self.traced, plan.schedule)
