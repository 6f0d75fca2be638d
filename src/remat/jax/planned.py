"""From a function and a budget to the same function that keeps it: trace, plan, compile, compare, plan again."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from remat.budget import parse_budget
from remat.closed_loop import infeasible, plan_within
from remat.cost_model import get_profile
from remat.errors import InfeasibleBudget
from remat.graph import Graph
from remat.jax.compiled import Compiler
from remat.jax.emit import Emitted, emit
from remat.jax.holds import Tie
from remat.jax.program import Program, program_of, trace_jaxpr
from remat.jax.trace import graph_of_program
from remat.plan import Plan
from remat.plan import plan as make_plan
from remat.planners.problem import Problem
from remat.simulator import simulate

_log = logging.getLogger("remat")

_ROUNDS = (5, 2)  # At first, and near the smallest peak where none of the first fits; each compiles once.

# For one round of several; the methods that bring most per second come first.
_SECONDS_PER_OP = 2e-3
_LEAST_S = 0.5
_MOST_S = 4.0


@dataclass(frozen=True)
class Request:
    """What a user asked for.

    Attributes:
        budget: peak device bytes, as ``remat.plan`` takes it.
        plan: a plan to follow instead of a budget.
        planner: a planner's name.
        time_limit_s: wall seconds for each round of planning.
        options: passed on to the planner.
    """

    budget: int | str | None = None
    plan: Plan | None = None
    planner: str = "auto"
    time_limit_s: float | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def check(self, caller: str) -> None:
        """Refuse at once what can only fail later.

        Raises:
            ValueError: for a budget and a plan, or for an unknown planner.
            InvalidBudget: for a budget that cannot be read.
        """
        from remat.planners import get_planner

        if self.budget is not None and self.plan is not None:
            raise ValueError(f"{caller} takes budget= or plan=, not both")
        if self.budget is not None:
            parse_budget(self.budget, baseline_peak_bytes=1 << 60)
        if self.plan is not None and not isinstance(self.plan, Plan):
            raise TypeError(f"plan= of {caller} is a remat.Plan, not {type(self.plan).__name__}")
        get_planner(self.planner)


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


def plan_function(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    request: Request,
    tie: Tie,
    *,
    shapes: Sequence[jax.ShapeDtypeStruct],
    donated: Sequence[int] = (),
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
        known_plan: found earlier for the same request; followed if it fits the graph.

    Raises:
        InfeasibleBudget: where no schedule fits; it names the smallest budget.
        PlanMismatch: where ``request.plan`` is for another function.
        UnsupportedStep: where a shape is unknown.
    """
    closed, structure = trace_jaxpr(function, arguments)
    program = program_of(closed)
    graph = graph_of_program(program, get_profile("cpu" if jax.default_backend() == "cpu" else "a100"))
    turning_point = Problem.of(graph).turning_point
    if request.plan is not None:
        request.plan.check_graph(graph)
        plan = request.plan
    elif known_plan is not None and known_plan.fingerprint == graph.fingerprint:
        plan = known_plan
    else:
        compiler = Compiler(program, turning_point, tie, shapes, donated)
        plan = plan_for_compiler(graph, compiler, request)
        _log.info("%s", plan)
    return Planned(program, graph, plan, emit(program, plan.schedule, turning_point, tie), structure)


def plan_for_compiler(graph: Graph, compiler: Compiler, request: Request) -> Plan:
    """A plan whose compiled program stays within the budget; each round compiles once.

    Raises:
        InfeasibleBudget: with the smallest budget for which this function succeeds.
    """
    assert request.budget is not None
    plain = simulate(graph, graph.plain_schedule)
    baseline = compiler.peak(graph.plain_schedule)
    budget_bytes = parse_budget(request.budget, max(1, baseline.expected_bytes))
    time_limit_s = request.time_limit_s or max(_LEAST_S, min(_MOST_S, _SECONDS_PER_OP * len(graph.ops)))

    def plan_with(planner_budget: int) -> Plan:
        return make_plan(graph, planner_budget, planner=request.planner, time_limit_s=time_limit_s, **request.options)

    if baseline.highest_bytes <= budget_bytes:
        found = dataclasses.replace(plan_with(max(1, plain.peak_bytes)), peak_bytes=baseline.expected_bytes)
    else:
        try:
            found = plan_within(
                budget_bytes,
                _first_guess(graph, plain.peak_bytes, baseline.highest_bytes, budget_bytes),
                plan_with,
                lambda plan: compiler.peak(plan.schedule),
                rounds=_ROUNDS[0],
                last_rounds=_ROUNDS[1],
            )
        except InfeasibleBudget as error:
            raise infeasible(budget_bytes, error.minimum_bytes, error.binding_op) from None
    return dataclasses.replace(
        found,
        traced_peak_bytes=simulate(graph, found.schedule).peak_bytes,
        baseline_peak_bytes=baseline.expected_bytes,
        budget_bytes=budget_bytes,
    )


def _first_guess(graph: Graph, traced_bytes: int, compiled_bytes: int, budget_bytes: int) -> int:
    """The planner's budget, if fusion does to the plan what it does to the plain step; arguments are counted alike."""
    pinned = graph.pinned_bytes if graph.pinned_bytes < min(compiled_bytes, budget_bytes) else 0
    return pinned + int((budget_bytes - pinned) * (traced_bytes - pinned) / max(1, compiled_bytes - pinned))
