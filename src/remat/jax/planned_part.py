"""Plans a part of a function, such as the gradient of a micro-batch in a loop, so that the whole keeps a budget."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax

from remat.core.collecting import collecting_rarely
from remat.core.errors import InfeasibleBudget
from remat.core.graph import Graph
from remat.core.plan import Plan
from remat.fit.peaks import PeakRange
from remat.fit.request import Request
from remat.fit.variants import Variants
from remat.jax._private import ClosedJaxpr
from remat.jax.candidate import FunctionCandidate, cheapest_plan, plan_with_names
from remat.jax.context import Tie, barriers_stay, for_a_plan
from remat.jax.emit.evaluate import emit
from remat.jax.first_run import REPLAN, FirstRun, OnBroken
from remat.jax.peak import Lowered, compiler_options, shape_of
from remat.jax.planned import Follower, leaves_of, naming_our_jit, refuse_slices_over_devices
from remat.jax.split.choose import SplittableFunction
from remat.jax.split.split_jaxpr import Splitter
from remat.jax.trace.program import trace_jaxpr
from remat.jax.variants import Variant, variants_of_jaxpr

Function: TypeAlias = Callable[..., Any]
Transform: TypeAlias = Callable[[Function], Function]
Whole: TypeAlias = Callable[[Transform], Function]
"""Gives the whole function, in which each call of the part goes through a transform: the plan's, or none."""


@dataclass(frozen=True)
class PlannedPart:
    """A function of which one part keeps a plan.

    Attributes:
        graph: of the part.
        plan: for the part; its ``peak_bytes`` are those of the whole function.
        run: the whole function.
    """

    graph: Graph
    plan: Plan
    run: Function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate the whole function."""
        return self.run(*args, **kwargs)


@dataclass(frozen=True)
class _Part:
    """The part for arguments of one set of shapes.

    Attributes:
        closed: its trace.
        structure: of what it returns.
        kept_names: as in ``variants_of_jaxpr``.
        tie: likewise.
    """

    closed: ClosedJaxpr
    structure: Any
    kept_names: tuple[str, ...]
    tie: Tie

    def variants(self, slices: int = 1, least_bytes: int = 0) -> Variants[Variant]:
        """The ways to write it, with its region in so many slices where it can be cut so.

        Args:
            slices: 1 for as it is.
            least_bytes: what lives inside of a region before it is cut.
        """
        cut = None if slices == 1 else Splitter(self.closed, least_bytes).split(slices)
        return variants_of_jaxpr(self.closed if cut is None else cut, None, self.kept_names, tie=self.tie)


@dataclass(frozen=True)
class _Followed:
    """A part with the plan that it follows.

    Attributes:
        part: for arguments of one set of shapes.
        variant: the way to write it that the plan is for.
        plan: what it follows.
    """

    part: _Part
    variant: Variant
    plan: Plan

    @classmethod
    def within(cls, part: _Part, variants: Variants[Variant], budget_bytes: int, request: Request) -> _Followed:
        """The plan of the request's checkpoints, the cheapest plan within bytes of the trace, or the smallest one."""
        if request.checkpoints is not None and request.budget is None:
            plain = variants[0]
            return cls(part, plain, plan_with_names(plain.program, plain.graph, request.checkpoints))
        try:
            plan = cheapest_plan(variants, budget_bytes, request)
        except InfeasibleBudget as error:
            plan = cheapest_plan(variants, error.minimum_bytes, request)
        variant = variants.of_plan(plan)
        assert variant is not None, "the plan was made for one of the variants"
        return cls(part, variant, plan)

    @property
    def captured(self) -> tuple[Any, ...]:
        """The arrays that the part reads beside its arguments."""
        return tuple(self.variant.program.constants.values())

    def run(self, leaves: Sequence[Any], captured: Sequence[Any], tie: Tie) -> Any:
        """Evaluate the part under its plan."""
        run = emit(self.variant.program, self.plan.schedule, self.variant.turning_point, tie)
        return jax.tree.unflatten(self.part.structure, run(leaves, captured))


@collecting_rarely()
def plan_part(
    whole: Whole,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    request: Request,
    tie: Tie,
    *,
    shapes: Sequence[jax.ShapeDtypeStruct],
    donated: Sequence[int] = (),
    plain: Function | None = None,
) -> PlannedPart:
    """Plan the part for the shapes of its first call, so that the whole function keeps the budget.

    Calls with other shapes (a smaller last micro-batch) may use the bytes that the first one needs.

    Args:
        whole: the function; its part may read what the whole one captured, but no value of its own trace.
        args: of the whole function, arrays or tracers.
        kwargs: likewise.
        request: the budget or the plan.
        tie: how recomputations are held back.
        shapes: of the flat arguments, with shardings where known.
        donated: which flat arguments' buffers the results may take over.
        plain: the function whose compiled peak a share of the budget is a share of; None for the whole one, its part
            not planned.

    Raises:
        InfeasibleBudget: with the smallest budget for which this function succeeds.
        PlanMismatch: where ``request.plan`` is for another function.
        UnsupportedStep: where slices are asked for over several devices.
    """
    refuse_slices_over_devices(request, shapes)
    structure = jax.tree.structure((tuple(args), dict(kwargs)))
    parts = _parts_of(whole, args, kwargs, request.checkpoints or (), tie)
    main = next(iter(parts.values()))

    @functools.cache  # So that the plan which is followed is the one whose program was compiled.
    def other(key: Any, allowed_bytes: int, slices: int) -> _Followed:
        part = parts[key]
        return _Followed.within(part, variants_of_other(key, slices), allowed_bytes, request)

    @functools.cache
    def variants_of_other(key: Any, slices: int) -> Variants[Variant]:
        return parts[key].variants(slices, splittable.least_bytes if slices > 1 else 0)

    def followed_by_all(plan: Plan, variant: Variant, slices: int) -> dict[Any, _Followed]:
        allowed_bytes = plan.peak_bytes if plan.traced_peak_bytes is None else plan.traced_peak_bytes
        return {
            key: _Followed(part, variant, plan) if part is main else other(key, allowed_bytes, slices)
            for key, part in parts.items()
        }

    def emitted(followed: Mapping[Any, _Followed], arrays: Mapping[Any, Sequence[Any]]) -> Function:
        def transform(_: Function) -> Function:
            def call(*some: Any, **named: Any) -> Any:
                leaves, key = _key_of(some, named)
                return followed[key].run(leaves, arrays[key], tie)

            return call

        return whole(transform)

    def candidate_of(closed: ClosedJaxpr, slices: int) -> FunctionCandidate:
        def compiled_peak(plan: Plan) -> PeakRange:
            followed = followed_by_all(plan, candidate.variant_of(plan), slices)
            arrays = {key: one.captured for key, one in followed.items()}

            def flat(*values: Any) -> Any:
                given, inner = values[: len(shapes)], values[len(shapes) :]
                some, named = jax.tree.unflatten(structure, given)
                rest = iter(inner)
                own = {key: [next(rest) for _ in group] for key, group in arrays.items()}
                return emitted(followed, own)(*some, **named)

            everything = (*shapes, *(array for group in arrays.values() for array in group))
            return Lowered(flat, everything, tie, donated).peak()

        candidate = FunctionCandidate(variants_of_jaxpr(closed, None, main.kept_names, tie=tie), compiled_peak)
        return candidate

    plain_bytes = None if plain is None else _plain_peak_bytes(plain, structure, shapes, tie, donated)
    with naming_our_jit(tie):
        splittable = SplittableFunction(main.closed, candidate_of)
        plan = splittable.planned(request, plain_bytes)
    variant = splittable.candidate_for(plan).variant_of(plan)
    followed = followed_by_all(plan, variant, 1 if plan.split is None else plan.split.slices)
    return PlannedPart(variant.graph, plan, emitted(followed, {key: one.captured for key, one in followed.items()}))


def _parts_of(
    whole: Whole, args: Sequence[Any], kwargs: Mapping[str, Any], kept_names: Sequence[str], tie: Tie
) -> dict[Any, _Part]:
    """The part for all the shapes that it is called with, in the order of the calls."""
    called: dict[Any, tuple[Function, list[Any], Any]] = {}

    def transform(function: Function) -> Function:
        def call(*some: Any, **named: Any) -> Any:
            leaves, key = _key_of(some, named)
            called.setdefault(key, (function, list(map(shape_of, leaves)), jax.tree.structure((some, named))))
            return function(*some, **named)

        return call

    with for_a_plan():
        jax.eval_shape(whole(transform), *args, **kwargs)
    parts = {}
    for key, (function, leaves, structure) in called.items():

        def flat(*values: Any, function: Function = function, structure: Any = structure) -> Any:
            some, named = jax.tree.unflatten(structure, values)
            return function(*some, **named)

        parts[key] = _Part(*trace_jaxpr(flat, leaves), tuple(kept_names), tie)
    return parts


def _key_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], Any]:
    leaves, structure = jax.tree.flatten((tuple(args), dict(kwargs)))
    return leaves, (structure, tuple((jax.numpy.shape(leaf), str(jax.typeof(leaf).dtype)) for leaf in leaves))


def _plain_peak_bytes(plain: Function, structure: Any, shapes: Sequence[Any], tie: Tie, donated: Sequence[int]) -> int:
    def flat(*values: Any) -> Any:
        some, named = jax.tree.unflatten(structure, values)
        return plain(*some, **named)

    with for_a_plan():
        return Lowered(flat, shapes, tie, donated).peak().expected_bytes


class PartlyPlanned(Follower):
    """``jax.jit`` of a function of which one part is planned.

    Args:
        whole: the function.
        request: the budget; without one nothing is planned.
        donate_argnums: as in ``jax.jit``.
        plain: as in ``plan_part``.
        on_broken: what to do where the compiled function takes more than the budget.

    Attributes:
        plan: the plan of the newest trace; None before, or without a budget.
        graph: the part that the plan is for.
    """

    def __init__(
        self,
        whole: Whole,
        request: Request,
        donate_argnums: Sequence[int] = (),
        plain: Function | None = None,
        on_broken: OnBroken = REPLAN,
    ) -> None:
        super().__init__(request)
        self._first_run = FirstRun(self, on_broken)
        self._whole = whole
        self._donated = tuple(donate_argnums)
        self._plain = plain
        self._compiled: dict[Any, Any] = {}

    def __call__(self, *args: Any) -> Any:
        """Call the compiled function; the first call with new shapes traces, plans and compiles."""
        if self._request.plans:
            _, key = _key_of(args, {})
            self._first_run.check(
                key, lambda: self._for(args).lower(*args).compile(), lambda: self._compiled.pop(key, None)
            )
        return self._for(args)(*args)

    def plan_for(self, *args: Any) -> Plan:
        """Plan the function for arguments like these, without running it. There must be a budget.

        Raises:
            InfeasibleBudget: with the smallest budget for which this function succeeds.
        """
        self._for(args)
        assert self.plan is not None
        return self.plan

    def _for(self, args: Sequence[Any]) -> Any:
        """The function under ``jax.jit`` for arguments like these."""
        _, key = _key_of(args, {})
        if key not in self._compiled:
            self._compiled[key] = self._compile(args, key)
        return self._compiled[key]

    def _compile(self, args: Sequence[Any], key: Any) -> Any:
        run = self._whole(lambda function: function)
        with barriers_stay():
            if self._request.plans:
                shapes = [shape_of(leaf) for leaf in jax.tree.leaves(args)]
                donated = leaves_of(args, self._donated)

                def plan(request: Request) -> PlannedPart:
                    return plan_part(
                        self._whole,
                        args,
                        {},
                        request,
                        "barrier",
                        shapes=shapes,
                        donated=donated,
                        plain=self._plain,
                    )

                run = self._followed(key, plan).run

        def with_barriers(*some: Any) -> Any:
            with barriers_stay():
                return run(*some)

        options = compiler_options("barrier")
        return jax.jit(with_barriers, donate_argnums=self._donated, compiler_options=options or None)
