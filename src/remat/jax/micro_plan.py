"""Plans the gradient of one micro-batch so that the loop over all of them keeps a budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from remat.budget import parse_budget
from remat.closed_loop import infeasible, plan_within
from remat.errors import InfeasibleBudget
from remat.graph import Graph
from remat.jax.compiled import CompiledPeak, compile_quickly, peak_of
from remat.jax.context import Tie
from remat.jax.emit import Emitted, emit
from remat.jax.micro_batches import Split, loss_in_parts, part_of, sizes_of_parts, summed_value_and_grad
from remat.jax.planned import ROUNDS, Request, Variant, cheapest_plan, first_guess, variants_of
from remat.plan import Plan
from remat.simulator import simulate


@dataclass(frozen=True)
class _Part:
    """The gradient of a part of some size.

    Attributes:
        variants: the ways to write it.
        structure: of what it returns.
    """

    variants: tuple[Variant, ...]
    structure: Any

    def variant(self, plan: Plan) -> Variant:
        return next(one for one in self.variants if one.graph.fingerprint == plan.fingerprint)


@dataclass(frozen=True)
class PlannedParts:
    """A batch's gradient by planned parts.

    Attributes:
        graph: of the gradient of one full part.
        plan: for it; its peak is that of the whole.
        run: the function of the batch's arguments.
    """

    graph: Graph
    plan: Plan
    run: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The value and gradients of the batch."""
        return self.run(*args, **kwargs)


def plan_parts(
    fun: Callable[..., Any],
    plain: Callable[..., Any],
    split: Split,
    request: Request,
    tie: Tie,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    known_plan: Plan | None,
    shapes: Sequence[jax.ShapeDtypeStruct],
) -> PlannedParts:
    """Plan the gradient of one part so that the whole batch's computation keeps the budget.

    Args:
        fun: the loss.
        plain: the gradient of the whole batch at once, of which a share is a share.
        split: how the batch is split.
        request: the budget or the plan.
        tie: how recomputations are held back.
        args: of the whole batch, arrays or tracers.
        kwargs: likewise.
        known_plan: found earlier for the same request.
        shapes: of the flat arguments, with shardings where known.

    Raises:
        InfeasibleBudget: with the smallest budget for which this function succeeds.
        PlanMismatch: where ``request.plan`` is for another function.
    """
    gradient = jax.value_and_grad(loss_in_parts(fun, split), split.argnums, has_aux=True)
    size, _, rest = sizes_of_parts(split, args)
    parts = {length: _trace(gradient, split, args, kwargs, length) for length in (size, rest) if length}
    main = parts[size]
    captured = {length: tuple(part.variants[0].program.constants.values()) for length, part in parts.items()}
    structure = jax.tree.structure((tuple(args), dict(kwargs)))

    def plans_for(plan: Plan) -> dict[int, Plan]:
        return {length: plan if length == size else _rest_plan(part, plan, request) for length, part in parts.items()}

    def whole(plans: Mapping[int, Plan], arrays: Mapping[int, Sequence[Any]]) -> Callable[..., Any]:
        runs: dict[int, Emitted] = {}
        for length, part in parts.items():
            variant = part.variant(plans[length])
            runs[length] = emit(variant.program, plans[length].schedule, variant.turning_point, tie)

        def gradient_for(length: int) -> Callable[..., Any]:
            def call(*some: Any, **named: Any) -> Any:
                results = runs[length](jax.tree.leaves((some, named)), arrays[length])
                return jax.tree.unflatten(parts[length].structure, results)

            return call

        return summed_value_and_grad(fun, split, gradient_for)

    def real_peak(plan: Plan) -> CompiledPeak:
        def flat(values: Sequence[Any], arrays: Mapping[int, Sequence[Any]]) -> Any:
            some, named = jax.tree.unflatten(structure, values)
            return whole(plans_for(plan), arrays)(*some, **named)

        return CompiledPeak(peak_of(compile_quickly(flat, (list(shapes), captured), tie).memory_analysis()))

    given = request.plan or known_plan
    followed = given is not None and any(one.graph.fingerprint == given.fingerprint for one in main.variants)
    if followed and given is not None:
        plan = given
    elif request.plan is not None:
        request.plan.check_graph(main.variants[0].graph)
        raise AssertionError("unreachable: a plan for none of the variants is refused above")
    else:
        plain_peak = _plain_peak(plain, structure, shapes, tie)
        plan = _plan_within(main, request, real_peak, plain_peak)
    return PlannedParts(main.variant(plan).graph, plan, whole(plans_for(plan), captured))


def _trace(
    gradient: Callable[..., Any], split: Split, args: Sequence[Any], kwargs: Mapping[str, Any], length: int
) -> _Part:
    part = jax.eval_shape(lambda *a: tuple(part_of(split, a, 0, length)), *args)
    leaves, structure = jax.tree.flatten((part, dict(kwargs)))

    def function(*flat: Any) -> Any:
        some, named = jax.tree.unflatten(structure, flat)
        return gradient(*some, **named)

    variants, returned = variants_of(function, leaves)
    return _Part(tuple(variants), returned)


def _rest_plan(part: _Part, plan: Plan, request: Request) -> Plan:
    """For the smaller last part: the bytes that the full parts may use are enough."""
    budget = simulate_peak(part, plan)
    try:
        return cheapest_plan(part.variants, budget, request)
    except InfeasibleBudget as error:
        return cheapest_plan(part.variants, error.minimum_bytes, request)


def simulate_peak(part: _Part, plan: Plan) -> int:
    """Bytes of the full part's schedule, or of the plain smaller part where the plan recomputes nothing."""
    plain = simulate(part.variants[0].graph, part.variants[0].graph.plain_schedule).peak_bytes
    return max(1, plan.traced_peak_bytes or plan.peak_bytes if plan.recomputed else plain)


def _plain_peak(plain: Callable[..., Any], structure: Any, shapes: Sequence[Any], tie: Tie) -> int:
    def flat(values: Sequence[Any]) -> Any:
        some, named = jax.tree.unflatten(structure, values)
        return plain(*some, **named)

    return peak_of(compile_quickly(flat, (list(shapes),), tie).memory_analysis())


def _plan_within(
    main: _Part, request: Request, real_peak: Callable[[Plan], CompiledPeak], plain_peak_bytes: int
) -> Plan:
    assert request.budget is not None
    budget_bytes = parse_budget(request.budget, max(1, plain_peak_bytes))
    graph = main.variants[0].graph
    traced_bytes = simulate(graph, graph.plain_schedule).peak_bytes
    unplanned = cheapest_plan(main.variants[:1], max(1, traced_bytes), request)
    baseline = real_peak(unplanned)
    found = dataclasses.replace(unplanned, peak_bytes=baseline.expected_bytes)
    if baseline.highest_bytes > budget_bytes:
        try:
            found = plan_within(
                budget_bytes,
                first_guess(graph, traced_bytes, baseline.highest_bytes, budget_bytes),
                lambda planner_budget: cheapest_plan(main.variants, planner_budget, request),
                real_peak,
                rounds=ROUNDS[0],
                last_rounds=ROUNDS[1],
            )
        except InfeasibleBudget as error:
            raise infeasible(budget_bytes, error.minimum_bytes, error.binding_op) from None
    return dataclasses.replace(
        found,
        traced_peak_bytes=simulate(main.variant(found).graph, found.schedule).peak_bytes,
        baseline_peak_bytes=plain_peak_bytes,
        budget_bytes=budget_bytes,
    )
