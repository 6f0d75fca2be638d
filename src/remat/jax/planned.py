"""From a function and a budget to the same function that keeps it: trace, plan, compile, compare, plan again."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import jax

from remat.core.budget import parse_budget
from remat.core.errors import InfeasibleBudget, UnsupportedStep
from remat.core.graph import Graph
from remat.core.plan import Plan
from remat.core.plan import plan as make_plan
from remat.core.schedule import Schedule
from remat.core.simulator import simulate
from remat.fit.loop import infeasible, plan_within
from remat.jax import _private
from remat.jax.context import Tie
from remat.jax.emit.evaluate import Emitted, emit
from remat.jax.peak import CompiledPeak, Compiler, Returned
from remat.jax.request import Request
from remat.jax.scans.menu import Talking, scan_menu
from remat.jax.trace.function import after_donation, graph_of_program
from remat.jax.trace.named import plan_with_names
from remat.jax.trace.program import Program, program_of, trace_jaxpr
from remat.jax.trace.sharded import communications, is_sharded, on_one_device, talking_bodies
from remat.planners.view.problem import Problem
from remat.running.cost_model import device_here, get_profile

_log = logging.getLogger("remat")

ROUNDS = (5, 4)  # At first, and near the smallest peak where none of the first fits; each compiles once.

# For one round of several; the methods that bring most per second come first.
_SECONDS_PER_OP = 2e-3
_LEAST_S = 0.5
_MOST_S = 4.0


class _WithPlan(Protocol):
    @property
    def plan(self) -> Plan: ...


PlannedT = TypeVar("PlannedT", bound=_WithPlan)


@dataclass(frozen=True)
class Planned:
    """A function that keeps a plan.

    Attributes:
        program: the traced function.
        graph: what the plan is for.
        plan: the plan in force.
        run: the function, flat, to be traced.
        structure: of what the function returns.
    """

    program: Program
    graph: Graph
    plan: Plan
    run: Emitted
    structure: Any

    def __call__(self, arguments: Sequence[Any]) -> Any:
        """Evaluate the function on its flat arguments."""
        results = self.run(arguments, tuple(self.program.constants.values()))
        return jax.tree.unflatten(self.structure, results)


class Follower:
    """What is planned when it is traced, and follows the same plan when it is traced again.

    Attributes:
        plan: the plan of the newest trace; None before, or without a budget.
        graph: the step that the plan is for.
    """

    def __init__(self) -> None:
        self._newest: Any = None
        self._plans: dict[Any, Plan] = {}

    @property
    def plan(self) -> Plan | None:
        """The plan of the newest trace; None before, or without a budget."""
        return self._newest.plan if self._newest is not None else None

    @property
    def graph(self) -> Graph | None:
        """The step that ``plan`` is for."""
        return self._newest.graph if self._newest is not None else None

    def _followed(self, key: Any, make: Callable[[Plan | None], PlannedT]) -> PlannedT:
        """What ``make`` plans, given the plan that was found before for the same key."""
        self._newest = newest = make(self._plans.get(key))
        self._plans[key] = newest.plan
        return newest


def plan_function(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    request: Request,
    tie: Tie,
    *,
    shapes: Sequence[jax.ShapeDtypeStruct],
    donated: Sequence[int] = (),
    out_shardings: Any = None,
    known_plan: Plan | None = None,
) -> Planned:
    """Plan a function of flat arguments.

    Args:
        function: takes the flat arguments and returns any pytree.
        arguments: arrays or tracers.
        request: the budget or the plan.
        tie: how recomputations are held back.
        shapes: of the arguments, with shardings where known; what is compiled to see the real peak.
        donated: numbers of the arguments whose buffers the results may take over.
        out_shardings: where the results go, as ``jax.jit`` takes it.
        known_plan: found earlier for the same request; followed if it fits the graph.

    Raises:
        InfeasibleBudget: where no schedule fits; it names the smallest budget.
        PlanMismatch: where ``request.plan`` is for another function.
        UnsupportedStep: where a shape is unknown.
    """
    given = request.plan if request.plan is not None else known_plan
    talking = functools.partial(talking_bodies, shapes=shapes, tie=tie) if is_sharded(shapes) else None
    variants, structure = variants_of(function, arguments, talking, request.checkpoints or ())
    returned = None if out_shardings is None else Returned(structure, out_shardings)
    accept: Callable[[Schedule, Any], bool] | None = None
    if talking is not None:
        variants = [_on_one_device(one, shapes, tie) for one in variants]
        plain = Compiler(variants[0].program, 0, tie, shapes, donated, None, returned).compile(
            variants[0].graph.plain_schedule
        )
        allowed = communications(plain.as_text())

        def sends_no_more(_: Schedule, compiled: Any) -> bool:
            return communications(compiled.as_text()) <= allowed

        accept = sends_no_more
    traced = variants
    variants = [dataclasses.replace(one, graph=after_donation(one.graph, one.program, donated)) for one in variants]
    first = variants[0]
    # A plan may have been made from a trace, which knows of no donation.
    known = (*variants, *traced)
    followed = [one for one in known if given is not None and one.graph.fingerprint == given.fingerprint]
    if followed and given is not None:
        chosen, plan = followed[0], given
    elif request.plan is not None:
        request.plan.check_graph(first.graph)
        raise AssertionError("unreachable: a plan for none of the variants is refused above")
    else:
        compilers = {
            one.graph.fingerprint: Compiler(one.program, one.turning_point, tie, shapes, donated, accept, returned)
            for one in variants
        }
        graphs = {one.graph.fingerprint: one.graph for one in variants}

        def real_peak(plan: Plan) -> CompiledPeak:
            if _private.names_devices():
                # The compiler cannot be asked: the function is only part of a program over named axes.
                return CompiledPeak(simulate(graphs[plan.fingerprint], plan.schedule).peak_bytes)
            return compilers[plan.fingerprint].peak(plan.schedule)

        plan = plan_for_variants(variants, request, real_peak)
        chosen = next(one for one in variants if one.graph.fingerprint == plan.fingerprint)
        _log.info("%s", plan)
    run = emit(chosen.program, plan.schedule, chosen.turning_point, tie)
    return Planned(chosen.program, chosen.graph, plan, run, structure)


def _on_one_device(variant: Variant, shapes: Sequence[jax.ShapeDtypeStruct], tie: Tie) -> Variant:
    program, graph = on_one_device(variant.program, variant.graph, shapes, tie)
    return dataclasses.replace(variant, program=program, graph=graph)


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
    talking: Talking | None = None,
    kept_names: Sequence[str] = (),
) -> tuple[list[Variant], Any]:
    """A function as it is, then with loops that keep less and less; and the structure of what it returns.

    Args:
        function: takes the flat arguments.
        arguments: arrays, tracers or shapes.
        talking: as of ``scan_menu``, where the arguments lie on several devices.
        kept_names: as of ``program_of``.
    """
    closed, structure = trace_jaxpr(function, arguments)
    profile = get_profile(device_here("cpu" if jax.default_backend() == "cpu" else "a100"))
    variants = []
    for one in (closed, *scan_menu(closed, profile, talking)):
        program = program_of(one, kept_names)
        graph = graph_of_program(program, profile)
        variants.append(Variant(program, graph, Problem.of(graph).turning_point))
    return variants, structure


def plan_for_variants(
    variants: Sequence[Variant],
    request: Request,
    real_peak: Callable[[Plan], CompiledPeak],
    plain_peak_bytes: int | None = None,
) -> Plan:
    """A plan whose compiled program stays within the budget; each round compiles once.

    Args:
        variants: the function as it is, then others by what their loops keep, most first.
        request: the budget or the checkpoints.
        real_peak: the peak of the program that a plan leads to.
        plain_peak_bytes: what a share of the budget is a share of; None for the peak of the first variant, unplanned.

    Raises:
        InfeasibleBudget: with the smallest budget for which this function succeeds.
    """
    first = variants[0]
    traced_bytes = simulate(first.graph, first.graph.plain_schedule).peak_bytes
    unplanned = cheapest_plan(variants[:1], max(1, traced_bytes), request)
    baseline = real_peak(unplanned)
    if plain_peak_bytes is None:
        plain_peak_bytes = baseline.expected_bytes
    if request.checkpoints is not None:
        return _plan_with_names(first, request.checkpoints, real_peak, plain_peak_bytes)
    assert request.budget is not None
    budget_bytes = parse_budget(request.budget, max(1, plain_peak_bytes))
    if baseline.highest_bytes <= budget_bytes:
        found = dataclasses.replace(unplanned, peak_bytes=baseline.expected_bytes)
    else:
        try:
            found = plan_within(
                budget_bytes,
                first_guess(first.graph, traced_bytes, baseline.highest_bytes, budget_bytes),
                lambda planner_budget: cheapest_plan(variants, planner_budget, request),
                real_peak,
                rounds=ROUNDS[0],
                last_rounds=ROUNDS[1],
            )
        except InfeasibleBudget as error:
            # Where every plan was refused for what it sends, the plain step is what can be kept.
            smallest_bytes = min(error.minimum_bytes, baseline.highest_bytes)
            raise infeasible(budget_bytes, smallest_bytes, error.binding_op) from None
    of = {variant.graph.fingerprint: variant for variant in variants}
    return dataclasses.replace(
        found,
        traced_peak_bytes=simulate(of[found.fingerprint].graph, found.schedule).peak_bytes,
        baseline_peak_bytes=plain_peak_bytes,
        budget_bytes=budget_bytes,
    )


def _plan_with_names(
    variant: Variant, names: Sequence[str], real_peak: Callable[[Plan], CompiledPeak], plain_peak_bytes: int
) -> Plan:
    plan = plan_with_names(variant.program, variant.graph, names)
    peak = real_peak(plan)
    if peak.is_refused:
        raise UnsupportedStep(
            f"recomputing all but {', '.join(names)} sends more between the devices than the plain step; give a "
            "budget, which recomputes no such thing"
        )
    return dataclasses.replace(
        plan,
        traced_peak_bytes=plan.peak_bytes,
        peak_bytes=peak.expected_bytes,
        budget_bytes=peak.highest_bytes,
        baseline_peak_bytes=plain_peak_bytes,
    )


def cheapest_plan(variants: Sequence[Variant], budget_bytes: int, request: Request) -> Plan:
    """The cheapest plan over the variants: one whose loops keep little, or one that recomputes outside of them."""
    first = variants[0].graph
    time_limit_s = request.time_limit_s or max(_LEAST_S, min(_MOST_S, _SECONDS_PER_OP * len(first.ops)))

    def plan_with(graph: Graph) -> Plan:
        plan = make_plan(graph, budget_bytes, planner=request.planner, time_limit_s=time_limit_s, **request.options)
        if graph is first:
            return plan
        return dataclasses.replace(
            plan,
            baseline_time_s=first.time_s,
            overhead=(plan.time_s - first.time_s) / max(first.time_s, 1e-300),
            overhead_lower_bound=0.0,
            lower_bound_meaning="none was sought over what loops may keep",
        )

    loops = [variant.graph for variant in variants[1:]]
    fitting = [graph for graph in loops if simulate(graph, graph.plain_schedule).peak_bytes <= budget_bytes]
    # Where loops are planned, what is outside of them is worth recomputing only near the border.
    tried = [first] if not loops else fitting[:1] + loops[max(0, len(loops) - len(fitting) - 1) :][:1]
    plans, errors = [], []
    for graph in dict.fromkeys(map(id, tried)):
        try:
            plans.append(plan_with(next(one for one in tried if id(one) == graph)))
        except InfeasibleBudget as error:
            errors.append(error)
    if not plans:
        raise min(errors, key=lambda error: error.minimum_bytes)
    return min(plans, key=lambda plan: plan.time_s)


def first_guess(graph: Graph, traced_bytes: int, compiled_bytes: int, budget_bytes: int) -> int:
    """The planner's budget, if fusion does to the plan what it does to the plain step; arguments are counted alike."""
    pinned = graph.pinned_bytes if graph.pinned_bytes < min(compiled_bytes, budget_bytes) else 0
    return pinned + int((budget_bytes - pinned) * (traced_bytes - pinned) / max(1, compiled_bytes - pinned))
