"""The ways to write a traced function, and the search for the cheapest plan over all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import jax

from remat.core.errors import InfeasibleBudget, UnsupportedStep
from remat.core.graph import Graph
from remat.core.plan import Plan, plan_for_schedule
from remat.core.simulator import simulate
from remat.fit.candidate import Candidate
from remat.fit.fit import fit
from remat.fit.loop import Rounds
from remat.fit.peaks import PeakRange
from remat.fit.request import Request
from remat.jax.peak import REFUSED
from remat.jax.scans.variants import FindReceived, scan_variants
from remat.jax.trace.graph import graph_of_program
from remat.jax.trace.program import Program, name_of, program_of, trace_jaxpr
from remat.planners.view.problem import Problem
from remat.planning.checkpoints import plan_with_checkpoints
from remat.planning.find import find
from remat.running.cost_model import device_here, get_profile

# The wall seconds of one round of planning, where the user gives none: so many for each op, between these two limits.
# Judgements, not measured: a round also compiles once, which takes seconds for a step of a thousand ops. Less time
# makes dearer plans; more makes the first call slower.
_SECONDS_PER_OP: Final = 2e-3
_LEAST_S: Final = 0.5
_MOST_S: Final = 4.0

_SHOWN: Final = 8  # Names in an error, which is one line.

_SMALLEST_TIME_S: Final = 1e-300  # In place of a plain step that takes no time, by which nothing can be divided.


@dataclass(frozen=True)
class Variant:
    """One way to write the function: as it is, or with loops that keep less.

    Attributes:
        program: the traced function.
        graph: what planners see of it.
        turning_point: the instruction that ends its forward part.
    """

    program: Program
    graph: Graph
    turning_point: int


def variants_of(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    find_received: FindReceived | None = None,
    kept_names: Sequence[str] = (),
) -> tuple[list[Variant], Any]:
    """A function as it is, then with loops that keep less and less; and the structure of what it returns.

    Args:
        function: takes the flat arguments.
        arguments: arrays, tracers or shapes.
        find_received: as in ``scan_variants``, where the arguments lie on several devices.
        kept_names: as in ``program_of``.
    """
    closed, structure = trace_jaxpr(function, arguments)
    profile = get_profile(device_here("cpu" if jax.default_backend() == "cpu" else "a100"))
    variants = []
    for one in (closed, *scan_variants(closed, profile, find_received)):
        program = program_of(one, kept_names)
        graph = graph_of_program(program, profile)
        variants.append(Variant(program, graph, Problem.of(graph).turning_point))
    return variants, structure


class FunctionCandidate(Candidate):
    """A function in all its variants.

    Args:
        variants: the function as it is, then others by what their loops keep, most first.
        compiled_peak: the peak of the program that a plan for one of the variants leads to.
        traced: the variants before donation. A plan made from a trace, which knows of no donation, is for one of them.
    """

    rounds = Rounds(5, 4)
    is_compiled = True

    def __init__(
        self,
        variants: Sequence[Variant],
        compiled_peak: Callable[[Plan], PeakRange],
        traced: Sequence[Variant] = (),
    ) -> None:
        self._variants = tuple(variants)
        self._compiled_peak = compiled_peak
        self._traced = tuple(traced)

    @property
    def graph(self) -> Graph:
        """The function as it is."""
        return self._variants[0].graph

    @cached_property
    def plain_peak(self) -> PeakRange:
        """The peak of the compiled function with nothing recomputed."""
        return self.real_peak(plan_for_schedule(self.graph, self.graph.plain_schedule, planner="none"))

    def real_peak(self, plan: Plan) -> PeakRange:
        """The peak of the program that a plan leads to."""
        return self._compiled_peak(plan)

    def find(self, budget_bytes: int, request: Request) -> Plan:
        """The cheapest plan over the variants."""
        return cheapest_plan(self._variants, budget_bytes, request)

    def time_limit_of_a_round_s(self, request: Request) -> float:
        """What the user says, or else by the number of ops."""
        return _time_limit_s(self.graph, request)

    def graph_of(self, plan: Plan) -> Graph:
        """The graph of the variant that a plan is for."""
        return self.variant_of(plan).graph

    def variant_of(self, plan: Plan) -> Variant:
        """The variant that a plan is for."""
        return next(one for one in (*self._variants, *self._traced) if one.graph.fingerprint == plan.fingerprint)

    def first_guess(self, target_bytes: int) -> int:
        """The planner's budget, if fusion does to the plan what it does to the plain step.

        Arguments and captured arrays are counted alike by the trace and by the compiler, so they are left out.
        """
        traced_bytes = simulate(self.graph, self.graph.plain_schedule).peak_bytes
        compiled_bytes = self.plain_peak.highest_bytes
        pinned = self.graph.pinned_bytes if self.graph.pinned_bytes < min(compiled_bytes, target_bytes) else 0
        return pinned + int((target_bytes - pinned) * (traced_bytes - pinned) / max(1, compiled_bytes - pinned))

    def planned(self, request: Request, share_of_bytes: int | None = None) -> Plan:
        """The plan that a request asks for: the given one, the one that its checkpoints make, or one within its budget.

        Args:
            request: its ``known`` plan is followed where it is for this function.
            share_of_bytes: as in ``remat.fit.fit.fit``.

        Raises:
            InfeasibleBudget: where no schedule fits; it names the smallest budget.
            PlanMismatch: where ``request.plan`` is for another function.
            UnsupportedStep: where the checkpoints name nothing, or lead to a program that sends too much.
        """
        given = request.plan if request.plan is not None else request.known
        if given is not None and any(
            one.graph.fingerprint == given.fingerprint for one in (*self._variants, *self._traced)
        ):
            return given
        if request.plan is not None:
            request.plan.check_graph(self.graph)
            raise AssertionError("unreachable: a plan for none of the variants is refused above")
        if request.checkpoints is not None:
            return self._plan_with_names(request.checkpoints, share_of_bytes)
        return fit(self, request, share_of_bytes=share_of_bytes)

    def _plan_with_names(self, names: Sequence[str], share_of_bytes: int | None) -> Plan:
        plain = self._variants[0]
        plan = plan_with_names(plain.program, plain.graph, names)
        peak = self.real_peak(plan)
        if peak == REFUSED:
            raise UnsupportedStep(
                f"recomputing all but {', '.join(names)} sends more between the devices than the plain step; give a "
                "budget, which recomputes no such thing"
            )
        return dataclasses.replace(
            plan,
            traced_peak_bytes=plan.peak_bytes,
            peak_bytes=peak.expected_bytes,
            budget_bytes=peak.highest_bytes,
            baseline_peak_bytes=self.plain_peak.expected_bytes if share_of_bytes is None else share_of_bytes,
        )


def cheapest_plan(variants: Sequence[Variant], budget_bytes: int, request: Request) -> Plan:
    """The cheapest plan over the variants: one whose loops keep little, or one that recomputes outside of them.

    Raises:
        InfeasibleBudget: where none is found; ``minimum_bytes`` is a budget for which one is.
    """
    first = variants[0].graph
    time_limit_s = _time_limit_s(first, request)

    def plan_with(graph: Graph) -> Plan:
        plan = find(graph, budget_bytes, request.planner, time_limit_s, **request.options)
        if graph is first:
            return plan
        return dataclasses.replace(
            plan,
            baseline_time_s=first.time_s,
            overhead=(plan.time_s - first.time_s) / max(first.time_s, _SMALLEST_TIME_S),
            lower_bound_meaning="none was sought over what loops may keep",
        )

    plans, errors = [], []
    for graph in _worth_planning([variant.graph for variant in variants], budget_bytes):
        try:
            plans.append(plan_with(graph))
        except InfeasibleBudget as error:
            errors.append(error)
    if not plans:
        raise min(errors, key=lambda error: error.minimum_bytes)
    return min(plans, key=lambda plan: plan.time_s)


def _worth_planning(graphs: Sequence[Graph], budget_bytes: int) -> list[Graph]:
    """The variants that may be cheapest within a budget.

    Where loops are planned, what is outside of them is worth recomputing only near the border: in the variant that
    keeps the most of those that fit as they are, and in the last that does not fit.
    """
    fits = [simulate(graph, graph.plain_schedule).peak_bytes <= budget_bytes for graph in graphs]
    if len(graphs) == 1 or fits[0]:
        return [graphs[0]]
    fitting = [number for number in range(1, len(graphs)) if fits[number]]
    last_that_does_not_fit = max(1, len(graphs) - 1 - len(fitting))
    return [graphs[number] for number in dict.fromkeys((*fitting[:1], last_that_does_not_fit))]


def _time_limit_s(graph: Graph, request: Request) -> float:
    if request.time_limit_s is not None:
        return request.time_limit_s
    return max(_LEAST_S, min(_MOST_S, _SECONDS_PER_OP * len(graph.ops)))


def plan_with_names(program: Program, graph: Graph, names: Collection[str]) -> Plan:
    """The plan that keeps the values of these names; its figures are those of the trace.

    Raises:
        UnsupportedStep: where a name is given to no value of the program.
    """
    named: dict[str, list[int]] = {}
    for equation in (equation for instruction in program.instructions for equation in instruction.equations):
        if (given := name_of(equation)) is not None:
            named.setdefault(given, []).append(equation.outputs[0])
    for name in names:
        if name not in named:
            known = ", ".join(sorted(named)[:_SHOWN]) or "none"
            raise UnsupportedStep(
                f"the checkpoint {name!r} names no value that the gradients need (named there: {known}); name values "
                "on the way from the arguments to the loss with jax.ad_checkpoint.checkpoint_name, outside of loops"
            )
    return plan_with_checkpoints(graph, [value for name in names for value in named[name]])
