"""What a front end supplies: a step as it would run, with the peak that a schedule of it really has."""

from __future__ import annotations

import abc
from collections.abc import Iterable
from typing import ClassVar

from remat.core.graph import Graph
from remat.core.plan import Plan
from remat.core.simulator import simulate
from remat.fit.loop import Rounds
from remat.fit.peaks import PeakRange
from remat.fit.request import Request
from remat.planning.find import find_again
from remat.planning.prove import prove


class Candidate(abc.ABC):
    """A step as it would run, before anything of it is rewritten.

    A front end subclasses this once for each way in which it carries out a plan (an allocator, a compiler, an eager
    order). ``remat.fit.fit.fit`` does the rest.

    Attributes:
        rounds: how often it may be planned. Each round asks for one real peak, so that a compiler has fewer.
        is_compiled: is the real peak that of a compiled program? The plan then shows the peak of the trace beside it.
        is_exact: is the planner's peak always the real one? One search then says what fits, or that nothing does.
        reserve: share of a budget that is left for what ``real_peak`` cannot see.
        resident_bytes: what lies on the device beside the step and counts against the budget.
        samples_of_bound: as in ``prove``. With 4 it takes .1 to .3 s of processor time on keras-hub's ViT and GPT-2 and
            on MobileNet in TensorFlow, with 16 .7 to 2.4. The bound of GPT-2 is 7.3 % with 4 and 7.8 with 16, those of
            the others are the same.
        polishes: how often more work may be done for the plan that the rounds have found: again where what comes of it
            is over the budget as it would run.
    """

    rounds: Rounds = Rounds(6, 4)
    is_compiled: ClassVar[bool] = False
    is_exact: ClassVar[bool] = False
    reserve: float = 0.0
    resident_bytes: int = 0
    samples_of_bound: ClassVar[int] = 4
    polishes: ClassVar[int] = 1

    @property
    @abc.abstractmethod
    def graph(self) -> Graph:
        """The step as it is traced."""

    @property
    @abc.abstractmethod
    def plain_peak(self) -> PeakRange:
        """The real peak of the step with nothing recomputed, without what is resident beside it."""

    @abc.abstractmethod
    def real_peak(self, plan: Plan) -> PeakRange:
        """The real peak under a plan, without what is resident beside it."""

    def looks_around(self, budget_bytes: int | None) -> bool:
        """Look at what real peaks depend on, before plans for a budget are sought; does it change them?

        Args:
            budget_bytes: the budget, which looking keeps as well; None to forget what was seen. An error names a budget
                that holds when it is asked for, and more may be seen within that one.
        """
        return False

    def expected_time_s(self, plan: Plan | None) -> float | None:
        """Seconds of a run with what memory does to it; None where that is not known.

        Args:
            plan: whose run; None for the plain step's.
        """
        return None

    def order_time_s(self, plan: Plan) -> float | None:
        """Seconds that a run takes longer where every op waits for the end of the one before it.

        None where a run cannot be held so, or where that does not lower its peak.

        Args:
            plan: whose run.
        """
        return None

    def find(self, budget_bytes: int, request: Request) -> Plan:
        """The planner's plan within a budget of the trace; nothing is proved about it.

        Raises:
            InfeasibleBudget: if it finds none; ``minimum_bytes`` is a budget for which it does.
        """
        return find_again(
            self.graph, budget_bytes, request.planner, self.time_limit_of_a_round_s(request), **request.options
        )

    def polished(self, plan: Plan, budget_bytes: int, request: Request) -> Plan | None:
        """A plan within a budget of the trace, found with more work than a round is worth.

        None where every round does all the work there is, or nothing is found.

        Args:
            plan: what the rounds have found, which may be gone on from.
            budget_bytes: of the trace.
            request: as for the rounds.
        """
        return None

    def squeezed(self, plan: Plan, target_bytes: int, request: Request) -> Plan | None:
        """A plan whose real peak may be within a target, made by small changes of one that misses it by little.

        None where nobody looks for that, or nothing is found.
        """
        return None

    def suggestions(self) -> Iterable[Plan]:
        """Plans that do not depend on the budget and are worth a look: what a user would do by hand."""
        return ()

    def likely(self) -> Iterable[Plan]:
        """Further suggestions, which are tried as soon as a round has failed: each may spare the rounds behind it."""
        return ()

    def prove(self, plan: Plan, request: Request) -> Plan:
        """The plan with its proven bound, found with little work, since a training step waits for it."""
        limit_s = self.time_limit_of_a_round_s(request)
        return prove(plan, self.graph_of(plan), limit_s, most_samples=self.samples_of_bound)

    def recognises(self, plan: Plan) -> bool:
        """Is a plan, of an earlier run say, for this step?"""
        return plan.fingerprint == self.graph.fingerprint

    def graph_of(self, plan: Plan) -> Graph:
        """The graph that a plan of ``find`` is for, where there is more than one way to write the step."""
        return self.graph

    def time_limit_of_a_round_s(self, request: Request) -> float | None:
        """Wall seconds of one round of planning."""
        return request.time_limit_s

    def first_guess(self, target_bytes: int) -> int:
        """The planner's budget to begin with: what a device adds to the plain step is a good guess of what it adds."""
        traced_bytes = simulate(self.graph, self.graph.plain_schedule).peak_bytes
        return int(target_bytes * min(1.0, traced_bytes / max(1, self.plain_peak.highest_bytes)))

    def target_bytes(self, budget_bytes: int) -> int:
        """What the real peak may be under a budget."""
        return int(budget_bytes / (1 + self.reserve)) - self.resident_bytes

    def smallest_budget(self, peak_bytes: int) -> int:
        """The budget that has to be asked for so that a real peak fits."""
        return -int(-(peak_bytes + self.resident_bytes) * (1 + self.reserve) // 1)
