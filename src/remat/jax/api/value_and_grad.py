"""``value_and_grad`` and ``grad``: stand in for JAX's own and keep a budget."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import jax

from remat.core.errors import PlanMismatch, UnsupportedStep
from remat.core.graph import Graph
from remat.core.plan import Plan
from remat.fit.first_step import OnChange, replans
from remat.fit.request import Request
from remat.jax import _private
from remat.jax.api.arguments import (
    Place,
    checked_levers,
    is_any_traced,
    jit_options_of,
    kinds_of,
    places_of,
    refuse_shapes,
    shapes_of,
)
from remat.jax.api.jit import Jitted
from remat.jax.context import barriers_stay, current_tie
from remat.jax.first_run import REPLAN, FirstRun, OnBroken
from remat.jax.micro_batches import Split, loss_of_piece, quotient, summed_value_and_grad
from remat.jax.planned import Follower, Planned, plan_function
from remat.jax.planned_part import Transform, plan_part
from remat.micro_batches.reduce import RATIO, sum_and_denominator


@overload
def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    **options: Any,
) -> Gradient: ...
@overload
def value_and_grad(
    fun: None = None,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    **options: Any,
) -> Callable[[Callable[..., Any]], Gradient]: ...


def value_and_grad(
    fun: Callable[..., Any] | None = None,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    budget: int | str | None = None,
    plan: Plan | None = None,
    checkpoints: Sequence[str] | None = None,
    micro_batches: int = 1,
    batch_argnums: int | Sequence[int] | None = None,
    reduction: str = "mean",
    planner: str = "auto",
    time_limit_s: float | None = None,
    holomorphic: bool = False,
    allow_int: bool = False,
    static_argnums: int | Iterable[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    levers: Sequence[str] = ("recompute",),
    on_change: OnChange = "replan",
    strict: bool = False,
    **options: Any,
) -> Any:
    """``jax.value_and_grad`` whose computation keeps a budget, with the same numbers.

    Under ``jax.jit``, ``remat.jax.jit``, ``vmap``, ``scan`` and so on it is traced as ever; under ``vmap`` the whole
    batch is planned. Called on arrays it compiles itself, once for each set of shapes. Regions under
    ``jax.checkpoint`` in ``fun`` are dissolved: the plan decides what is computed again.

    Args:
        fun: returns a scalar, or a pair of it and anything else with ``has_aux``; with ``reduction="ratio"`` a pair
            (sum, denominator) in place of the scalar. None to use this as a decorator with arguments.
        argnums: which positional arguments to differentiate with respect to.
        has_aux: does ``fun`` return auxiliary results?
        budget: peak device bytes of the compiled function, everything that it sees counted (arguments, gradients, what
            lies between): an int, "4GiB", or "60%" of the plain function's own.
        plan: a plan made earlier for ``jax.value_and_grad(fun)``, instead of a budget.
        checkpoints: as in ``remat.jax.jit``: names that ``jax.ad_checkpoint.checkpoint_name`` gave to values.
        micro_batches: how many pieces the batch is cut into, as ``numpy.array_split`` cuts; one runs after the other.
        batch_argnums: positional arguments whose arrays have the batch as their first axis; None means all that are not
            differentiated. Only used with micro_batches.
        reduction: how ``fun`` combines samples, for micro-batches: "mean" over the batch, "sum", or "ratio" of what it
            returns as (sum, denominator); the ratio of a batch whose denominators are all 0 is 0.
        planner: a planner's name.
        time_limit_s: wall seconds for each round of planning; None for a fixed amount of work, so that every machine
            makes the same plan.
        holomorphic: as in ``jax.value_and_grad``.
        allow_int: as in ``jax.value_and_grad``.
        static_argnums: as in ``jax.jit``: positional arguments that are part of the function, so that Python may decide
            by them. Flags, names and functions are so by themselves.
        static_argnames: likewise, by name.
        levers: as in ``remat.jax.jit``; with micro-batches, for each of them.
        on_change: as in ``remat.jax.jit``, for calls on arrays; what is compiled around it elsewhere is not looked at.
        strict: likewise.
        **options: passed on to the planner.

    Returns:
        A callable like that of ``jax.value_and_grad``, with ``plan``, the plan of the newest trace, with ``plan_for``,
        which plans without running, and with ``lower``, ``trace``, ``eval_shape`` and ``clear_cache`` of ``jax.jit``.

    Raises:
        InvalidBudget: if the budget cannot be read.
        InfeasibleBudget: when first called, where no schedule fits; it names the smallest budget.
        PlanMismatch: when called, where the plan is for another function; with ``strict``, when first called on arrays,
            where the compiled program takes more than the budget.
    """
    on_broken = OnBroken(replans(on_change), strict)
    kept = None if checkpoints is None else tuple(checkpoints)
    request = Request(budget, plan, kept, planner, time_limit_s, options, levers=checked_levers(levers, kept))
    request.check("remat.jax.value_and_grad", takes_hints=True)
    split = Split(
        micro_batches,
        batch_argnums,
        reduction,
        _as_tuple(argnums),
        has_aux,
    )
    split.check()
    if micro_batches > 1 and (holomorphic or allow_int):
        raise UnsupportedStep("micro_batches does not go together with holomorphic and allow_int; leave it at 1")

    def of(function: Callable[..., Any]) -> Gradient:
        if not callable(function):
            raise TypeError(f"remat.jax.value_and_grad takes a function, not {type(function).__name__}")
        plain = _as_quotient(function, has_aux) if reduction == RATIO else function
        gradient = jax.value_and_grad(plain, argnums, has_aux, holomorphic=holomorphic, allow_int=allow_int)
        static = places_of(function, static_argnums, static_argnames)
        return Gradient(gradient, function, request, split, argnums, static, on_broken)

    return of if fun is None else of(fun)


def _as_tuple(numbers: int | Sequence[int]) -> tuple[int, ...]:
    return (numbers,) if isinstance(numbers, int) else tuple(numbers)


def _as_quotient(fun: Callable[..., Any], has_aux: bool) -> Callable[..., Any]:
    """The loss of a function that returns (sum, denominator)."""

    @functools.wraps(fun)
    def loss(*args: Any, **kwargs: Any) -> Any:
        result = fun(*args, **kwargs)
        main, aux = result if has_aux else (result, None)
        value = quotient(*sum_and_denominator(main, RATIO))
        return (value, aux) if has_aux else value

    return loss


@overload
def grad(fun: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False, **options: Any) -> Grad: ...
@overload
def grad(
    fun: None = None, argnums: int | Sequence[int] = 0, has_aux: bool = False, **options: Any
) -> Callable[[Callable[..., Any]], Grad]: ...


def grad(
    fun: Callable[..., Any] | None = None,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    **options: Any,
) -> Any:
    """``jax.grad`` whose computation keeps a budget; takes what ``value_and_grad`` takes."""
    made: Any = value_and_grad(fun, argnums, has_aux, **options)
    return (lambda function: Grad(made(function), has_aux)) if fun is None else Grad(made, has_aux)


@dataclass(frozen=True)
class _Static:
    """An argument that is part of the function, as one leaf, whatever it consists of."""

    value: Any


@dataclass(frozen=True)
class _Taken:
    """The arguments of a call, taken apart leaf by leaf.

    Attributes:
        structure: of the arguments, static ones as leaves.
        constant: the leaves that are part of the function, with their numbers among all leaves.
        numeric: the other leaves: arrays, numbers, tracers or shapes.
    """

    structure: Any
    constant: tuple[tuple[int, Any], ...]
    numeric: list[Any]

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any], static: frozenset[Place]) -> _Taken:
        own = tuple(_Static(arg) if number in static else arg for number, arg in enumerate(args))
        named = {name: _Static(arg) if name in static else arg for name, arg in kwargs.items()}
        leaves, structure = jax.tree.flatten((own, named))
        constant = tuple((n, leaf) for n, leaf in enumerate(leaves) if not _is_numeric(leaf))
        places = {n for n, _ in constant}
        return cls(structure, constant, [leaf for n, leaf in enumerate(leaves) if n not in places])

    def arguments(self, numeric: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Positional and named arguments with other numeric leaves."""
        leaves = list(numeric)
        for place, leaf in self.constant:
            leaves.insert(place, leaf)
        args, kwargs = jax.tree.unflatten(self.structure, leaves)
        return [_bare(arg) for arg in args], {name: _bare(arg) for name, arg in kwargs.items()}

    def key(self, tie: str, *more: Any) -> Any:
        """What a plan is remembered under."""
        return self.structure, kinds_of(self.numeric), tuple(map(repr, self.constant)), tie, *more


def _bare(argument: Any) -> Any:
    return argument.value if isinstance(argument, _Static) else argument


class Gradient(Follower):
    """What ``value_and_grad`` returns.

    Args:
        gradient: ``jax.value_and_grad`` of the loss of a whole batch.
        fun: the loss, as the user gave it.
        request: what the user asked for.
        split: how a batch is cut into micro-batches.
        argnums: as in ``jax.value_and_grad``.
        static: the arguments that are part of the function.
        on_broken: what to do where the compiled program takes more than the budget.
    """

    def __init__(
        self,
        gradient: Callable[..., Any],
        fun: Callable[..., Any],
        request: Request,
        split: Split,
        argnums: int | Sequence[int],
        static: frozenset[Place] = frozenset(),
        on_broken: OnBroken = REPLAN,
    ) -> None:
        super().__init__(request)
        self._on_broken = on_broken
        functools.update_wrapper(self, fun, updated=())
        self._gradient = gradient
        self._fun = fun
        self._split = split
        self._one_gradient = isinstance(argnums, int)
        self._static = static
        self._compiled: dict[Any, Jitted] = {}
        self._with_signature: dict[Any, Jitted] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The value and the gradients."""
        taken = _Taken.of(args, kwargs, self._static)
        if is_any_traced(taken.numeric):
            return self._traced(taken)
        refuse_shapes(taken.numeric, "remat.jax.value_and_grad")
        try:
            key = taken.structure, taken.constant
            if key not in self._compiled:

                def compiled(*flat: Any) -> Any:
                    return self._traced(_Taken(taken.structure, taken.constant, list(flat)))

                first_run = FirstRun(self, self._on_broken) if self._request.plans else None
                self._compiled[key] = Jitted(compiled, Request(), {}, first_run=first_run)
        except TypeError:
            kinds = ", ".join(sorted({type(_bare(leaf)).__name__ for _, leaf in taken.constant}))
            raise UnsupportedStep(
                f"an argument holds values that are neither arrays nor hashable ({kinds}); pass them through a closure"
            ) from None
        return self._compiled[key](*taken.numeric)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """As in ``jax.jit``: arguments are arrays or ``jax.ShapeDtypeStruct``. A function with a budget is planned."""
        return self.jitted(args, kwargs).lower(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """As in ``jax.jit``. A function with a budget is planned."""
        return self.jitted(args, kwargs).trace(*args, **kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """As in ``jax.jit``: shapes and dtypes of the results. Nothing is planned."""
        taken = _Taken.of(args, kwargs, self._static)

        def plain(*flat: Any) -> Any:
            own, named = taken.arguments(flat)
            return self._gradient(*own, **named)

        return jax.eval_shape(plain, *taken.numeric)

    def clear_cache(self) -> None:
        """As in ``jax.jit``; plans are forgotten, too, so that the next call traces and plans anew."""
        for jitted in (*self._compiled.values(), *self._with_signature.values()):
            jitted.clear_cache()
        self._compiled.clear()
        self._with_signature.clear()
        self._plans.clear()

    def plan_for(self, *args: Any, **kwargs: Any) -> Plan:
        """Plan the gradients for arguments like these, arrays or ``jax.ShapeDtypeStruct``, without running anything.

        The plan is for a call on arrays, as under ``remat.jax.jit``. Under a plain ``jax.jit`` on a CPU the plan may
        differ.

        Raises:
            InfeasibleBudget: with the smallest budget for which this function succeeds.
            ValueError: where there is nothing to plan.
        """
        self._check_plans("remat.jax.value_and_grad")
        self.lower(*args, **kwargs)
        with barriers_stay():
            tie = current_tie()
        return self._plan_of(_Taken.of(args, kwargs, self._static).key(tie))

    def jitted(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], wanted: Callable[[Any], Any] | None = None
    ) -> Jitted:
        """The function under ``remat.jax.jit`` with its own signature; what is no array is static there.

        Args:
            args: of a call.
            kwargs: likewise.
            wanted: takes value and gradients, and gives what the compiled function returns; None for both.

        Raises:
            UnsupportedStep: where one argument holds both.
        """
        places: list[tuple[Place, Any]] = [*enumerate(args), *kwargs.items()]
        static = set(self._static)
        for place, argument in places:
            if place in self._static or all(map(_is_numeric, jax.tree.leaves(argument))):
                continue
            if not jax.tree_util.all_leaves([argument]):
                raise UnsupportedStep(
                    f"argument {place!r} holds flags, names or functions beside arrays, which a compiled function "
                    "cannot take; pass them as arguments of their own, or through a closure (functools.partial)"
                )
            static.add(place)
        places_key = frozenset(static)
        key = places_key, wanted is None
        if key not in self._with_signature:

            def call(*own: Any, **named: Any) -> Any:
                results = self._traced(_Taken.of(own, named, places_key))
                return results if wanted is None else wanted(results)

            functools.update_wrapper(call, self._fun, updated=())
            self._with_signature[key] = Jitted(call, Request(), jit_options_of("static", places_key))
        return self._with_signature[key]

    def _traced(self, taken: _Taken) -> Any:
        def function(*flat: Any) -> Any:
            args, kwargs = taken.arguments(flat)
            return self._gradient(*args, **kwargs)

        is_planned = self._request.plans
        if not is_planned and self._split.count == 1:
            return function(*taken.numeric)
        if self._split.count > 1:
            return self._in_pieces(taken, is_planned)
        return self._planned(function, taken.numeric, taken.key(current_tie()))

    def _planned(self, function: Callable[..., Any], leaves: Sequence[Any], key: Any) -> Any:
        """A flat function that keeps the budget; under ``vmap`` the function of the whole batch does."""
        shapes = shapes_of(leaves)

        def plan(request: Request) -> Planned:
            return plan_function(function, leaves, request, current_tie(), shapes=shapes)

        if any(map(_private.is_batched, leaves)) and not _private.names_devices():
            if self._request.plan is not None:  # It may be for one example.
                with contextlib.suppress(PlanMismatch):
                    return self._followed(key, plan)(leaves)
            closed = jax.make_jaxpr(function)(*shapes)
            # A function that captures values of another trace cannot be handed to JAX's rules for batches.
            if not is_any_traced(closed.consts):
                return self._planned_for_a_batch(function, leaves, key)
        return self._followed(key, plan)(leaves)

    def _planned_for_a_batch(self, function: Callable[..., Any], leaves: Sequence[Any], key: Any) -> Any:
        one_example = jax.custom_batching.custom_vmap(function)

        @one_example.def_vmap
        def of_a_batch(axis_size: int, in_batched: Sequence[bool], *flat: Any) -> tuple[Any, Any]:
            axes = tuple(0 if is_batched else None for is_batched in in_batched)
            whole = jax.vmap(function, in_axes=axes, axis_size=axis_size)
            results = self._planned(whole, flat, (key, axis_size, axes))
            return results, jax.tree.map(lambda _: True, results)

        return one_example(*leaves)

    def _in_pieces(self, taken: _Taken, is_planned: bool) -> Any:
        split = self._split
        if taken.constant:
            kind = type(_bare(taken.constant[0][1])).__name__
            raise UnsupportedStep(
                f"with micro_batches, arguments are arrays and numbers, not {kind}; pass flags and names through a "
                "closure (functools.partial)"
            )
        args, kwargs = taken.arguments(taken.numeric)
        gradient_of_piece = jax.value_and_grad(loss_of_piece(self._fun, split), split.argnums, has_aux=True)

        def whole(transform: Transform) -> Callable[..., Any]:
            return summed_value_and_grad(self._fun, split, transform(gradient_of_piece))

        if not is_planned:
            value, gradients = whole(lambda function: function)(*args, **kwargs)
        else:
            tie = current_tie()
            shapes = shapes_of(taken.numeric)
            planned = self._followed(
                taken.key(tie),
                lambda request: plan_part(whole, args, kwargs, request, tie, shapes=shapes, plain=self._gradient),
            )
            value, gradients = planned(*args, **kwargs)
        return value, gradients[0] if self._one_gradient else gradients


class Grad:
    """What ``grad`` returns."""

    def __init__(self, gradient: Gradient, has_aux: bool) -> None:
        functools.update_wrapper(self, gradient, updated=())
        self._gradient_and_value = gradient
        self._has_aux = has_aux

    @property
    def plan(self) -> Plan | None:
        """The plan of the newest trace; None before, or without a budget."""
        return self._gradient_and_value.plan

    @property
    def graph(self) -> Graph | None:
        """The computation that ``plan`` is for."""
        return self._gradient_and_value.graph

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The gradients, with the auxiliary results where there are any."""
        return self._without_value(self._gradient_and_value(*args, **kwargs))

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """As in ``jax.jit``: arguments are arrays or ``jax.ShapeDtypeStruct``. A function with a budget is planned."""
        return self._gradient_and_value.jitted(args, kwargs, self._without_value).lower(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """As in ``jax.jit``. A function with a budget is planned."""
        return self._gradient_and_value.jitted(args, kwargs, self._without_value).trace(*args, **kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """As in ``jax.jit``: shapes and dtypes of the results. Nothing is planned."""
        return self._without_value(self._gradient_and_value.eval_shape(*args, **kwargs))

    def clear_cache(self) -> None:
        """As in ``jax.jit``; plans are forgotten, too."""
        self._gradient_and_value.clear_cache()

    def plan_for(self, *args: Any, **kwargs: Any) -> Plan:
        """As in ``value_and_grad``."""
        return self._gradient_and_value.plan_for(*args, **kwargs)

    def _without_value(self, results: Any) -> Any:
        value, gradients = results
        return (gradients, value[1]) if self._has_aux else gradients


def _is_numeric(leaf: Any) -> bool:
    """Arrays and numbers are traced; flags, names and functions are part of the function."""
    if isinstance(leaf, bool | str | bytes | _Static):
        return False
    return isinstance(leaf, int | float | complex) or (hasattr(leaf, "dtype") and hasattr(leaf, "shape"))
