"""``value_and_grad`` and ``grad``: stand in for JAX's own and keep a budget."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from remat.core.errors import UnsupportedStep
from remat.core.graph import Graph
from remat.core.plan import Plan
from remat.fit.request import Request
from remat.jax import _private
from remat.jax.api.jit import jit
from remat.jax.context import current_tie
from remat.jax.micro_batches import Split, loss_of_piece, quotient, summed_value_and_grad
from remat.jax.peak import shape_of
from remat.jax.planned import Follower, plan_function
from remat.jax.planned_part import Transform, plan_part
from remat.micro_batches.reduce import RATIO, sum_and_denominator


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    budget: int | str | None = None,
    plan: Plan | None = None,
    micro_batches: int = 1,
    batch_argnums: int | Sequence[int] | None = None,
    reduction: str = "mean",
    planner: str = "auto",
    time_limit_s: float | None = None,
    holomorphic: bool = False,
    allow_int: bool = False,
    **options: Any,
) -> Gradient:
    """``jax.value_and_grad`` whose computation keeps a budget, with the same numbers.

    Under ``jax.jit``, ``remat.jax.jit``, ``vmap``, ``scan`` and so on it is traced as ever. Called on arrays it
    compiles itself, once for each set of shapes. Regions under ``jax.checkpoint`` in ``fun`` are dissolved: the plan
    decides what is computed again.

    Args:
        fun: returns a scalar, or a pair of it and anything else with ``has_aux``; with ``reduction="ratio"`` a pair
            (sum, denominator) in place of the scalar.
        argnums: which positional arguments to differentiate with respect to.
        has_aux: does ``fun`` return auxiliary results?
        budget: peak device bytes of the compiled function, everything that it sees counted (arguments, gradients, what
            lies between): an int, "4GiB", or "60%" of the plain function's own.
        plan: a plan made earlier for ``jax.value_and_grad(fun)``, instead of a budget.
        micro_batches: how many pieces the batch is cut into, as ``numpy.array_split`` cuts; one runs after the other.
        batch_argnums: positional arguments whose arrays have the batch as their first axis; None means all that are not
            differentiated. Only used with micro_batches.
        reduction: how ``fun`` combines samples, for micro-batches: "mean" over the batch, "sum", or "ratio" of what it
            returns as (sum, denominator); the ratio of a batch whose denominators are all 0 is 0.
        planner: a planner's name.
        time_limit_s: wall seconds for each round of planning.
        holomorphic: as in ``jax.value_and_grad``.
        allow_int: as in ``jax.value_and_grad``.
        **options: passed on to the planner.

    Returns:
        A callable like that of ``jax.value_and_grad``, with ``plan``: the plan of the newest trace.

    Raises:
        InvalidBudget: if the budget cannot be read.
        InfeasibleBudget: when first called, where no schedule fits; it names the smallest budget.
        PlanMismatch: when called, where the plan is for another function.
    """
    if not callable(fun):
        raise TypeError(f"remat.jax.value_and_grad takes a function, not {type(fun).__name__}")
    request = Request(budget, plan, None, planner, time_limit_s, options)
    request.check("remat.jax.value_and_grad")
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
    plain = _as_quotient(fun, has_aux) if reduction == RATIO else fun
    gradient = jax.value_and_grad(plain, argnums, has_aux, holomorphic=holomorphic, allow_int=allow_int)
    return Gradient(gradient, fun, request, split, argnums)


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


def grad(fun: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False, **options: Any) -> Grad:
    """``jax.grad`` whose computation keeps a budget; takes what ``value_and_grad`` takes."""
    return Grad(value_and_grad(fun, argnums, has_aux, **options), has_aux)


class Gradient(Follower):
    """What ``value_and_grad`` returns.

    Args:
        gradient: ``jax.value_and_grad`` of the loss of a whole batch.
        fun: the loss, as the user gave it.
        request: what the user asked for.
        split: how a batch is cut into micro-batches.
        argnums: as in ``jax.value_and_grad``.
    """

    def __init__(
        self,
        gradient: Callable[..., Any],
        fun: Callable[..., Any],
        request: Request,
        split: Split,
        argnums: int | Sequence[int],
    ) -> None:
        super().__init__(request)
        functools.update_wrapper(self, fun)
        self._gradient = gradient
        self._fun = fun
        self._split = split
        self._one_gradient = isinstance(argnums, int)
        self._compiled: dict[Any, Any] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The value and the gradients."""
        leaves, structure = jax.tree.flatten((args, kwargs))
        constant = tuple((n, leaf) for n, leaf in enumerate(leaves) if not _is_numeric(leaf))
        places = {n for n, _ in constant}
        numeric = [leaf for n, leaf in enumerate(leaves) if n not in places]
        if any(_private.is_traced(leaf) for leaf in numeric):
            return self._traced(structure, constant, numeric)
        try:
            key = structure, constant
            if key not in self._compiled:
                self._compiled[key] = jit(lambda *flat: self._traced(structure, constant, flat))
        except TypeError:
            kinds = ", ".join(sorted({type(leaf).__name__ for _, leaf in constant}))
            raise UnsupportedStep(
                f"an argument holds values that are neither arrays nor hashable ({kinds}); pass them through a closure"
            ) from None
        return self._compiled[key](*numeric)

    def _traced(self, structure: Any, constant: Sequence[tuple[int, Any]], numeric: Sequence[Any]) -> Any:
        def function(*flat: Any) -> Any:
            args, kwargs = jax.tree.unflatten(structure, _merged(constant, flat))
            return self._gradient(*args, **kwargs)

        is_planned = self._request.plans
        if not is_planned and self._split.count == 1:
            return function(*numeric)
        shapes = tuple(shape_of(leaf) for leaf in numeric)
        key = (structure, tuple(map(str, shapes)), tuple(map(repr, constant)), current_tie())
        if self._split.count > 1:
            args, kwargs = jax.tree.unflatten(structure, _merged(constant, numeric))
            return self._in_pieces(args, kwargs, constant, shapes, key, is_planned)
        planned = self._followed(
            key,
            lambda request: plan_function(function, numeric, request, current_tie(), shapes=shapes),
        )
        return planned(numeric)

    def _in_pieces(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        constant: Sequence[tuple[int, Any]],
        shapes: Sequence[jax.ShapeDtypeStruct],
        key: Any,
        is_planned: bool,
    ) -> Any:
        if constant:
            raise UnsupportedStep(
                f"with micro_batches, arguments are arrays and numbers, not {type(constant[0][1]).__name__}; pass "
                "flags and names through a closure (functools.partial)"
            )
        split = self._split
        gradient_of_piece = jax.value_and_grad(loss_of_piece(self._fun, split), split.argnums, has_aux=True)

        def whole(transform: Transform) -> Callable[..., Any]:
            return summed_value_and_grad(self._fun, split, transform(gradient_of_piece))

        if not is_planned:
            value, gradients = whole(lambda function: function)(*args, **kwargs)
        else:
            tie = current_tie()
            planned = self._followed(
                key,
                lambda request: plan_part(whole, args, kwargs, request, tie, shapes=shapes, plain=self._gradient),
            )
            value, gradients = planned(*args, **kwargs)
        return value, gradients[0] if self._one_gradient else gradients


class Grad:
    """What ``grad`` returns."""

    def __init__(self, gradient: Gradient, has_aux: bool) -> None:
        functools.update_wrapper(self, gradient)
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
        value, gradients = self._gradient_and_value(*args, **kwargs)
        return (gradients, value[1]) if self._has_aux else gradients


def _is_numeric(leaf: Any) -> bool:
    """Arrays and numbers are traced; flags, names and functions are part of the function."""
    if isinstance(leaf, bool | str | bytes):
        return False
    return isinstance(leaf, int | float | complex) or (hasattr(leaf, "dtype") and hasattr(leaf, "shape"))


def _merged(constant: Sequence[tuple[int, Any]], numeric: Sequence[Any]) -> list[Any]:
    merged = list(numeric)
    for place, leaf in constant:
        merged.insert(place, leaf)
    return merged
