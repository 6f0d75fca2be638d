"""From a function and a budget to the same function that keeps it: trace, plan, compile, compare, plan again."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import jax

from remat.core.collecting import collecting_rarely
from remat.core.errors import InfeasibleBudget, UnsupportedStep
from remat.core.graph import Graph
from remat.core.plan import Plan
from remat.core.simulator import simulate
from remat.fit.peaks import PeakRange
from remat.fit.request import Request
from remat.jax import _private
from remat.jax._private import ClosedJaxpr
from remat.jax.candidate import FunctionCandidate
from remat.jax.context import Tie
from remat.jax.early_updates import EarlyUpdatesOf
from remat.jax.emit.evaluate import FlatFunction
from remat.jax.mapped import MappedFunction, holds_a_map
from remat.jax.peak import Compiler, Returned, emitted, is_sharded
from remat.jax.ranks import planned_for_all
from remat.jax.sharding import Layouts, arrays_sent, received_in_bodies
from remat.jax.split.choose import SplittableFunction
from remat.jax.trace import maps
from remat.jax.trace.graph import after_donation
from remat.jax.trace.program import Program, program_of, trace_jaxpr
from remat.jax.variants import Variant, variants_of_jaxpr

_log = logging.getLogger("remat")


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
    run: FlatFunction
    structure: Any

    def __call__(self, arguments: Sequence[Any]) -> Any:
        """Evaluate the function on its flat arguments."""
        results = self.run(arguments, tuple(self.program.constants.values()))
        return jax.tree.unflatten(self.structure, results)


class Follower:
    """A function that is planned when JAX traces it.

    When JAX traces it again for arguments of the same kinds, the plan that was made before is followed.

    Args:
        request: what the user asked for.

    Attributes:
        plan: the plan of the newest trace; None before, or without a budget.
        graph: the step that the plan is for.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._newest: Any = None
        self._plans: dict[Any, Plan] = {}
        self._promised_bytes: int | None = None

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """As a function: a method of the class that it is defined in."""
        return self if instance is None else types.MethodType(self, instance)  # type: ignore[arg-type]

    @property
    def plan(self) -> Plan | None:
        """The plan of the newest trace; None before, or without a budget."""
        return self._newest.plan if self._newest is not None else None

    @property
    def graph(self) -> Graph | None:
        """The step that ``plan`` is for."""
        return self._newest.graph if self._newest is not None else None

    @property
    def has_budget(self) -> bool:
        """Was a budget asked for, which a plan for less may keep where this one does not?"""
        return self._request.budget is not None

    @contextlib.contextmanager
    def planning_for(self, lowered_bytes: int, promised_bytes: int) -> Iterator[None]:
        """Plans for fewer bytes than were asked for, while in this context.

        Args:
            lowered_bytes: the budget that is planned for.
            promised_bytes: the budget that such a plan is to keep, and names.
        """
        request = self._request
        self._request = dataclasses.replace(request, budget=lowered_bytes)
        self._promised_bytes = promised_bytes
        try:
            yield
        finally:
            self._request = request
            self._promised_bytes = None

    def _check_plans(self, caller: str) -> None:
        """Refuse ``plan_for`` where there is nothing to plan."""
        if not self._request.plans:
            raise ValueError(f"plan_for has nothing to plan: give {caller} a budget=, a plan= or checkpoints=")

    def _plan_of(self, key: Any) -> Plan:
        """The plan that was made for a key, which need not be the newest: JAX does not trace the same shapes twice."""
        plan = self._plans.get(key, self.plan)
        assert plan is not None, "nothing was traced"
        return plan

    def _followed(self, key: Any, make: Callable[[Request], PlannedT]) -> PlannedT:
        """What ``make`` makes of the request, to which a plan found for the same key before is added as known."""
        if self._promised_bytes is None:
            newest = make(dataclasses.replace(self._request, known=self._plans.get(key)))
        else:
            lowered: Any = make(self._request)
            plan = dataclasses.replace(lowered.plan, budget_bytes=self._promised_bytes)
            newest = dataclasses.replace(lowered, plan=plan)
        self._newest = newest
        self._plans[key] = newest.plan
        return newest


def leaves_of(arguments: Sequence[Any], places: Collection[int]) -> list[int]:
    """Which of the flat arguments belong to the arguments at some places."""
    leaves: list[int] = []
    first = 0
    for place, argument in enumerate(arguments):
        count = len(jax.tree.leaves(argument))
        if place in places:
            leaves += range(first, first + count)
        first += count
    return leaves


@collecting_rarely()
def plan_function(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    request: Request,
    tie: Tie,
    *,
    shapes: Sequence[jax.ShapeDtypeStruct],
    donated: Sequence[int] = (),
    out_shardings: Any = None,
) -> Planned:
    """Plan a function of flat arguments.

    Args:
        function: takes the flat arguments and returns any pytree.
        arguments: arrays or tracers.
        request: the budget, the plan or the checkpoints.
        tie: how recomputations are held back.
        shapes: of the arguments, with shardings where known; programs are compiled for these to see the real peak.
        donated: which arguments' buffers the results may take over.
        out_shardings: where the results go, as ``jax.jit`` takes it.

    Raises:
        InfeasibleBudget: where no schedule fits; it names the smallest budget.
        PlanMismatch: where ``request.plan`` is for another function.
        UnsupportedStep: where a shape is unknown, or where slices are asked for over several devices.
    """
    refuse_slices_over_devices(request, shapes)
    closed, structure = trace_jaxpr(function, arguments)
    mapped = MappedFunction.of(closed)
    if mapped is not None:
        _refuse_levers_of_whole_steps(request)
        closed = mapped.body
    takes_maps_apart = mapped is None and not _private.names_devices() and holds_a_map(closed.jaxpr)
    is_over_devices = mapped is None and (takes_maps_apart or is_sharded(shapes))
    find_received = functools.partial(received_in_bodies, shapes=shapes, tie=tie) if is_over_devices else None
    returned = None if out_shardings is None else Returned(structure, out_shardings)
    accept: Callable[[str], bool] | None = None
    compilers: dict[str, Compiler] = {}

    def compiler_of(one: Variant) -> Compiler:
        return Compiler(one.program, one.turning_point, tie, shapes, donated, accept, returned, mapped)

    given = request.plan if request.plan is not None else request.known
    moves_updates = "update" in request.levers or (given is not None and given.update is not None)
    updates = EarlyUpdatesOf(donated)

    def candidate_of(one: ClosedJaxpr, slices: int) -> FunctionCandidate:
        nonlocal accept
        variants = variants_of_jaxpr(
            one,
            find_received,
            request.checkpoints or (),
            tie=tie,
            trace_body=None if mapped is None else mapped.traced_with,
            maps=takes_maps_apart,
        )
        if moves_updates:
            variants = variants.changed(updates.moved)
        if find_received is not None:
            layouts = Layouts(shapes, tie)
            variants = variants.changed(lambda one: _on_one_device(one, layouts))
            _, text = compiler_of(variants[0]).memory_and_text(variants[0].graph.plain_schedule)
            allowed = arrays_sent(text)

            def sends_no_more(text: str) -> bool:
                return arrays_sent(text) <= allowed

            accept = sends_no_more
        traced = variants
        if donated and mapped is None:
            variants = variants.changed(
                lambda one: dataclasses.replace(one, graph=after_donation(one.graph, one.program, donated))
            )

        def compiled_peak(plan: Plan) -> PeakRange:
            if _private.names_devices():
                # The compiler cannot be asked: the function is only a part of a program over named axes.
                return PeakRange.exactly(simulate(candidate.graph_of(plan), plan.schedule).peak_bytes)
            if plan.fingerprint not in compilers:
                compilers[plan.fingerprint] = compiler_of(candidate.variant_of(plan))
            return compilers[plan.fingerprint].peak(plan.schedule)

        candidate = FunctionCandidate(variants, compiled_peak, traced)
        return candidate

    splittable = SplittableFunction(closed, candidate_of)
    plain_bytes = _plain_bytes(closed, shapes, tie, donated, returned) if takes_maps_apart else None

    def make() -> Plan:
        with naming_our_jit(tie), _naming_what_stays_whole(closed, takes_apart=takes_maps_apart):
            plan = splittable.planned(request, plain_bytes)
        if plan in (request.plan, request.known):
            return plan
        if moves_updates:
            plan = dataclasses.replace(plan, update=updates.described(splittable.candidate_for(plan).variant_of(plan)))
        return plan

    plan = planned_for_all(shapes, splittable.plain.graph, request, make)
    if plan not in (request.plan, request.known):
        _log.info("%s", plan)
    chosen = splittable.candidate_for(plan).variant_of(plan)
    run, whole = emitted(chosen.program, plan.schedule, chosen.turning_point, tie, mapped, donated)
    return Planned(whole, chosen.graph, plan, run, structure)


def _refuse_levers_of_whole_steps(request: Request) -> None:
    """Inside of ``shard_map`` operations run again, and nothing else.

    Raises:
        UnsupportedStep: where slices or early updates are asked for.
    """
    if others := sorted({"split", "update"}.intersection(request.levers)):
        raise UnsupportedStep(
            f"a step under shard_map is planned inside, and there only 'recompute' is known: leave {', '.join(others)} "
            "out of levers="
        )


def refuse_slices_over_devices(request: Request, shapes: Sequence[jax.ShapeDtypeStruct]) -> None:
    """Slices are for one device.

    Raises:
        UnsupportedStep: where they are asked for and arguments lie on several devices.
    """
    if "split" in request.levers and is_sharded(shapes):
        raise UnsupportedStep(
            "slices of a function whose arguments lie on several devices cannot be planned: leave 'split' out of "
            "levers="
        )


@contextlib.contextmanager
def naming_our_jit(tie: Tie) -> Iterator[None]:
    """Says of a budget that a plain ``jax.jit`` on a CPU cannot keep that ``remat.jax.jit`` may keep it."""
    try:
        yield
    except InfeasibleBudget as error:
        if tie == "barrier":
            raise
        raise error.saying(
            f"{error}. Or compile with remat.jax.jit in place of jax.jit, which reaches smaller peaks: a plain jax.jit "
            "on a CPU runs some recomputations early, as soon as their inputs exist"
        ) from None


@contextlib.contextmanager
def _naming_what_stays_whole(closed: ClosedJaxpr, *, takes_apart: bool) -> Iterator[None]:
    """Says of a budget that cannot be kept that calls of ``shard_map`` inside of others ran as they are."""
    try:
        yield
    except InfeasibleBudget as error:
        if not takes_apart or not maps.hold_maps_in_maps(closed.jaxpr):
            raise
        raise error.saying(
            f"{error}. A shard_map inside of another one is not planned: map over the axes of both in one call, whose "
            "operations and loops are planned"
        ) from None


def _plain_bytes(
    closed: ClosedJaxpr,
    shapes: Sequence[jax.ShapeDtypeStruct],
    tie: Tie,
    donated: Sequence[int],
    returned: Returned | None,
) -> int:
    """The peak of a function as it is: taken apart, the calls of ``shard_map`` need less, or more, than they do."""
    whole = program_of(closed)
    compiler = Compiler(whole, len(whole.instructions) - 1, tie, shapes, donated, None, returned)
    memory, _ = compiler.memory_and_text(tuple(range(len(whole.instructions))))
    return memory.peak_bytes


def _on_one_device(variant: Variant, layouts: Layouts) -> Variant:
    program, graph = layouts.on_one_device(variant.program, variant.graph)
    return dataclasses.replace(variant, program=program, graph=graph)
