"""``jit``: ``jax.jit`` with the compiler options that recomputation needs, and with a budget for a whole step."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, overload

import jax

from remat.core.collecting import collecting_rarely
from remat.core.errors import PlanMismatch
from remat.core.plan import Plan
from remat.fit.first_step import OnChange, replans
from remat.fit.request import FIT_LEVERS, WHOLE_STEP_LEVERS, Request
from remat.jax import _private
from remat.jax.api.arguments import (
    Call,
    checked_levers,
    is_any_traced,
    jit_options_of,
    kinds_of,
    places_of,
    refuse_shapes,
    shapes_of,
)
from remat.jax.context import barriers_stay, current_tie
from remat.jax.first_run import REPLAN, FirstRun, OnBroken
from remat.jax.peak import compiler_options
from remat.jax.planned import Follower, plan_function


@overload
def jit(
    fun: Callable[..., Any],
    *,
    budget: int | str | None = None,
    plan: Plan | None = None,
    checkpoints: Sequence[str] | None = None,
    planner: str = "auto",
    time_limit_s: float | None = None,
    options: Mapping[str, Any] | None = None,
    levers: Sequence[str] = ("recompute",),
    on_change: OnChange = "replan",
    strict: bool = False,
    **jit_options: Any,
) -> Jitted: ...
@overload
def jit(
    fun: None = None,
    *,
    budget: int | str | None = None,
    plan: Plan | None = None,
    checkpoints: Sequence[str] | None = None,
    planner: str = "auto",
    time_limit_s: float | None = None,
    options: Mapping[str, Any] | None = None,
    levers: Sequence[str] = ("recompute",),
    on_change: OnChange = "replan",
    strict: bool = False,
    **jit_options: Any,
) -> Callable[[Callable[..., Any]], Jitted]: ...


def jit(
    fun: Callable[..., Any] | None = None,
    *,
    budget: int | str | None = None,
    plan: Plan | None = None,
    checkpoints: Sequence[str] | None = None,
    planner: str = "auto",
    time_limit_s: float | None = None,
    options: Mapping[str, Any] | None = None,
    levers: Sequence[str] = ("recompute",),
    on_change: OnChange = "replan",
    strict: bool = False,
    **jit_options: Any,
) -> Any:
    """``jax.jit`` with what the platform needs to keep recomputations cheap, and to keep a budget if one is given.

    On a CPU, XLA takes ``optimization_barrier`` out before it merges equal computations, which undoes
    ``jax.checkpoint`` and remat's cheaper ties; this compiles with that pass disabled. Elsewhere nothing is added.

    With ``budget``, ``plan`` or ``checkpoints`` the whole function is planned, whatever it computes: pass a training
    step, gradients and optimizer's update included, written with plain ``jax.value_and_grad``. Under ``vmap`` the
    budget is one of the whole batch. A step that is one call of ``shard_map`` is planned inside, for one device. Loops
    over training steps or micro-batches in the function, as by ``lax.scan``, are planned inside, too.

    Args:
        fun: the function to compile; None to use this as a decorator with arguments: ``@remat.jax.jit(budget="60%")``.
        budget: peak device bytes of the compiled function, everything counted (arguments, results, what lies between):
            an int, "4GiB", or "60%" of the plain function's own.
        plan: a plan made earlier for the same function, instead of a budget.
        checkpoints: names that ``jax.ad_checkpoint.checkpoint_name`` gave to values. Without a budget these are kept
            and everything else between them is recomputed. Beside a budget they are hints: they are kept if the budget
            allows it, and the plan decides about everything else.
        planner: a planner's name.
        time_limit_s: wall seconds for each round of planning; None for a fixed amount of work, so that every machine
            makes the same plan.
        options: passed on to the planner.
        levers: what a plan may do. "recompute" runs equations again. "split" runs the widest part of the function that
            can be cut along an axis, such as the head of a language model, slice by slice; sums over slices are made
            in another order, so that numbers differ by rounding. A split is used where it is predicted to cost less.
            "update", for a whole step, runs each update of the optimizer as soon as its gradient is final and the old
            parameter is read no more; the plan says what forbids it.
        on_change: what to do where the compiled program takes more than the budget by over 1 %, which is seen before
            its first run: "replan" plans once more, for as much less; "keep" keeps the plan.
        strict: raise an error where the budget does not hold then either; else this is logged as a warning, once.
        **jit_options: as in ``jax.jit``: ``static_argnums``, ``static_argnames``, ``donate_argnums``, ``in_shardings``
            and so on.

    Returns:
        A callable with ``lower``, ``trace``, ``eval_shape`` and ``clear_cache`` as in ``jax.jit``, with ``plan_for``,
        which plans without running, and ``plan``, the plan of the newest trace.

    Raises:
        InvalidBudget: if the budget cannot be read.
        InfeasibleBudget: when the function is first called, where nothing fits; it names the smallest budget.
        UnsupportedStep: when it is first called, where no value has the name of a checkpoint.
        PlanMismatch: with ``strict``, when it is first called, where the compiled program takes more than the budget.
    """
    on_broken = OnBroken(replans(on_change), strict)
    kept = None if checkpoints is None else tuple(checkpoints)
    request = Request(
        budget, plan, kept, planner, time_limit_s, dict(options or {}), levers=checked_levers(levers, kept)
    )
    request.check("remat.jax.jit", takes_hints=True, takes_levers=WHOLE_STEP_LEVERS)
    if fun is None:
        return lambda function: Jitted(function, request, jit_options, on_broken)
    return Jitted(fun, request, jit_options, on_broken)


class Jitted(Follower):
    """What ``jit`` returns.

    Args:
        fun: as in ``jit``.
        request: what the user asked for.
        jit_options: as in ``jit``.
        on_broken: what to do where the compiled program takes more than the budget.
        first_run: looks at the programs in place of its own, where the plan is of a function inside of this one.

    Attributes:
        plan: the plan of the newest trace; None before, or without a budget.
        graph: the step that the plan is for.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        request: Request,
        jit_options: Mapping[str, Any],
        on_broken: OnBroken = REPLAN,
        first_run: FirstRun | None = None,
    ) -> None:
        # Keras' limit cuts the batch itself.
        request.check("remat.jax.jit", takes_hints=True, takes_levers=FIT_LEVERS)
        if not callable(fun):
            raise TypeError(f"remat.jax.jit takes a function, not {type(fun).__name__}")
        super().__init__(request)
        functools.update_wrapper(self, fun, updated=())
        self._fun = fun
        self._first_run = first_run if first_run is not None else FirstRun(self, on_broken) if request.plans else None
        options = dict(jit_options)
        self._static = places_of(fun, options.pop("static_argnums", None), options.pop("static_argnames", None))
        self._donated = places_of(fun, options.pop("donate_argnums", None), options.pop("donate_argnames", None))
        self._out_shardings = options.get("out_shardings")
        own_options = dict(options.pop("compiler_options", None) or {})
        options |= {**jit_options_of("static", self._static), **jit_options_of("donate", self._donated)}
        self._shapes: tuple[jax.ShapeDtypeStruct, ...] | None = None
        self._on_broken = on_broken
        self._of_batches: dict[Any, Jitted] = {}

        @functools.wraps(fun)
        def with_barriers(*args: Any, **kwargs: Any) -> Any:
            with barriers_stay():
                return self._traced(*args, **kwargs)

        @functools.wraps(fun)
        def inside_another(*args: Any, **kwargs: Any) -> Any:
            return self._traced(*args, **kwargs)

        @functools.wraps(fun)
        def plainly(*args: Any, **kwargs: Any) -> Any:
            return fun(*args, **kwargs)

        compiled_with = {**own_options, **compiler_options("barrier")}
        self._outermost: Any = jax.jit(with_barriers, compiler_options=compiled_with or None, **options)
        self._inner: Any = jax.jit(inside_another, **options)
        self._plain: Any = jax.jit(plainly, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the compiled function; the first call with new shapes traces, plans and compiles."""
        call = Call.of(args, kwargs, self._static)
        if is_any_traced(call.leaves):
            if self._request.plans and any(map(_private.is_batched, call.leaves)) and not _private.names_devices():
                return self._call_on_a_batch(call, args, kwargs)
            return self._inner(*args, **kwargs)  # Compiler options are for the outermost function only.
        refuse_shapes(call.leaves, "remat.jax.jit")
        with self._shapes_of(call):
            if self._first_run is not None:
                shapes = self._shapes if self._shapes is not None else shapes_of(call.leaves)
                self._first_run.check(
                    self._key(call, shapes, "barrier"),
                    lambda: self._lowered(args, kwargs).compile(),
                    self._outermost.clear_cache,
                )
            return self._outermost(*args, **kwargs)

    def _call_on_a_batch(self, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Under ``vmap`` the function of the whole batch keeps the budget, as a function of its own."""
        if self._request.plan is not None:  # It may be for one example.
            with contextlib.suppress(PlanMismatch):
                return self._inner(*args, **kwargs)

        shape = dataclasses.replace(call, leaves=[])  # What is remembered holds no value of a trace.

        def function(*flat: Any) -> Any:
            own, named = shape.arguments(flat)
            return self._fun(*own, **named)

        # A function that captures values of another trace cannot be handed to JAX's rules for batches.
        if is_any_traced(jax.make_jaxpr(function)(*shapes_of(call.leaves)).consts):
            return self._inner(*args, **kwargs)
        one_example = jax.custom_batching.custom_vmap(function)

        @one_example.def_vmap
        def of_a_batch(axis_size: int, in_batched: Sequence[bool], *flat: Any) -> tuple[Any, Any]:
            axes = tuple(0 if is_batched else None for is_batched in in_batched)
            key = call.structure, repr(sorted(call.static.items(), key=repr)), axis_size, axes
            if key not in self._of_batches:
                whole = jax.vmap(function, in_axes=axes, axis_size=axis_size)
                self._of_batches[key] = Jitted(whole, self._request, {}, self._on_broken)
            batched = self._of_batches[key]
            results = batched(*flat)
            self._newest = batched._newest
            return results, jax.tree.map(lambda _: True, results)

        return one_example(*call.leaves)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """As in ``jax.jit``: arguments are arrays or ``jax.ShapeDtypeStruct``. A function with a budget is planned."""
        with self._shapes_of(Call.of(args, kwargs, self._static)):
            return self._lowered(args, kwargs)

    def _lowered(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        with collecting_rarely() if self._request.plans else contextlib.nullcontext():
            return self._outermost.lower(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """As in ``jax.jit``. A function with a budget is planned."""
        with self._shapes_of(Call.of(args, kwargs, self._static)):
            return self._outermost.trace(*args, **kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """As in ``jax.jit``: shapes and dtypes of the results. Nothing is planned."""
        return self._plain.eval_shape(*args, **kwargs)

    def clear_cache(self) -> None:
        """As in ``jax.jit``; plans are forgotten, too, so that the next call traces and plans anew."""
        for jitted in (self._outermost, self._inner, self._plain):
            jitted.clear_cache()
        self._plans.clear()
        self._of_batches.clear()
        if self._first_run is not None:
            self._first_run.forget()

    def plan_for(self, *args: Any, **kwargs: Any) -> Plan:
        """Plan the function for arguments like these, arrays or ``jax.ShapeDtypeStruct``, without running it.

        Raises:
            InfeasibleBudget: with the smallest budget for which this function succeeds.
            ValueError: where there is nothing to plan.
        """
        self._check_plans("remat.jax.jit")
        self.lower(*args, **kwargs)
        call = Call.of(args, kwargs, self._static)
        return self._plan_of(self._key(call, shapes_of(call.leaves), "barrier"))

    def _key(self, call: Call, shapes: Sequence[jax.ShapeDtypeStruct], tie: str) -> Any:
        shardings = tuple(shape.sharding for shape in shapes)
        return call.structure, kinds_of(shapes), shardings, repr(sorted(call.static.items(), key=repr)), tie

    @contextlib.contextmanager
    def _shapes_of(self, call: Call) -> Iterator[None]:
        """While tracing, the shardings of the arrays behind the tracers are known from here."""
        if not self._request.plans:
            yield
            return
        self._shapes = shapes_of(call.leaves)
        try:
            yield
        finally:
            self._shapes = None

    def _traced(self, *args: Any, **kwargs: Any) -> Any:
        if not self._request.plans:
            return self._fun(*args, **kwargs)
        call = Call.of(args, kwargs, self._static)

        def function(*flat: Any) -> Any:
            own, named = call.arguments(flat)
            return self._fun(*own, **named)

        tie = current_tie()
        shapes = self._shapes if self._shapes is not None else shapes_of(call.leaves)
        planned = self._followed(
            self._key(call, shapes, tie),
            lambda request: plan_function(
                function,
                call.leaves,
                request,
                tie,
                shapes=shapes,
                donated=call.leaves_at(self._donated),
                out_shardings=self._out_shardings,
            ),
        )
        return planned(call.leaves)
